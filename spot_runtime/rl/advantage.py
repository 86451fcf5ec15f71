"""Rewards to advantages, group by group. Owns centring, normalisation and clipping; never sees a latent.

    A_j = clip((r_j - mean_group) / (std + EPS), ± advantage_clip)

std is the population standard deviation (ddof 0) of the group, of all rewards of the batch, or absent ("none": A_j = r_j - mean_group).
A group whose rewards span nothing has A = 0 exactly and is inactive: it is told by its range, because a mean of equal floats may differ
from them by a rounding error that a small std would blow up. A group of one is such a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

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
    rewards: Sequence[float], groups: Sequence[str], *, normalisation: str, advantage_clip: float
) -> Advantages:
    """Advantages of `rewards` [N], where equal entries of `groups` [N] are rollouts of one prompt.

    Args:
        normalisation: "group", "batch" or "none".
        advantage_clip: bound of |A|.
    """
    assert len(rewards) == len(groups), f"{len(rewards)} rewards, {len(groups)} group names"
    assert normalisation in {"group", "batch", "none"}, normalisation
    r = np.asarray(rewards, dtype=np.float64)
    values, active = np.zeros(len(r)), np.zeros(len(r), dtype=bool)
    members = _members(groups)
    stds = []
    for index in members.values():
        group = r[index]
        stds.append(group.std())
        active[index] = np.ptp(group) > 0
        std = {"group": stds[-1], "batch": r.std(), "none": 1.0 - EPS}[normalisation]
        values[index] = (group - group.mean()) / (std + EPS)
    values = np.where(active, values.clip(-advantage_clip, advantage_clip), 0.0)
    flat = sum(not active[index[0]] for index in members.values())
    return Advantages(values.astype(np.float32), active, len(members), flat, float(np.mean(stds)))


def _members(groups: Sequence[str]) -> dict[str, list[int]]:
    members: dict[str, list[int]] = {}
    for index, name in enumerate(groups):
        members.setdefault(name, []).append(index)
    return members
