"""The models that an engine computes with: transformer and VAE of one folder.

Owns how they come to be, with or without values, and the names of their tensors; never computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import init_empty_weights
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from torch import Tensor, nn

from spot_runtime.diffusion.geometry import read_json
from spot_runtime.diffusion.transformer import load_transformer
from spot_runtime.parallel.weights import TensorSpec, WeightSpec

TRANSFORMER = "transformer"
VAE = "vae"


def load_parts(folder: Path, device: torch.device, dtype: torch.dtype) -> nn.ModuleDict:
    """Both from the folder, on the device."""
    vae = AutoencoderKLQwenImage.from_pretrained(folder, subfolder="vae", dtype=dtype, local_files_only=True)
    return nn.ModuleDict({TRANSFORMER: load_transformer(folder, device, dtype), VAE: vae.to(device)})


def empty_parts(folder: Path, dtype: torch.dtype) -> nn.ModuleDict:
    """Both without values: their parameters are on the meta device, so they take no memory and touch no GPU."""
    with init_empty_weights(include_buffers=False):
        transformer = QwenImageTransformer2DModel.from_config(read_json(folder, "transformer/config.json"))
        vae = AutoencoderKLQwenImage.from_config(read_json(folder, "vae/config.json"))
    parts = nn.ModuleDict({TRANSFORMER: transformer, VAE: vae})
    return parts.to(dtype).eval().requires_grad_(False)


def transformer_blocks(parts: nn.ModuleDict) -> nn.ModuleList:
    blocks = parts[TRANSFORMER].transformer_blocks
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def base_tensors(parts: nn.ModuleDict) -> dict[str, Tensor]:
    """The base model's parameters by name; an attached policy is not among them, a merged one must not be bound."""
    named = ((name, parameter.data) for name, parameter in parts.named_parameters() if ".lora_" not in name)
    return {name.replace(".base_layer.", "."): data for name, data in named}


def weight_spec(parts: nn.ModuleDict) -> WeightSpec:
    return {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in base_tensors(parts).items()}


def install(parts: nn.ModuleDict, tensors: Mapping[str, Tensor]) -> None:
    """Parameters that have no values yet get theirs."""
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        module = parts.get_submodule(path)
        if getattr(module, leaf).is_meta:
            setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
