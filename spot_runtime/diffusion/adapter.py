"""The policy as a LoRA adapter over a frozen transformer. Owns tensor names, digest, binding and export; never trains, never loads a model.

    W' x = W x + (alpha / rank) B (A x)

An adapter travels as `dict[str, np.ndarray]`: "<module>.lora_A.weight" [rank, in], "<module>.lora_B.weight" [out, rank], and ALPHA_KEY [1].
Alpha is part of the tensors, so it can never be lost on the way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from spot_runtime.diffusion.sharding import copy_into, to_numpy
from spot_runtime.errors import PolicyMismatchError

Adapter = Mapping[str, np.ndarray]

ALPHA_KEY: Final = "lora_alpha"
NAME: Final = "policy"
"""Name of the one adapter that is attached to a transformer."""
TARGET_SUFFIXES: Final = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "img_mlp.net.0.proj",
    "img_mlp.net.2",
    "txt_mlp.net.0.proj",
    "txt_mlp.net.2",
)
"""Every matrix of a Qwen-Image block except the modulations."""
FUSION_SHARE: Final = 1 / 8
_WEIGHTS_FILE: Final = "pytorch_lora_weights.safetensors"
_METADATA_KEY: Final = "lora_adapter_metadata"


def target_modules(transformer: nn.Module) -> tuple[str, ...]:
    """Full names of the modules that an adapter covers."""
    return tuple(name for name, _ in transformer.named_modules() if name.endswith(TARGET_SUFFIXES))


def adapter_modules(adapter: Adapter) -> tuple[str, ...]:
    """Full names of the modules that `adapter` holds tensors for, sorted."""
    return tuple(sorted({name.rsplit(".lora_", 1)[0] for name in adapter if name != ALPHA_KEY}))


def initial_adapter(transformer: nn.Module, rank: int, alpha: int, seed: int) -> dict[str, np.ndarray]:
    """A seeded start that changes nothing: A normal with standard deviation 1 / rank, B zero, both fp32."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, 0], dtype=np.uint64)))
    adapter: dict[str, np.ndarray] = {ALPHA_KEY: np.array([alpha], dtype=np.float32)}
    for module in sorted(target_modules(transformer)):
        linear = transformer.get_submodule(module)
        inputs, outputs = int(linear.in_features), int(linear.out_features)  # type: ignore[arg-type]
        normal = generator.standard_normal((rank, inputs), dtype=np.float32)
        adapter[f"{module}.lora_A.weight"] = normal / np.float32(rank)
        adapter[f"{module}.lora_B.weight"] = np.zeros((outputs, rank), dtype=np.float32)
    return adapter


def adapter_digest(adapter: Adapter) -> str:
    """SHA-256 over names, dtypes, shapes and bytes in name order."""
    digest = hashlib.sha256()
    for name in sorted(adapter):
        array = np.ascontiguousarray(adapter[name])
        digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


class AttachedAdapter:
    """The one LoRA adapter attached to a transformer, by peft; its weights are exchanged in place.

    Where the rank is FUSION_SHARE of a matrix or more, (W + alpha / rank B A) x is computed as such, not in two parts: more arithmetic in
    the backward pass, but a fifth less time, for it moves less memory.

    Construction attaches it with the modules, rank and alpha of `like`, in the model's dtype or in `dtype`. Raises PolicyMismatchError
    where `like` does not fit the model.
    """

    def __init__(self, transformer: Any, like: Adapter, dtype: torch.dtype | None = None) -> None:
        self._transformer = transformer
        self.reference = nn.Module()  # the transformer's own weights are, as they stay where they are
        self._modules = fitting_modules(transformer, like)
        rank, alpha = adapter_rank(like), float(like[ALPHA_KEY][0])
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(self._modules))
        transformer.add_adapter(config, adapter_name=NAME)
        _fuse_layers(transformer, self._modules)
        self._alpha = alpha
        self.refresh()
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(dtype or parameter.dtype)
        self._signature = {name: tuple(p.shape) for name, p in self.parameters.items()} | {ALPHA_KEY: (alpha,)}
        self.bind(like)

    def refresh(self) -> None:
        """After the transformer was sharded."""
        self.parameters = _adapter_parameters(self._transformer)

    def fits(self, adapter: Adapter) -> bool:
        """Whether `bind` would take it: same tensors, shapes and alpha."""
        return _signature(adapter) == self._signature

    def bind(self, adapter: Adapter) -> None:
        """Copies every tensor of `adapter` in. Raises PolicyMismatchError unless names, shapes and alpha are exactly the attached ones."""
        require_same(_signature(adapter), self._signature)
        for name, parameter in self.parameters.items():
            copy_into(parameter, adapter[name])

    def detach(self) -> None:
        """Gives the transformer its own modules back; this object is of no use afterwards."""
        self._transformer.unload_lora()

    def state(self) -> dict[str, np.ndarray]:
        """A copy of the adapter as it stands."""
        tensors = {name: to_numpy(p) for name, p in self.parameters.items()}
        return {ALPHA_KEY: np.array([self._alpha], dtype=np.float32), **tensors}

    def enable(self, on: bool) -> None:
        """Off: the transformer computes exactly what it did before the adapter was attached."""
        if on:
            self._transformer.enable_adapters()
        else:
            self._transformer.disable_adapters()


