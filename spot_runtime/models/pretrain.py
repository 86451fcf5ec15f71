"""Pre-training of the tiny base: its VAE, then its transformer by flow matching. Owns the training loops; never judges an image.

Both loops stop by the clock, so how far training gets depends on the machine; which data they see depends on the seed alone.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from torch import nn

from spot_runtime.models.flow import flow_loss
from spot_runtime.models.latents import Batch, LatentSet, endless_rows
from spot_runtime.models.muon import Muon
from spot_runtime.models.render import render
from spot_runtime.models.scenes import scene_of
from spot_runtime.rewards.prompts import GenevalRow

VAE_LEARNING_RATE: Final = 4e-3
VAE_LATENT_NOISE: Final = 0.05
"""Noise on the latents in training: the decoder then forgives what the transformer leaves over."""
TRANSFORMER_LEARNING_RATE: Final = 3e-3
WARMUP_STEPS: Final = 200
DECAY_SHARE: Final = 0.4
"""Share of the time in which the learning rate falls linearly, at the end."""
TRUE_CAPTIONS_SHARE: Final = 0.65
"""Share of the time in which the transformer sees true captions only, at the start: from them it learns relations several times sooner."""
EMA_DECAY: Final = 0.999
MAX_GRAD_NORM: Final = 1.0

Report = Callable[[str], None]


@dataclass(frozen=True)
class Effort:
    """How much a machine can do: samples a training step and how often to report."""

    vae_batch: int
    batch: int
    images: int
    text_prompts: int
    report_every_s: float


CPU_EFFORT: Final = Effort(vae_batch=8, batch=48, images=20_000, text_prompts=8_000, report_every_s=60)
GPU_EFFORT: Final = Effort(vae_batch=64, batch=512, images=131_072, text_prompts=60_000, report_every_s=15)


def effort_of(device: torch.device) -> Effort:
    return GPU_EFFORT if device.type == "cuda" else CPU_EFFORT


def learning_rate_factor(training_step: int, share_done: float) -> float:
    """Linear warm-up over WARMUP_STEPS, a plateau, and a linear fall to 2 % over the last DECAY_SHARE of the time."""
    warm = min(1.0, (training_step + 1) / WARMUP_STEPS)
    return warm * max(0.02, min(1.0, (1 - share_done) / DECAY_SHARE))


# ---- VAE ----------------------------------------------------------------------------------------------------------------------------


def train_vae(
    vae: AutoencoderKLQwenImage,
    rows: Mapping[str, Sequence[GenevalRow]],
    side_px: int,
    rng: random.Random,
    device: torch.device,
    limit_s: float,
    report: Report,
) -> None:
    """Trains `vae` in place for `limit_s` seconds, then sets its latents' mean and standard deviation.

    loss = |y - x| + 2 (y - x)^2 + 1e-3 mu^2,   y = decode(mu + noise)
    """
    effort, source = effort_of(device), endless_rows(rows, rng)
    generator = torch.Generator(device).manual_seed(rng.getrandbits(32))
    optimizer = torch.optim.AdamW(vae.parameters(), lr=VAE_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    started_s = reported_s = time.monotonic()
    training_step = 0
    while (now_s := time.monotonic()) < started_s + limit_s:
        factor = learning_rate_factor(training_step, (now_s - started_s) / limit_s)
        for group in optimizer.param_groups:
            group["lr"] = VAE_LEARNING_RATE * factor
        scenes = [scene_of(next(source), rng) for _ in range(effort.vae_batch)]
        loss = _vae_loss(vae, render(scenes, side_px, device)[:, :, None], generator)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(vae.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        training_step += 1
        if now_s > reported_s + effort.report_every_s:
            reported_s = now_s
            report(f"vae {now_s - started_s:4.0f} s  training step {training_step}  loss {loss.item():.4f}")
    scenes = [scene_of(next(source), rng) for _ in range(256)]
    set_latent_statistics(vae, render(scenes, side_px, device))


def _vae_loss(vae: AutoencoderKLQwenImage, x_B31HW: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    mean = vae.encode(x_B31HW).latent_dist.mean
    noise = torch.randn(mean.shape, generator=generator, device=mean.device)
    y_B31HW = vae.decode(mean + VAE_LATENT_NOISE * noise).sample
    difference = y_B31HW - x_B31HW
    loss: torch.Tensor = difference.abs().mean() + 2 * difference.square().mean() + 1e-3 * mean.square().mean()
    return loss


@torch.no_grad()
def set_latent_statistics(vae: AutoencoderKLQwenImage, images_B3HW: torch.Tensor) -> None:
    """Writes the mean and standard deviation of each latent channel over `images_B3HW` into the config, which normalises by them."""
    z = vae.encode(images_B3HW[:, :, None]).latent_dist.mode()
    vae.register_to_config(
        latents_mean=z.mean((0, 2, 3, 4)).tolist(),
        latents_std=z.std((0, 2, 3, 4)).tolist(),
    )


# ---- transformer --------------------------------------------------------------------------------------------------------------------


class GradientPass:
    """Loss and clipped gradients of a batch. On a GPU all of it is one CUDA graph: a model this small is bound by launches otherwise."""

    def __init__(self, transformer: QwenImageTransformer2DModel, first: Batch) -> None:
        self._transformer = transformer
        self._parameters = list(transformer.parameters())
        for p in self._parameters:
            p.grad = torch.zeros_like(p)
        self._inputs = tuple(t.clone() for t in first.tensors())
        self._graph: torch.cuda.CUDAGraph | None = None
        if first.x0_BTC.is_cuda:
            self._capture()

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Leaves the gradients in `.grad` and returns the loss, a scalar that the next call overwrites."""
        if self._graph is None:
            return self._run(batch.tensors())
        for static, fresh in zip(self._inputs, batch.tensors(), strict=True):
            static.copy_(fresh)
        self._graph.replay()
        return self._loss

    def _capture(self) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._run(self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = self._run(self._inputs)

    def _run(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        torch._foreach_zero_([p.grad for p in self._parameters if p.grad is not None])
        loss = flow_loss(self._transformer, *inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._parameters, MAX_GRAD_NORM)
        return loss.detach()


def train_transformer(
    transformer: QwenImageTransformer2DModel,
    data: LatentSet,
    seed: int,
    limit_s: float,
    report: Report,
    inspect: Callable[[QwenImageTransformer2DModel, float], None],
) -> QwenImageTransformer2DModel:
    """Flow matching for `limit_s` seconds; returns the exponential moving average of the weights.

    Args:
        transformer: trained in place, on the device of `data`.
        data: images in latent space and their captions.
        seed: seeds the choice of images, noise and noise levels.
        limit_s: training time; what `inspect` takes is not counted.
        report: receives one line now and then.
        inspect: receives the average and the share of the time that is over, as often as `report`.
    """
    device = data.x0_NTC.device
    effort, generator = effort_of(device), torch.Generator(device).manual_seed(seed)
    average = copy.deepcopy(transformer).requires_grad_(False)
    gradients = GradientPass(transformer, data.batch(effort.batch, generator, only_true=True))
    optimizer = Muon(transformer, TRANSFORMER_LEARNING_RATE)
    spent_s = reported_s = 0.0
    training_step = 0
    while spent_s < limit_s:
        started_s = time.monotonic()
        batch = data.batch(effort.batch, generator, only_true=spent_s < limit_s * TRUE_CAPTIONS_SHARE)
        loss = gradients(batch)
        optimizer.step(TRANSFORMER_LEARNING_RATE * learning_rate_factor(training_step, spent_s / limit_s))
        _update_average(average, transformer, min(EMA_DECAY, (training_step + 1) / (training_step + 10)))
        training_step += 1
        if training_step % 20 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # bounds what is queued, so that the clock tells the truth
        spent_s += time.monotonic() - started_s
        if spent_s > reported_s + effort.report_every_s:
            reported_s = spent_s
            report(f"transformer {spent_s:4.0f} s  training step {training_step}  loss {loss.item():.4f}")
            inspect(average, spent_s / limit_s)
    return average


@torch.no_grad()
def _update_average(average: nn.Module, current: nn.Module, decay: float) -> None:
    torch._foreach_lerp_(list(average.parameters()), list(current.parameters()), 1 - decay)
