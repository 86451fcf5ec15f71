"""Untrained Qwen-Image pipelines of any size. Owns the layer sizes; never trains and never ships weights.

The parts are the stock classes (QwenImageTransformer2DModel, AutoencoderKLQwenImage, Qwen2.5-VL, FlowMatchEulerDiscreteScheduler), so
that a folder made here goes through the same `from_pretrained` as `Qwen/Qwen-Image`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from spot_runtime.models.tokenizer import make_tokenizer


@dataclass(frozen=True)
class PipelineSize:
    """Sizes of one tiny pipeline. `latent_channels` is z of the VAE, which shrinks each side by 4."""

    layers: int
    heads: int
    head_dim: int
    text_dim: int = 64
    latent_channels: int = 4
    vae_base_dim: int = 8


TINY = PipelineSize(layers=3, heads=4, head_dim=32)
"""The shipped base: 1.9 M transformer parameters, about 2 ms a sample-step at batch 8 on one 2020s core."""
BENCH = PipelineSize(layers=6, heads=8, head_dim=32)
"""The bench model, to be sampled at BENCH_RESOLUTION: one denoising step of one sample takes 150-300 ms on one core."""
BENCH_RESOLUTION = 256
TEXT_WEIGHT_STD = 0.2
"""Standard deviation of the random text encoder's weights: at the usual 0.02 attention is flat and each token encodes only itself."""


def build_pipeline(size: PipelineSize, words: Iterable[str], seed: int) -> QwenImagePipeline:
    """A pipeline with random weights, the same for the same `seed`.

    Args:
        size: layer sizes.
        words: words that become one token each.
        seed: seeds every weight.
    """
    tokenizer = make_tokenizer(words)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return QwenImagePipeline(
            scheduler=_noise_scheduler(),
            vae=_vae(size),
            text_encoder=_text_encoder(size, tokenizer),
            tokenizer=tokenizer,
            transformer=_transformer(size),
        )


def rope_axes(head_dim: int) -> tuple[int, int, int]:
    """Splits `head_dim` into even frame, height and width parts that sum to it, the frame part smallest, as in Qwen-Image (16, 56, 56)."""
    frame = next(f for f in range(max(2, head_dim // 8 // 2 * 2), head_dim, 2) if (head_dim - f) % 4 == 0)
    side = (head_dim - frame) // 2
    return frame, side, side


def _transformer(size: PipelineSize) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * size.latent_channels,
        out_channels=size.latent_channels,
        num_layers=size.layers,
        attention_head_dim=size.head_dim,
        num_attention_heads=size.heads,
        joint_attention_dim=size.text_dim,
        axes_dims_rope=rope_axes(size.head_dim),
    )


def _vae(size: PipelineSize) -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(
        base_dim=size.vae_base_dim,
        z_dim=size.latent_channels,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, False],
        latents_mean=[0.0] * size.latent_channels,
        latents_std=[1.0] * size.latent_channels,
    )


def _text_encoder(size: PipelineSize, tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    text_config = {
        "vocab_size": len(tokenizer),
        "hidden_size": size.text_dim,
        "intermediate_size": 2 * size.text_dim,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": TEXT_WEIGHT_STD,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    vision_config = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": size.text_dim,
        "patch_size": 14,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(text_config=text_config, vision_config=vision_config, initializer_range=TEXT_WEIGHT_STD)
    return Qwen2_5_VLForConditionalGeneration(config).eval().requires_grad_(False)


def _noise_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The schedule of Qwen-Image: resolution-dependent exponential shift that ends at .02."""
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift=1.0,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )
