"""The numbers of one training step. Owns their names and how they are averaged; never computes a gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from spot_runtime.diffusion.batch import TrainingSample
from spot_runtime.diffusion.ranks import Ranks
from spot_runtime.errors import TrainingError
from spot_runtime.rl.advantage import Advantages


@dataclass
class Meter:
    """Sums over all rows seen; `first_*` only of those before the first update. `kl` stays None where no reference was asked."""

    loss: float = 0.0
    kl: float | None = None
    rows: int = 0
    log_ratio: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)
    first_gap: list[Tensor] = field(default_factory=list)
    first_steps: list[Tensor] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    recomputed: bool = False
    recompute_s: float = 0.0

    @property
    def has_updated(self) -> bool:
        return bool(self.grad_norm)

    def forget_rows(self) -> None:
        """Starts over, before any update; what recomputation cost stays."""
        assert not self.has_updated, "rows of an update cannot be forgotten"
        self.loss, self.kl, self.rows = 0.0, None, 0
        for rows in (self.log_ratio, self.clipped, self.first_gap, self.first_steps):
            rows.clear()


def gathered(meter: Meter, ranks: Ranks) -> Meter:
    """The meter of all ranks together; every rank must ask."""
    if ranks.size == 1:
        return meter
    log_ratio, clipped = _columns(ranks, meter.log_ratio, meter.clipped)
    gap, steps = _columns(ranks, meter.first_gap, meter.first_steps)
    return replace(
        meter,
        loss=ranks.sum(meter.loss),
        kl=None if meter.kl is None else ranks.sum(meter.kl),
        rows=int(ranks.sum(meter.rows)),
        log_ratio=[log_ratio],
        clipped=[clipped.bool()],
        first_gap=[gap],
        first_steps=[steps.long()],
    )


def _columns(ranks: Ranks, first: list[Tensor], second: list[Tensor]) -> Sequence[Tensor]:
    left, right = (torch.cat(column).float() if column else torch.zeros(0) for column in (first, second))
    return ranks.concatenate(torch.stack([left, right], dim=1)).unbind(1)


def reward_metrics(batch: Sequence[TrainingSample], gains: Advantages) -> dict[str, float]:
    """Of all samples, whether they took part or not."""
    rewards = np.array([sample.reward for sample in batch])
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "group_std_mean": gains.group_std_mean,
        "groups": float(gains.groups),
        "zero_variance_groups": float(gains.zero_variance_groups),
        "advantage_abs_mean": float(np.abs(gains.values).mean()),
    }


def loss_metrics(meter: Meter) -> dict[str, float]:
    """Means over the rows that took part; a step without any (all groups flat) has none of the ratio's numbers."""
    metrics = {
        "optimizer_steps": float(len(meter.grad_norm)),
        "trained_rows": float(meter.rows),
        "policy_changed": float(meter.has_updated),
        "log_probs_recomputed": float(meter.recomputed),
        "log_probs_recompute_s": meter.recompute_s,
    }
    if not meter.rows:
        return metrics
    log_ratio, clipped = torch.cat(meter.log_ratio), torch.cat(meter.clipped)
    ratio = log_ratio.exp()
    metrics |= {
        "loss": meter.loss / meter.rows,
        "ratio_mean": float(ratio.mean()),
        "ratio_min": float(ratio.min()),
        "ratio_max": float(ratio.max()),
        "clip_fraction": float(clipped.float().mean()),
        "kl_rollout": float((ratio - 1 - log_ratio).mean()),
        "grad_norm": float(np.mean(meter.grad_norm)),
        "grad_norm_max": float(np.max(meter.grad_norm)),
    }
    if meter.kl is not None:
        metrics["kl_reference"] = meter.kl / meter.rows
    return metrics | _gap_metrics(meter)


def check_finite(metrics: Mapping[str, float]) -> None:
    """Raises TrainingError: as JSON, a number that is not finite could not be read again."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise TrainingError(f"{name} = {value}: must be finite, lower grpo.learning_rate")


def _gap_metrics(meter: Meter) -> dict[str, float]:
    """|Δlogp| between trainer and rollout before the first update: over all rows, and by denoising step."""
    gap, steps = torch.cat(meter.first_gap), torch.cat(meter.first_steps)
    by_step = {f"dlogp_step_{i:02d}": float(gap[steps == i].mean()) for i in sorted(set(steps.tolist()))}
    return {"dlogp_first_max": float(gap.max()), "dlogp_first_mean": float(gap.mean())} | by_step
