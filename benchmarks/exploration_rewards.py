"""What a recorded exploration was rewarded with, and which seeds it chooses. Owns the record's format; knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from spot_runtime.planner.selection import Candidate, choose_seeds


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration: rewards by prompt id, candidates in the order of their index. `stale` is by effective steps, with the weights before;
    `full` with those after. `group_size` is k.
    """

    group_size: int
    num_steps: int
    stale: dict[int, dict[str, list[float]]]
    full: dict[str, list[float]]


def read_records(path: Path) -> list[Record]:
    return [msgspec.json.decode(line, type=Record) for line in path.read_bytes().splitlines() if line.strip()]


def chosen_places(rewards: Sequence[float], group_size: int) -> list[int]:
    """Which candidates an exploration with these rewards chooses, as places in `rewards`."""
    candidates = [Candidate(place, reward) for place, reward in enumerate(rewards)]
    return [item.seed for item in choose_seeds(candidates, group_size)]
