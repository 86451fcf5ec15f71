"""The velocity field over a batch of which some samples do without a forward. Owns the split of the batch; never decides for a sample.

m = modulated input of the first block,  h = img_in(x),  r = the residual that the sample kept
due:      v = transformer(x), only over these rows;  r = (input of norm_out) - h
not due:  v = proj_out(norm_out(h + r))

In a sequence-parallel group every rank has h, m and r of all tokens: they cost a small part of a forward, and a sample goes on at another
degree with the cache it had. All ranks decide alike, because they decide by the same memory and the same numbers: rank 0's sums count, and
a rank that did not see a sample's last denoising step takes the memory of the first that did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spot_runtime.diffusion.cache.step_cache import CachedSample
from spot_runtime.diffusion.transformer import model_dtype, model_timestep, predict_velocity
from spot_runtime.parallel.group import SequenceGroup
from spot_runtime.parallel.ulysses import TokenShards


@dataclass(frozen=True)
class _Entry:
    """One row's image tokens [L, D] as they enter the first block, the same normalised and modulated, its timestep's embedding [D]."""

    tokens: Tensor
    modulated: Tensor
    timestep: Tensor


def predict_cached_velocity(
    transformer: Any,
    latents: Tensor,
    sigma: Tensor,
    embeds: Sequence[Tensor],
    grid: tuple[int, int],
    caches: Sequence[CachedSample | None],
    denoising_steps: Sequence[int],
    *,
    shards: TokenShards,
    text_tokens_min: int = 1,
) -> tuple[Tensor, list[bool]]:
    """v [B, L, C] fp32 as `predict_velocity`, and which rows took a forward; a row whose cache is None always does.

    `shards` are those of the transformer's attention.
    """
    samples = {b: cache for b, cache in enumerate(caches) if cache is not None}
    entries = _enter(transformer, latents, sigma, list(samples))
    if shards.group is not None:
        _share_memories(shards.group, samples, denoising_steps, entries)
    due = _decide(samples, denoising_steps, entries, shards.group)
    forwards = [b for b in range(len(caches)) if due.get(b, True)]
    skipped = [b for b in samples if not due[b]]
    velocity = torch.empty_like(latents, dtype=torch.float32)
    if forwards:
        texts = [embeds[b] for b in forwards]
        with _last_hidden(transformer) as hidden:
            velocity[forwards] = predict_velocity(
                transformer, latents[forwards], sigma[forwards], texts, grid, text_tokens_min=text_tokens_min
            )
        for b, last in zip(forwards, shards.gather_tokens(hidden[0]), strict=True):
            if b in samples:
                samples[b].cache.keep(last - entries[b].tokens, velocity[b])
    if skipped:
        velocity[skipped] = _stand_in(transformer, [entries[b] for b in skipped], [samples[b] for b in skipped])
    for b, sample in samples.items():
        sample.step_taken(denoising_steps[b])
    return velocity, [b in forwards for b in range(len(caches))]


def _enter(transformer: Any, latents: Tensor, sigma: Tensor, rows: Sequence[int]) -> dict[int, _Entry]:
    """What the transformer computes before its first attention: a small part of a forward."""
    dtype = model_dtype(transformer)
    tokens = transformer.img_in(latents[rows].to(dtype))
    timestep = transformer.time_text_embed(model_timestep(sigma[rows]).to(dtype), tokens)
    block = transformer.transformer_blocks[0]
    shift, scale, _ = block.img_mod(timestep).chunk(2, dim=-1)[0].chunk(3, dim=-1)
    modulated = block.img_norm1(tokens) * (1 + scale[:, None]) + shift[:, None]
    return {b: _Entry(*parts) for b, *parts in zip(rows, tokens, modulated, timestep, strict=True)}


def _decide(
    samples: Mapping[int, CachedSample],
    denoising_steps: Sequence[int],
    entries: Mapping[int, _Entry],
    group: SequenceGroup | None,
) -> dict[int, bool]:
    """Whether each cached row takes a forward. One transfer from the device, whatever the batch."""
    measured = torch.stack([sample.cache.measure(entries[b].modulated) for b, sample in samples.items()])
    if group is not None:
        group.broadcast([measured], source=0)
        group.synchronize()
    sums = dict(zip(samples, measured.tolist(), strict=True))
    return {b: sample.takes_forward(denoising_steps[b], sums[b]) for b, sample in samples.items()}


def _share_memories(
    group: SequenceGroup,
    samples: Mapping[int, CachedSample],
    denoising_steps: Sequence[int],
    entries: Mapping[int, _Entry],
) -> None:
    """Gives each sample's memory to the ranks that joined since its last step. Where no rank has it, all take a full forward."""
    everywhere = group.gather_numbers([sample.next_step for sample in samples.values()])
    for (b, sample), *next_steps in zip(samples.items(), *everywhere, strict=True):
        step = denoising_steps[b]
        if step and step in next_steps and len(set(next_steps)) > 1:
            knows = sample.next_step == step
            memory = sample.cache.memory() if knows else sample.cache.empty_memory(entries[b].modulated)
            group.broadcast(memory, source=next_steps.index(step))
            group.synchronize()
            if not knows:
                sample.cache.remember(memory)
                sample.next_step = step


def _stand_in(transformer: Any, entries: Sequence[_Entry], samples: Sequence[CachedSample]) -> Tensor:
    """v [B, L, C] without a forward."""
    tokens = torch.stack([entry.tokens + sample.cache.residual for entry, sample in zip(entries, samples, strict=True)])
    timestep = torch.stack([entry.timestep for entry in entries])
    velocity: Tensor = transformer.proj_out(transformer.norm_out(tokens, timestep))
    return velocity.float()


@contextmanager
def _last_hidden(transformer: Any) -> Iterator[list[Tensor]]:
    """Fills in the image tokens that leave the last block of the forward within."""
    seen: list[Tensor] = []
    hook = transformer.norm_out.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        hook.remove()
