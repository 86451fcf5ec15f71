"""The Qwen-Image transformer as a velocity field over a ragged batch. Owns padding, masks and timesteps; never steps, never trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence


def load_transformer(folder: Path, device: torch.device, dtype: torch.dtype) -> QwenImageTransformer2DModel:
    """The frozen transformer of a pipeline folder, in evaluation mode."""
    model = QwenImageTransformer2DModel.from_pretrained(
        folder, subfolder="transformer", dtype=dtype, local_files_only=True
    )
    return model.to(device).eval().requires_grad_(False)


def predict_velocity(
    transformer: Any,
    latents: Tensor,
    sigma: Tensor,
    embeds: Sequence[Tensor],
    grid: tuple[int, int],
    *,
    text_tokens_min: int = 1,
) -> Tensor:
    """v [B, L, C] fp32 at `latents` [B, L, C] and noise levels `sigma` [B], each row with its own prompt.

    Embeds [T_b, W] may differ in length: shorter ones are padded and masked. Text positions count from the start of the text and image
    positions from the image's centre, so a row does not depend on the rows beside it (beyond rounding).
    """
    dtype = model_dtype(transformer)
    text, mask = pad_embeds(embeds, text_tokens_min)
    velocity: Tensor = transformer(
        hidden_states=latents.to(dtype),
        timestep=model_timestep(sigma).to(dtype),
        encoder_hidden_states=text.to(dtype),
        encoder_hidden_states_mask=mask,
        img_shapes=[[(1, *grid)]] * len(latents),
        return_dict=False,
    )[0]
    return velocity.float()


def model_dtype(transformer: Any) -> torch.dtype:
    """What the model computes in. Its own `dtype` walks over all modules, which shows in the steps of a small model."""
    dtype: torch.dtype = transformer.proj_out.weight.dtype
    return dtype


def model_timestep(sigma: Tensor) -> Tensor:
    """sigma as the pipeline hands it to the transformer: through the scheduler's 0..1000 and back, rounding included."""
    return sigma * 1000 / 1000


def pad_embeds(embeds: Sequence[Tensor], width_min: int = 1) -> tuple[Tensor, Tensor | None]:
    """[B, T, W] with T >= `width_min`, and a mask [B, T] that is true on real tokens, None where all are."""
    lengths = [len(e) for e in embeds]
    padded = pad_sequence(list(embeds), batch_first=True)
    padded = functional.pad(padded, (0, 0, 0, max(width_min - padded.shape[1], 0)))
    width = padded.shape[1]
    if set(lengths) == {width}:
        return padded, None
    places = torch.arange(width, device=padded.device)
    return padded, places[None] < torch.tensor(lengths, device=padded.device)[:, None]
