"""How well one scoring of seeds ranks them as another does, within each prompt. Owns ranks and their correlation; never a reward.

Across prompts a correlation would mostly say which prompts are hard, so it is taken within each and then averaged (paper §3.2.1, §6.8).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Rewards = Mapping[str, Mapping[int, float]]
"""Reward by prompt id and seed."""


@dataclass(frozen=True)
class Agreement:
    """Mean rank correlation over `groups` prompts; `flat_groups` had nothing to rank and are left out."""

    spearman: float
    groups: int
    flat_groups: int


def agreement(estimate: Rewards, reference: Rewards) -> Agreement | None:
    """How well `estimate` ranks the seeds that both have of a prompt, judged by `reference`.

    A prompt with fewer than two such seeds, or whose reference rewards are all equal, is left out; where only the estimates are equal they
    rank nothing, and the prompt counts 0. None where no prompt is left.
    """
    correlations, flat_groups = [], 0
    for prompt_id in sorted(estimate.keys() & reference.keys()):
        seeds = sorted(estimate[prompt_id].keys() & reference[prompt_id].keys())
        guessed = [estimate[prompt_id][seed] for seed in seeds]
        true = [reference[prompt_id][seed] for seed in seeds]
        if len(set(true)) < 2:
            flat_groups += 1
        else:
            correlations.append(rank_correlation(guessed, true) or 0.0)
    if not correlations:
        return None
    return Agreement(math.fsum(correlations) / len(correlations), len(correlations), flat_groups)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rho: the Pearson correlation of average ranks. None where either side has no two different values."""
    assert len(first) == len(second), f"{len(first)} and {len(second)} values: must be pairs"
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    middle = (len(first) - 1) / 2
    x = [rank - middle for rank in average_ranks(first)]
    y = [rank - middle for rank in average_ranks(second)]
    scale = math.sqrt(math.fsum(a * a for a in x) * math.fsum(b * b for b in y))
    return max(-1.0, min(1.0, math.fsum(a * b for a, b in zip(x, y, strict=True)) / scale))


def average_ranks(values: Sequence[float]) -> list[float]:
    """Place of each value in ascending order, from 0; equal values share the mean of their places."""
    assert all(math.isfinite(value) for value in values), "a value is not finite"
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [sum(places[value]) / len(places[value]) for value in values]
