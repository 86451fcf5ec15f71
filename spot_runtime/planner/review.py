"""What became of an exploration, looked at afterwards: whether its ranking held, and what it cost. Never feeds back into a plan."""

from __future__ import annotations

from collections.abc import Iterable

from spot_runtime.planner.ranking import Agreement, Rewards, agreement
from spot_runtime.types import Pool, SampleRecord, Usage


def rank_transfer(explored: Rewards, rollouts: Iterable[SampleRecord]) -> Agreement | None:
    """How well exploration, with the weights before and a step cache, ranked the seeds of these rollouts (paper §3.2.1).

    Over the seeds that both have. Where only the best and the worst were rolled out the correlation is higher than over all candidates.
    """
    return agreement(explored, rewards_by_prompt(rollouts))


def rewards_by_prompt(samples: Iterable[SampleRecord]) -> dict[str, dict[int, float]]:
    """Rewards of a manifest's samples by prompt id and seed."""
    rewards: dict[str, dict[int, float]] = {}
    for sample in samples:
        rewards.setdefault(sample.prompt_id, {})[sample.seed] = sample.reward
    return rewards


def spot_busy_share(trained: Usage, beside: Iterable[SampleRecord]) -> float | None:
    """Share of the spot slots' time while training ran, from its submission on, that these samples took; None where none was held.

    A sample counts with the part of its busy seconds that its stay on the node overlaps the window, as if spread evenly over the stay.
    """
    if trained.spot_gpu_s <= 0:
        return None
    spot = (sample for sample in beside if sample.pool is Pool.SPOT)
    return sum(_busy_within(sample, trained.started_s, trained.finished_s) for sample in spot) / trained.spot_gpu_s


def _busy_within(sample: SampleRecord, from_s: float, to_s: float) -> float:
    stay_s = sample.finished_s - sample.started_s
    overlap_s = min(sample.finished_s, to_s) - max(sample.started_s, from_s)
    return sample.busy_s * max(0.0, overlap_s) / stay_s if stay_s > 0 else 0.0


def overhead_s(trained: Usage, explored: Usage) -> float:
    """Seconds that exploration held an iteration up: what was left of it when training was over (paper §6.3)."""
    return max(0.0, explored.finished_s - max(trained.finished_s, explored.started_s))
