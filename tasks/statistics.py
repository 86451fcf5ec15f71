"""Whether a validation score rose: a paired bootstrap over fixed (prompt, seed) pairs. Pure: owns no randomness but its seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from spot_runtime.types import SampleRecord

RESAMPLES = 10_000
LEVEL = 0.95
CHUNK_VALUES = 4_000_000
"""Indices drawn at a time: bounds memory to 32 MB whatever the number of pairs."""


@dataclass(frozen=True)
class Gain:
    """Mean before and after over the same pairs, their difference, and its bootstrap interval [low, high]."""

    pairs: int
    before: float
    after: float
    low: float
    high: float
    level: float = LEVEL

    @property
    def difference(self) -> float:
        return self.after - self.before


def paired_bootstrap(
    before: Sequence[float], after: Sequence[float], *, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0
) -> Gain:
    """Percentile interval of mean(after - before), resampling pairs.

    d_i = after_i - before_i;  m_b = mean of n draws with replacement from d;  [low, high] = quantiles (1 ± level)/2 of all m_b.
    Both must have the same length >= 1; equal arguments give equal results. Source: Efron and Tibshirani 1993, chapter 13.
    """
    assert len(before) == len(after), f"{len(before)} values before, {len(after)} after: must be pairs"
    assert before, "no pairs"
    difference = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    means = _resampled_means(difference, resamples, np.random.default_rng(seed))
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Gain(len(before), float(np.mean(before)), float(np.mean(after)), float(low), float(high), level)


def compare(before: Iterable[SampleRecord], after: Iterable[SampleRecord]) -> Gain | None:
    """Gain in the share of correct samples over the (prompt id, seed) pairs that both sides have; None where they share none."""
    first = {(sample.prompt_id, sample.seed): sample.correct for sample in before}
    last = {(sample.prompt_id, sample.seed): sample.correct for sample in after}
    shared = sorted(first.keys() & last.keys())
    if not shared:
        return None
    return paired_bootstrap([float(first[pair]) for pair in shared], [float(last[pair]) for pair in shared])


def sentence(gain: Gain | None) -> str:
    """One line for people."""
    if gain is None:
        return "validation: no pair was scored both before and after"
    return (
        f"validation {gain.before:.3f} -> {gain.after:.3f}, {gain.difference:+.3f} "
        f"({gain.level:.0%} interval {gain.low:+.3f} to {gain.high:+.3f}, paired bootstrap over {gain.pairs} prompt-seed pairs)"
    )


def _resampled_means(values: np.ndarray, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """Means of `resamples` draws with replacement; shape (resamples,)."""
    rows = max(1, CHUNK_VALUES // len(values))
    means = [
        values[rng.integers(0, len(values), size=(min(rows, resamples - start), len(values)))].mean(axis=1)
        for start in range(0, resamples, rows)
    ]
    return np.concatenate(means)
