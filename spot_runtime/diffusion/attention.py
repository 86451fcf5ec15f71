"""Joint attention of text and image tokens for the Qwen-Image transformer, at any sequence-parallel degree.

Owns the attention processor, and where a forward is spread over ranks and put together again; never starts a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen
from torch import Tensor
from torch.nn import functional

from spot_runtime.parallel.ulysses import TokenShards

Attend = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor | None], tuple[Tensor, Tensor]]
"""Query, key and value of text [B, T, H, D] and image [B, L, H, D], and a mask [B, T] of real text or None: both outputs."""


def install_attention(transformer: Any, shards: TokenShards, attend: Attend) -> None:
    """Changes a QwenImageTransformer2DModel in place: its forward takes and gives all image tokens, whatever `shards` holds meanwhile.

    Within it a rank has its own image tokens and all of the text. To be called with `return_dict=False`.
    """
    transformer.set_attn_processor(JointAttention(shards, attend))
    transformer.register_forward_pre_hook(_spread(shards), with_kwargs=True)
    transformer.pos_embed.register_forward_hook(lambda _, __, angles: (shards.own_tokens(angles[0], 0), angles[1]))
    transformer.register_forward_hook(lambda _, __, outputs: (shards.gather_tokens(outputs[0]),))


def _spread(shards: TokenShards) -> Callable[[Any, Any, dict[str, Any]], tuple[Any, dict[str, Any]]]:
    def spread(_: Any, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        latents = named["hidden_states"]
        shards.tokens = latents.shape[1]
        return inputs, named | {"hidden_states": shards.own_tokens(latents, 1)}

    return spread


class JointAttention:
    """The attention processor. Text that `encoder_hidden_states_mask` [B, T] marks as padding is no key of any query."""

    _attention_backend = None
    _parallel_config = None

    def __init__(self, shards: TokenShards, attend: Attend) -> None:
        self._shards = shards
        self._attend = attend

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
        shards = self._shards
        image = _projections(attn, hidden_states, ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"), image_rotary_emb[0])
        text = _projections(
            attn,
            encoder_hidden_states,
            ("add_q_proj", "add_k_proj", "add_v_proj"),
            ("norm_added_q", "norm_added_k"),
            image_rotary_emb[1],
        )
        if shards.group is not None:
            image = list(shards.to_heads(torch.cat(image, -1)).chunk(3, -1))  # one exchange for all three
            text = [shards.own_heads(part) for part in text]
        text_out, image_out = self._attend(text, image, encoder_hidden_states_mask)
        image_out, text_out = shards.to_tokens(image_out), shards.gather_heads(text_out)
        return attn.to_out[0](image_out.flatten(2)), attn.to_add_out(text_out.flatten(2))


def attend_masked(text: Sequence[Tensor], image: Sequence[Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """One attention over the whole batch."""
    query, key, value = (torch.cat(parts, 1).transpose(1, 2) for parts in zip(text, image, strict=True))
    tokens = image[0].shape[1]
    keys = None if mask is None else functional.pad(mask.bool(), (0, tokens), value=True)[:, None, None]
    out = functional.scaled_dot_product_attention(query, key, value, attn_mask=keys).transpose(1, 2)
    return out[:, :-tokens], out[:, -tokens:]


def attend_ragged(text: Sequence[Tensor], image: Sequence[Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """One attention a sample, over its own length and without a mask; the outputs of padded text are zeros.

    So a sample comes out the same to the bit whatever the lengths beside it.
    """
    text_out, image_out = torch.zeros_like(text[0]), torch.empty_like(image[0])
    for b, length in enumerate(_lengths(text[0], mask)):
        query, key, value = (
            torch.cat([t[b, :length], i[b]]).transpose(0, 1)[None] for t, i in zip(text, image, strict=True)
        )
        out = functional.scaled_dot_product_attention(query, key, value)[0].transpose(0, 1)
        text_out[b, :length], image_out[b] = out[:length], out[length:]
    return text_out, image_out


def _projections(
    attn: Any, x: Tensor, linears: tuple[str, ...], norms: tuple[str, ...], rotary: Tensor
) -> list[Tensor]:
    """Query, key, value [B, tokens, heads, head_dim], the first two normalised and rotated."""
    query, key, value = (getattr(attn, name)(x).unflatten(-1, (attn.heads, -1)) for name in linears)
    query, key = (getattr(attn, name)(part) for name, part in zip(norms, (query, key), strict=True))
    query, key = (apply_rotary_emb_qwen(part, rotary, use_real=False) for part in (query, key))
    return [query, key, value]


def _lengths(text: Tensor, mask: Tensor | None) -> list[int]:
    if mask is None:
        return [text.shape[1]] * len(text)
    lengths: list[int] = mask.sum(1).tolist()
    return lengths
