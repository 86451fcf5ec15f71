"""Rewards to advantages, group by group. Owns centring, normalisation and clipping; never sees a latent.

    A_j = clip((r_j - mean_group) / (std + EPS), ± advantage_clip)

std is a population standard deviation (ddof 0), or absent:
    group       of the group's rewards
    batch       of all rewards of the batch
    unexplored  of all rewards of prompts with default seeds: exploration raises the other two, and dividing by them would take back a part
                of what it gains; where these rewards span nothing, as batch
    none        A_j = r_j - mean_group

A group whose rewards span nothing has A = 0 exactly and is inactive: it is told by its range, because a mean of equal floats may differ
from them by a rounding error that a small std would blow up. A group of one is such a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from spot_runtime.errors import TrainingError

EPS: Final = 1e-4


@dataclass(frozen=True)
class Advantages:
    """A [N] fp32 in the order of the rewards, `active` [N] bool, and how many groups have no spread."""

    values: np.ndarray
    active: np.ndarray
    groups: int
    zero_variance_groups: int
    group_std_mean: float


def advantages(
    rewards: Sequence[float],
    groups: Sequence[str],
    *,
    normalisation: str,
    advantage_clip: float,
    explored: Sequence[bool] = (),
) -> Advantages:
    """Advantages of `rewards` [N], where equal entries of `groups` [N] are rollouts of one prompt.

    Args:
        normalisation: "group", "batch", "unexplored" or "none".
        advantage_clip: bound of |A|.
        explored: which samples [N] have seeds that exploration chose; empty: none of them.

    Raises TrainingError where the normalisation is "unexplored" and every prompt was explored, or the rewards' spread is no finite number.
    """
    assert len(rewards) == len(groups), f"{len(rewards)} rewards, {len(groups)} group names"
    r = np.asarray(rewards, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        if not math.isfinite(r.std()):
            raise TrainingError(f"rewards from {r.min():g} to {r.max():g}: their spread must be finite")
    shared = _shared_std(r, np.asarray(explored or [False] * len(r), dtype=bool), normalisation)
    values, active = np.zeros(len(r)), np.zeros(len(r), dtype=bool)
    members = _members(groups)
    stds = []
    for index in members.values():
        group = r[index]
        stds.append(group.std())
        active[index] = np.ptp(group) > 0
        std = stds[-1] if shared is None else shared
        values[index] = (group - group.mean()) / (std + EPS)
    values = np.where(active, values.clip(-advantage_clip, advantage_clip), 0.0)
    flat = sum(not active[index[0]] for index in members.values())
    return Advantages(values.astype(np.float32), active, len(members), flat, float(np.mean(stds)))


def _shared_std(r: np.ndarray, explored: np.ndarray, normalisation: str) -> float | None:
    """The one std that divides all groups; None where each has its own."""
    match normalisation:
        case "group":
            return None
        case "batch":
            return float(r.std())
        case "unexplored":
            reference = r[~explored]
            if not len(reference):
                raise TrainingError(
                    "advantage_normalisation = 'unexplored': 0 prompts with default seeds, must be >= 1"
                )
            return float(reference.std() if np.ptp(reference) > 0 else r.std())
        case "none":
            return 1.0 - EPS
    raise AssertionError(normalisation)


def _members(groups: Sequence[str]) -> dict[str, list[int]]:
    members: dict[str, list[int]] = {}
    for index, name in enumerate(groups):
        members.setdefault(name, []).append(index)
    return members
