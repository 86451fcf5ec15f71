"""Owns the planner's action space: which (sequences, effective steps) pairs exist. Never decides which one is taken.

Symbols (paper §4.3.1): k group size, d sequences a prompt, s effective denoising steps a sequence, t_step GPU-seconds a full sample-step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spot_runtime.errors import InputError

ARMS_MAX = 12
"""An arm is tried once before any is tried twice, so the space has to be small beside the iterations of a run."""

STEP_LEVELS_MAX = 3
SEQUENCE_LEVELS_MAX = ARMS_MAX // STEP_LEVELS_MAX

TARGET_ACCURACY = 0.8
"""Rank correlation with full rollouts that an effective step count must reach (paper §6.8)."""


@dataclass(frozen=True)
class CalibrationRow:
    """One profiled step-cache threshold: the mean full forwards a sample it leaves, and how well it still ranks seeds.

    `step_cost` is GPU-seconds of one effective step in units of t_step: above 1, since steps without a forward and decoding take time too.
    """

    effective_steps: int
    cache_threshold: float
    accuracy: float
    step_cost: float = 1.0


@dataclass(frozen=True)
class Calibration:
    """What profiling found for one model, dataset and hardware.

    `step_s` is GPU-seconds a sample-step: degree * latency(batch, degree) / batch. `train_s` is seconds one training step takes, 0 where
    it was not profiled. Raises InputError that names the field, the value and the bound.
    """

    step_s: float
    rows: tuple[CalibrationRow, ...]
    train_s: float = 0.0

    def __post_init__(self) -> None:
        _require(math.isfinite(self.step_s) and self.step_s > 0, "step_s", self.step_s, "must be finite and > 0")
        _require(math.isfinite(self.train_s) and self.train_s >= 0, "train_s", self.train_s, "must be finite and >= 0")
        _require(len(self.rows) > 0, "rows", 0, "must be at least 1")
        for row in self.rows:
            _require(row.effective_steps >= 1, "effective_steps", row.effective_steps, "must be >= 1")
            _require(row.cache_threshold >= 0, "cache_threshold", row.cache_threshold, "must be >= 0")
            _require(-1 <= row.accuracy <= 1, "accuracy", row.accuracy, "must be within [-1, 1]")
            _require(
                math.isfinite(row.step_cost) and row.step_cost > 0,
                "step_cost",
                row.step_cost,
                "must be finite and > 0",
            )
        steps = [row.effective_steps for row in self.rows]
        _require(len(set(steps)) == len(steps), "effective_steps", sorted(steps), "must be distinct")

    @classmethod
    def without_cache(cls, num_steps: int, step_s: float, train_s: float = 0.0) -> Calibration:
        """The calibration of an engine that has no step cache: every step is a full forward, and ranks are exact."""
        return cls(step_s, (CalibrationRow(num_steps, 0.0, 1.0),), train_s)


@dataclass(frozen=True, order=True)
class Arm:
    """One action: `sequences` (d) candidates a prompt at `effective_steps` (s) full forwards each, got by `cache_threshold`."""

    sequences: int
    effective_steps: int
    cache_threshold: float = 0.0
    step_cost: float = 1.0

    @property
    def steps_per_prompt(self) -> float:
        """Cost of a prompt in units of t_step, d * s * step_cost. The planned cost is this times C * t_step."""
        return self.sequences * self.effective_steps * self.step_cost


def arms(
    group_size: int, max_sequences: int, calibration: Calibration, target_accuracy: float = TARGET_ACCURACY
) -> tuple[Arm, ...]:
    """The action space: at most ARMS_MAX arms with k < d <= max_sequences and every s at least as accurate as the target.

    Up to SEQUENCE_LEVELS_MAX values of d, evenly spaced and ending in max_sequences, times up to STEP_LEVELS_MAX calibrated rows, evenly
    spaced by rank from the fewest accurate steps to the most. Empty where max_sequences <= k or no row is accurate enough.

    Source: paper §4.3.1 and §6.8.
    """
    accurate = sorted(
        (row for row in calibration.rows if row.accuracy >= target_accuracy), key=lambda row: row.effective_steps
    )
    return tuple(
        Arm(d, row.effective_steps, row.cache_threshold, row.step_cost)
        for d in _sequence_levels(group_size, max_sequences)
        for row in _step_levels(accurate)
    )


def _sequence_levels(group_size: int, max_sequences: int) -> list[int]:
    """d_j = k + floor((d_max - k) * j / n) for j = 1..n: never k itself, since then the top and bottom k/2 are everyone."""
    span = max_sequences - group_size
    levels = min(SEQUENCE_LEVELS_MAX, span)
    return [group_size + span * j // levels for j in range(1, levels + 1)]


def _step_levels(rows: Sequence[CalibrationRow]) -> list[CalibrationRow]:
    if len(rows) <= STEP_LEVELS_MAX:
        return list(rows)
    last = len(rows) - 1
    return [rows[last * j // (STEP_LEVELS_MAX - 1)] for j in range(STEP_LEVELS_MAX)]


def _require(holds: bool, field: str, value: object, bound: str) -> None:
    if not holds:
        raise InputError(f"calibration.{field} = {value}: {bound}")
