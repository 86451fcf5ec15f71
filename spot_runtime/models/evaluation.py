"""How good a pipeline is: official success by kind, for one try and for several. Owns the measurement; never trains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel

from spot_runtime.models.flow import PATCH, decode_latents, ode_sample, sampler_noise_levels
from spot_runtime.models.latents import encode_prompts
from spot_runtime.models.scenes import kind_of
from spot_runtime.rewards.geneval import SHAPES_THRESHOLDS, score
from spot_runtime.rewards.glyphs import read_text
from spot_runtime.rewards.prompts import GenevalRow, quoted_text
from spot_runtime.rewards.shapes import Image, detect


@dataclass(frozen=True)
class Success:
    """Over some prompts: the mean share of right samples, and the share of prompts with at least one right sample."""

    prompts: int
    one_try: float
    any_try: float


@dataclass(frozen=True)
class Evaluation:
    """Success by kind and over all prompts; `tries` samples a prompt."""

    tries: int
    overall: Success
    by_kind: dict[str, Success]

    def line(self) -> str:
        """One line: success at one try, and at `tries` tries in brackets."""
        kinds = "  ".join(f"{kind} {s.one_try:.2f} ({s.any_try:.2f})" for kind, s in sorted(self.by_kind.items()))
        return f"all {self.overall.one_try:.3f} ({self.overall.any_try:.3f})  {kinds}"


@dataclass(frozen=True)
class Exam:
    """Fixed prompts and seeds. Sample i belongs to rows[i // tries]; suffixes as in `flow`."""

    rows: tuple[GenevalRow, ...]
    tries: int
    noise_levels: torch.Tensor
    x_BTC: torch.Tensor
    embeds_BLD: torch.Tensor
    mask_BL: torch.Tensor


def make_exam(
    pipeline: QwenImagePipeline,
    rows: Sequence[GenevalRow],
    tries: int,
    side_px: int,
    num_steps: int,
    seed: int,
    device: torch.device,
) -> Exam:
    """`tries` initial latents for each row, drawn on the CPU from `seed`; the text encoder must be on `device`."""
    tokens = (side_px // pipeline.vae_scale_factor // PATCH) ** 2
    embeds_PLD, mask_PL = encode_prompts(pipeline, [row.prompt for row in rows], device)
    generator = torch.Generator().manual_seed(seed)
    x_BTC = torch.randn(len(rows) * tries, tokens, pipeline.transformer.config.in_channels, generator=generator)
    return Exam(
        rows=tuple(rows),
        tries=tries,
        noise_levels=sampler_noise_levels(pipeline.scheduler, num_steps, tokens),
        x_BTC=x_BTC.to(device),
        embeds_BLD=embeds_PLD.repeat_interleave(tries, 0),
        mask_BL=mask_PL.repeat_interleave(tries, 0),
    )


def draw(transformer: QwenImageTransformer2DModel, vae: AutoencoderKLQwenImage, exam: Exam, batch: int) -> torch.Tensor:
    """The exam's images: B x H x W x 3, uint8, on the CPU."""
    parts = []
    for start in range(0, len(exam.x_BTC), batch):
        part = slice(start, start + batch)
        x_BTC = ode_sample(transformer, exam.x_BTC[part], exam.noise_levels, exam.embeds_BLD[part], exam.mask_BL[part])
        parts.append(decode_latents(vae, x_BTC).cpu())
    return torch.cat(parts)


def grade(images_BHW3: torch.Tensor, exam: Exam) -> Evaluation:
    """Judges the exam's images by the official rule of their rows."""
    right_PK = torch.tensor(
        [is_correct(exam.rows[index // exam.tries], image.numpy()) for index, image in enumerate(images_BHW3)]
    ).view(len(exam.rows), exam.tries)
    of_kind: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(exam.rows):
        of_kind[kind_of(row)].append(index)
    by_kind = {kind: _success(right_PK[indices]) for kind, indices in of_kind.items()}
    return Evaluation(exam.tries, _success(right_PK), by_kind)


def is_correct(row: GenevalRow, image: Image) -> bool:
    """GenEval's official rule over the shapes detector; a text must read exactly as quoted."""
    if row.tag == "text":
        return read_text(image) == quoted_text(row.prompt)
    return score(row, detect(image), "official", SHAPES_THRESHOLDS).correct


def _success(right_PK: torch.Tensor) -> Success:
    return Success(len(right_PK), right_PK.float().mean().item(), right_PK.any(1).float().mean().item())
