"""Stored denoising steps as the model in training prices them. Owns micro batches and their transitions; never a loss, never an update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spot_runtime.config import SamplingConfig
from spot_runtime.diffusion.batch import TrainingSample
from spot_runtime.diffusion.schedule import sigmas
from spot_runtime.diffusion.transformer import predict_velocity
from spot_runtime.errors import TrainingError
from spot_runtime.rl.guard import step_weight
from spot_runtime.rl.noise import sde_noise
from spot_runtime.rl.sde import STEPS, Transition


@dataclass(frozen=True)
class Rows:
    """A micro batch: one row for each step of the SDE window of each sample. Shapes [B, L, C] and [B]."""

    before: Tensor
    after: Tensor
    embeds: list[Tensor]
    denoising_steps: Tensor
    advantage: Tensor


@dataclass(frozen=True)
class OldPolicy:
    """What the policy that sampled says of the rows: log-probs [B], and the transitions' means [B, L, C] where they are needed."""

    log_prob: Tensor
    mean: Tensor | None = None


class Pricer:
    """A transformer under the noise schedule of its folder."""

    def __init__(
        self, transformer: Any, noise_scheduler_config: dict[str, Any], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._transformer = transformer
        self._noise_scheduler_config = noise_scheduler_config
        self._device = device
        self._dtype = dtype

    def rows(self, samples: Sequence[TrainingSample], advantage: np.ndarray) -> Rows:
        """`samples` with their advantages [samples]."""
        windows = [len(sample.log_probs) for sample in samples]
        texts = [torch.from_numpy(np.ascontiguousarray(sample.embeds)).to(self._device) for sample in samples]
        return Rows(
            before=self._tensor(np.concatenate([sample.window_latents[:-1] for sample in samples])),
            after=self._tensor(np.concatenate([sample.window_latents[1:] for sample in samples])),
            embeds=[text for text, window in zip(texts, windows, strict=True) for _ in range(window)],
            denoising_steps=torch.cat([torch.arange(*sample.sde_window) for sample in samples]).to(self._device),
            advantage=self._tensor(np.repeat(advantage, windows)),
        )

    def transition(self, rows: Rows, sampling: SamplingConfig) -> Transition:
        """The rows' steps under the policy as it stands."""
        tokens = rows.before.shape[1]
        sigma, sigma_next = self._levels(rows, sampling)
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            velocity = predict_velocity(self._transformer, rows.before, sigma, rows.embeds, square_grid(tokens))
        level = torch.full_like(sigma, sampling.noise_level)
        sigma_max = self._schedule(tokens, sampling)[1].expand_as(sigma)
        return STEPS[sampling.sde](velocity, rows.before, sigma, sigma_next, sigma_max, level, sample=rows.after)

    def weight(self, rows: Rows, sampling: SamplingConfig) -> Tensor:
        """GRPO-Guard's weight of each row [B]."""
        return step_weight(*self._levels(rows, sampling))

    def rollout_policy(
        self, samples: Sequence[TrainingSample], rows: Rows, std: Tensor, *, with_mean: bool
    ) -> OldPolicy:
        """What the rollouts recorded; μ_old = x' - std ε, as the noise of a step follows from its seed."""
        log_prob = self._tensor(np.concatenate([sample.log_probs for sample in samples]))
        if not with_mean:
            return OldPolicy(log_prob)
        tokens, channels = rows.before.shape[1:]
        noise = torch.stack([sde_noise(s.seed, i, tokens, channels) for s in samples for i in range(*s.sde_window)])
        return OldPolicy(log_prob, rows.after - std.view(-1, 1, 1) * noise.to(self._device))

    def _levels(self, rows: Rows, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
        schedule = self._schedule(rows.before.shape[1], sampling)
        return schedule[rows.denoising_steps], schedule[rows.denoising_steps + 1]

    def _schedule(self, tokens: int, sampling: SamplingConfig) -> Tensor:
        return sigmas(self._noise_scheduler_config, sampling.num_steps, tokens).to(self._device)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).to(self._device)


def square_grid(tokens: int) -> tuple[int, int]:
    """Rows and columns of a square image's latent tokens."""
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise TrainingError(f"{tokens} latent tokens: must be a square number, images are square")
    return side, side