def _fuse_layers(transformer: nn.Module, modules: Iterable[str]) -> None:
    for module in modules:
        layer: Any = transformer.get_submodule(module)
        if layer.r[NAME] >= FUSION_SHARE * min(layer.in_features, layer.out_features):
            layer.forward = partial(_fused_forward, layer)


def _fused_forward(layer: Any, x: Tensor) -> Tensor:
    """What peft's LoRA layer computes, with the update added to the matrix first."""
    base = layer.base_layer
    if layer.disable_adapters:
        result: Tensor = base(x)
        return result
    if torch.is_autocast_enabled(x.device.type):  # the sum would be rounded to bf16, and most of the update lost
        unfused: Tensor = type(layer).forward(layer, x)
        return unfused
    low, high = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
    return functional.linear(x, torch.addmm(base.weight, high, low, alpha=layer.scaling[NAME]), base.bias)


def adapter_rank(adapter: Adapter) -> int:
    """Rank of an adapter. Raises PolicyMismatchError unless it has tensors, all of one rank, and an alpha."""
    ranks = {array.shape[0] for name, array in adapter.items() if name.endswith(".lora_A.weight")}
    if len(ranks) != 1 or ALPHA_KEY not in adapter:
        raise PolicyMismatchError(
            f"adapter with ranks {sorted(ranks)}: must bind at least 1 module, with one rank and {ALPHA_KEY}"
        )
    return int(ranks.pop())


def lora_scale(adapter: Adapter) -> float:
    """alpha / rank."""
    return float(adapter[ALPHA_KEY][0]) / adapter_rank(adapter)


def fitting_modules(transformer: nn.Module, adapter: Adapter) -> tuple[str, ...]:
    """Modules of `adapter`, after a check that every tensor has a place in the bare model and every place its tensor.

    Raises PolicyMismatchError that names the first tensor at odds.
    """
    rank, modules = adapter_rank(adapter), adapter_modules(adapter)
    linears = {name: module for name, module in transformer.named_modules() if isinstance(module, nn.Linear)}
    missing = sorted(set(modules) - set(linears))
    if missing:
        raise PolicyMismatchError(f"adapter names {len(missing)} modules that the model lacks, the first {missing[0]}")
    wanted: dict[str, tuple[float, ...]] = {ALPHA_KEY: (float(adapter[ALPHA_KEY][0]),)}
    for module in modules:
        wanted[f"{module}.lora_A.weight"] = (rank, linears[module].in_features)
        wanted[f"{module}.lora_B.weight"] = (linears[module].out_features, rank)
    require_same(_signature(adapter), wanted)
    return modules


def export_adapter(folder: Path, adapter: Adapter) -> Path:
    """Writes `adapter` as the file that `QwenImagePipeline.load_lora_weights(folder)` reads, alpha and rank in its metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"transformer.{name}": torch.from_numpy(np.ascontiguousarray(array))
        for name, array in adapter.items()
        if name != ALPHA_KEY
    }
    metadata = {
        "transformer.r": adapter_rank(adapter),
        "transformer.lora_alpha": float(adapter[ALPHA_KEY][0]),
        "transformer.target_modules": list(adapter_modules(adapter)),
    }
    path = folder / _WEIGHTS_FILE
    save_file(tensors, path, metadata={"format": "pt", _METADATA_KEY: json.dumps(metadata)})
    return path


def _adapter_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    marker = f".{NAME}."
    return {name.replace(marker, "."): p for name, p in transformer.named_parameters() if marker in name}


def _signature(adapter: Adapter) -> dict[str, tuple[float, ...]]:
    shapes: dict[str, tuple[float, ...]] = {name: array.shape for name, array in adapter.items() if name != ALPHA_KEY}
    if ALPHA_KEY in adapter:
        shapes[ALPHA_KEY] = (float(adapter[ALPHA_KEY][0]),)
    return shapes


def require_same(given: Mapping[str, tuple[float, ...]], wanted: Mapping[str, tuple[float, ...]]) -> None:
    """Raises PolicyMismatchError that names the first tensor whose shape is not the wanted one."""
    odd = sorted({name for name, _ in given.items() ^ wanted.items()})
    if odd:
        shapes = f"{given.get(odd[0], 'absent')}, must be {wanted.get(odd[0], 'absent')}"
        raise PolicyMismatchError(f"adapter and model differ in {len(odd)} tensors, the first {odd[0]}: {shapes}")
