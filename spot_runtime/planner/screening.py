"""From measured cache thresholds to the calibration rows that arms are made of. Owns this arithmetic; never measures.

Symbols: S denoising steps without a cache, s effective steps of a threshold (mean full forwards a sample, rounded), T(threshold) seconds a
sample with everything it takes: forwards, steps without one, decoding. step_cost(s) = (T(threshold) / s) / (T(0) / S).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from spot_runtime.planner.arms import CalibrationRow
from spot_runtime.planner.ranking import Agreement, Rewards, agreement


@dataclass(frozen=True)
class Screening:
    """What one threshold made of the same prompts and seeds: rewards, full forwards a sample, and seconds of each batch."""

    cache_threshold: float
    rewards: Rewards
    full_steps: tuple[int, ...]
    batch_s: tuple[float, ...]

    @property
    def full_steps_mean(self) -> float:
        return sum(self.full_steps) / len(self.full_steps)


@dataclass(frozen=True)
class Trial:
    """One screening judged by the one without a cache. `speedup` is T(0) / T(threshold)."""

    cache_threshold: float
    full_steps_mean: float
    speedup: float
    agreement: Agreement


def trials(full: Screening, cached: Sequence[Screening]) -> tuple[Trial, ...]:
    """Every screening of `cached` beside `full`, in order. Empty where no prompt of `full` has seeds that differ in reward.

    Batches were measured one beside the other, so the speed-up is the median over batches: a busy moment slows both.
    """
    found = []
    for screening in cached:
        agreed = agreement(screening.rewards, full.rewards)
        if agreed is None:
            return ()
        speedup = median(a / b for a, b in zip(full.batch_s, screening.batch_s, strict=True))
        found.append(Trial(screening.cache_threshold, screening.full_steps_mean, speedup, agreed))
    return tuple(found)


def calibration_rows(num_steps: int, tried: Sequence[Trial]) -> tuple[CalibrationRow, ...]:
    """A row for each effective step count below `num_steps` that a threshold reached, and the one without a cache; fewest steps first.

    Of thresholds that round to the same count the most accurate stays, of equals the fastest.
    """
    best: dict[int, Trial] = {}
    for trial in tried:
        steps = max(1, round(trial.full_steps_mean))
        if steps < num_steps and (steps not in best or _merit(trial) > _merit(best[steps])):
            best[steps] = trial
    rows = [_row(steps, num_steps, best[steps]) for steps in sorted(best)]
    return (*rows, CalibrationRow(num_steps, 0.0, 1.0))


def _merit(trial: Trial) -> tuple[float, float]:
    return (trial.agreement.spearman, trial.speedup)


def _row(steps: int, num_steps: int, trial: Trial) -> CalibrationRow:
    return CalibrationRow(
        steps, trial.cache_threshold, trial.agreement.spearman, step_cost=num_steps / steps / trial.speedup
    )
