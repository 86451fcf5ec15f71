"""The training set in latent space: encoded images, their captions' embeddings, and batches of both. Never touches validation prompts."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Final, TypeVar

import torch
from diffusers import QwenImagePipeline

from spot_runtime.models.flow import encode_images
from spot_runtime.models.render import render
from spot_runtime.models.scenes import LOOSENESS, kind_of, scene_of
from spot_runtime.rewards.prompts import GenevalRow, shapes_rows, text_rows

T = TypeVar("T")

SHAPES_PROMPTS: Final = 12_000
"""Enough to hold every training prompt of all kinds but `two_relations`, which fills the rest."""
EMPTY_SHARE: Final = 0.05
"""Share of samples whose caption is dropped, so that classifier-free guidance works too."""
EMPTY_PROMPT: Final = " "
TEXT_TOKENS_MULTIPLE: Final = 8
"""Text is padded to a multiple of this: fused attention wants aligned masks."""
ENCODE_CHUNK: Final = 512

PRETRAINING_MIX: Final[Mapping[str, float]] = MappingProxyType(
    {
        "single_object": 0.5,
        "colors": 1.5,
        "counting": 2.5,
        "counting_many": 3.5,
        "two_object": 1.5,
        "color_attr": 2.0,
        "position": 3.5,
        "two_relations": 5.0,
        "text": 7.0,
    }
)
"""Relative weight of each kind among training images."""


@dataclass(frozen=True)
class Batch:
    """Inputs of one flow-matching loss; suffixes as in `flow`."""

    x0_BTC: torch.Tensor
    noise_BTC: torch.Tensor
    noise_level_B: torch.Tensor
    embeds_BLD: torch.Tensor
    mask_BL: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.x0_BTC, self.noise_BTC, self.noise_level_B, self.embeds_BLD, self.mask_BL


@dataclass(frozen=True)
class LatentSet:
    """N encoded images and the P prompts that caption them; prompt 0 is the empty one.

    `caption_N` indexes the prompts. The first `true_captions` images have true captions, the others loose ones.
    """

    true_captions: int
    x0_NTC: torch.Tensor
    caption_N: torch.Tensor
    embeds_PLD: torch.Tensor
    mask_PL: torch.Tensor

    def batch(self, size: int, generator: torch.Generator, only_true: bool) -> Batch:
        """A random batch; noise levels are logit-normal, a little above one half (arXiv 2403.03206)."""
        device = self.x0_NTC.device
        images = self.true_captions if only_true else len(self.x0_NTC)
        pick_B = torch.randint(images, (size,), generator=generator, device=device)
        kept_B = torch.rand(size, generator=generator, device=device) >= EMPTY_SHARE
        caption_B = self.caption_N[pick_B] * kept_B
        x0_BTC = self.x0_NTC[pick_B]
        noise_BTC = torch.randn(x0_BTC.shape, generator=generator, device=device)
        noise_level_B = torch.sigmoid(torch.randn(size, generator=generator, device=device) + 0.3)
        return Batch(x0_BTC, noise_BTC, noise_level_B, self.embeds_PLD[caption_B], self.mask_PL[caption_B])


def training_rows(seed: int, text_prompts: int) -> dict[str, list[GenevalRow]]:
    """Rows of the train split by kind: all shapes prompts but some of `two_relations`, and `text_prompts` texts."""
    by_kind: dict[str, list[GenevalRow]] = defaultdict(list)
    for row in (*shapes_rows(seed, SHAPES_PROMPTS, "train"), *text_rows(seed, text_prompts, "train")):
        by_kind[kind_of(row)].append(row)
    return dict(by_kind)


def endless_rows(rows: Mapping[str, Sequence[GenevalRow]], rng: random.Random) -> Iterator[GenevalRow]:
    """Random rows with the kinds in PRETRAINING_MIX's proportions, for ever."""
    kinds = [kind for kind in PRETRAINING_MIX if kind in rows]
    weights = [PRETRAINING_MIX[kind] for kind in kinds]
    while True:
        for kind in rng.choices(kinds, weights, k=256):
            yield rng.choice(rows[kind])


def make_latent_set(
    pipeline: QwenImagePipeline,
    rows: Mapping[str, Sequence[GenevalRow]],
    images: int,
    side_px: int,
    rng: random.Random,
    device: torch.device,
) -> LatentSet:
    """Draws and encodes `images` random scenes, captions loose at the rates of LOOSENESS. VAE and text encoder must be on `device`."""
    drawn = [(row, rng.random() < LOOSENESS[kind_of(row)]) for row in islice(endless_rows(rows, rng), images)]
    drawn.sort(key=lambda pair: pair[1])
    prompts = [EMPTY_PROMPT, *dict.fromkeys(row.prompt for row, _ in drawn)]
    number = {prompt: index for index, prompt in enumerate(prompts)}
    x0 = [
        encode_images(pipeline.vae, render([scene_of(row, rng, loose) for row, loose in chunk], side_px, device))
        for chunk in _chunks(drawn, ENCODE_CHUNK)
    ]
    embeds_PLD, mask_PL = encode_prompts(pipeline, prompts, device)
    caption_N = torch.tensor([number[row.prompt] for row, _ in drawn], device=device)
    true_captions = sum(not loose for _, loose in drawn)
    return LatentSet(true_captions, torch.cat(x0), caption_N, embeds_PLD, mask_PL)


@torch.no_grad()
def encode_prompts(
    pipeline: QwenImagePipeline, prompts: Sequence[str], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings of `prompts`, padded to one length: P x L x D, and the P x L bool mask of real tokens."""
    parts = [pipeline.encode_prompt(chunk, device=device) for chunk in _chunks(list(prompts), ENCODE_CHUNK)]
    longest = max(embeds.shape[1] for embeds, _ in parts)
    length = -(-longest // TEXT_TOKENS_MULTIPLE) * TEXT_TOKENS_MULTIPLE
    embeds_PLD = torch.zeros(len(prompts), length, parts[0][0].shape[2], device=device)
    mask_PL = torch.zeros(len(prompts), length, dtype=torch.bool, device=device)
    start = 0
    for embeds, mask in parts:
        stop = start + len(embeds)
        embeds_PLD[start:stop, : embeds.shape[1]] = embeds
        mask_PL[start:stop, : embeds.shape[1]] = True if mask is None else mask.bool()
        start = stop
    return embeds_PLD, mask_PL


def _chunks(items: list[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
