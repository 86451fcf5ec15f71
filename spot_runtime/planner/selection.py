"""Which explored seeds a prompt's next group is made of: the best and the worst halves (paper §5, Dynamic Exploration).

Owns the choice and its tie rule. Never draws a seed itself and never sees pixels, policies or time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from spot_runtime.types import SampleRecord


class Side(StrEnum):
    """Which half a chosen seed belongs to."""

    TOP = "top"
    BOTTOM = "bottom"


@dataclass(frozen=True)
class Candidate:
    """One explored seed of a prompt and the reward it earned."""

    seed: int
    reward: float


@dataclass(frozen=True)
class ChosenSeed:
    """A seed that the next group uses. `rank` is its place among all candidates of the prompt, 0 the best."""

    seed: int
    reward: float
    rank: int
    side: Side


def choose_seeds(candidates: Sequence[Candidate], group_size: int) -> tuple[ChosenSeed, ...]:
    """The k/2 best and the k/2 worst of `candidates`, best first, where k = `group_size`.

    Equal rewards are ordered by seed; seeds are hashes, so this favours none. Fewer candidates than k give (): a group is whole or it
    keeps its default seeds. A group of equal rewards is chosen by the same rule. Seeds must differ, rewards be finite, k even and >= 2.
    """
    assert group_size >= 2, f"group_size = {group_size}: must be >= 2"
    assert group_size % 2 == 0, f"group_size = {group_size}: must be even"
    assert len({candidate.seed for candidate in candidates}) == len(candidates), "a seed occurs twice in one prompt"
    assert all(math.isfinite(candidate.reward) for candidate in candidates), "a reward is not finite"
    if len(candidates) < group_size:
        return ()
    ranked = sorted(candidates, key=lambda candidate: (-candidate.reward, candidate.seed))
    half = group_size // 2
    places = [*range(half), *range(len(ranked) - half, len(ranked))]
    return tuple(
        ChosenSeed(ranked[rank].seed, ranked[rank].reward, rank, Side.TOP if rank < half else Side.BOTTOM)
        for rank in places
    )


def choose_by_prompt(samples: Iterable[SampleRecord], group_size: int) -> dict[str, tuple[ChosenSeed, ...]]:
    """`choose_seeds` for every prompt id among the samples of one exploration; prompts without a whole group are left out."""
    candidates: dict[str, list[Candidate]] = {}
    for sample in samples:
        candidates.setdefault(sample.prompt_id, []).append(Candidate(sample.seed, sample.reward))
    chosen = {prompt_id: choose_seeds(found, group_size) for prompt_id, found in sorted(candidates.items())}
    return {prompt_id: seeds for prompt_id, seeds in chosen.items() if seeds}
