"""Prompt embeddings by the model's own text encoder. Owns the one place that loads it; workers and trainers only ever see its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from spot_runtime.diffusion.geometry import model_folder


class PromptEncoder:
    """Text encoder and tokenizer of a Qwen-Image pipeline folder, run as the pipeline runs them."""

    def __init__(self, model: str, *, device: str = "cpu", dtype: str = "float32") -> None:
        from diffusers import QwenImagePipeline

        self._pipeline: Any = QwenImagePipeline.from_pretrained(
            model_folder(model),
            transformer=None,
            vae=None,
            scheduler=None,
            dtype=getattr(torch, dtype),
            local_files_only=True,
        ).to(device)

    @property
    def module(self) -> nn.Module:
        """The text encoder, whose weights may be elsewhere between two calls."""
        module: nn.Module = self._pipeline.text_encoder
        return module

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> list[np.ndarray]:
        """One array [text tokens, width] fp32 a prompt, template prefix dropped. Each is encoded alone: no result depends on the others."""
        return [self._encode(prompt) for prompt in prompts]

    def _encode(self, prompt: str) -> np.ndarray:
        embeds, mask = self._pipeline.encode_prompt([prompt])
        assert mask is None, "one prompt alone has no padding"
        array: np.ndarray = embeds[0].float().cpu().numpy()
        return array
