"""Makes a row of a CPU batch come out bit for bit as it does alone. Owns the two places where a batch leaks into its rows; never trains.

Matrix products with few rows choose another order of summation, and attention over padded keys adds up other partial sums. Both are only
rounding, but a sharp model turns 1e-7 into 1e-4 over a trajectory, and a resumed request finds other mates in its batch. So matrices with
one row a sample get at least ROWS_MIN rows, short texts are padded to as many tokens, and each sample attends over its own length.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen
from torch import Tensor, nn
from torch.nn import functional

ROWS_MIN: Final = 16
"""From so many rows on, fp32 products of up to 1024 summands are summed in one order (measured with MKL on AVX-512)."""


def make_batch_invariant(transformer: Any) -> None:
    """Changes a QwenImageTransformer2DModel in place; what it computes stays the same up to rounding."""
    transformer.set_attn_processor(RaggedAttention())
    _pad_rows(transformer.time_text_embed)
    _pad_rows(transformer.norm_out)
    for block in transformer.transformer_blocks:
        _pad_rows(block.img_mod)
        _pad_rows(block.txt_mod)


class PaddedRows(nn.Module):
    """A linear layer that sees at least ROWS_MIN rows; zeros fill up."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, rows: Tensor) -> Tensor:
        missing = max(ROWS_MIN - len(rows), 0)
        result: Tensor = self.linear(functional.pad(rows, (0, 0, 0, missing)))
        return result[: len(rows)]


class RaggedAttention:
    """Joint attention of text and image tokens where each sample attends over its own text length, without a mask.

    Text that `encoder_hidden_states_mask` [B, T] marks as padding keeps its place but gets zeros.
    """

    _attention_backend = None
    _parallel_config = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert attention_mask is None, "padding comes as encoder_hidden_states_mask"
        assert image_rotary_emb is not None, "Qwen-Image rotates queries and keys"
        image = _projections(attn, hidden_states, ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"), image_rotary_emb[0])
        text = _projections(
            attn,
            encoder_hidden_states,
            ("add_q_proj", "add_k_proj", "add_v_proj"),
            ("norm_added_q", "norm_added_k"),
            image_rotary_emb[1],
        )
        text_out, image_out = _attend(text, image, _lengths(encoder_hidden_states, encoder_hidden_states_mask))
        return attn.to_out[0](image_out.flatten(2)), attn.to_add_out(text_out.flatten(2))


def _projections(
    attn: Any, x: Tensor, linears: tuple[str, ...], norms: tuple[str, ...], rotary: Tensor
) -> list[Tensor]:
    """Query, key, value [B, tokens, heads, head_dim], the first two normalised and rotated."""
    query, key, value = (getattr(attn, name)(x).unflatten(-1, (attn.heads, -1)) for name in linears)
    query, key = (getattr(attn, name)(part) for name, part in zip(norms, (query, key), strict=True))
    query, key = (apply_rotary_emb_qwen(part, rotary, use_real=False) for part in (query, key))
    return [query, key, value]


def _attend(text: list[Tensor], image: list[Tensor], lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Text and image outputs [B, tokens, heads, head_dim], one attention a sample."""
    text_out, image_out = torch.zeros_like(text[0]), torch.empty_like(image[0])
    for b, length in enumerate(lengths):
        query, key, value = (
            torch.cat([t[b, :length], i[b]]).transpose(0, 1)[None] for t, i in zip(text, image, strict=True)
        )
        out = functional.scaled_dot_product_attention(query, key, value)[0].transpose(0, 1)
        text_out[b, :length], image_out[b] = out[:length], out[length:]
    return text_out, image_out


def _lengths(text: Tensor, mask: Tensor | None) -> list[int]:
    if mask is None:
        return [text.shape[1]] * len(text)
    lengths: list[int] = mask.sum(1).tolist()
    return lengths


def _pad_rows(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, PaddedRows(child))
        else:
            _pad_rows(child)
