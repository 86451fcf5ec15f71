"""What became of an exploration, looked at afterwards: whether its ranking held, and what it cost. Never feeds back into a plan."""

from __future__ import annotations

from collections.abc import Iterable

from spot_runtime.planner.ranking import Agreement, Rewards, agreement
from spot_runtime.types import SampleRecord, Usage


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


def overhead_s(trained: Usage, explored: Usage) -> float:
    """Seconds that exploration held an iteration up: what was left of it when training was over (paper §6.3)."""
    return max(0.0, explored.finished_s - max(trained.finished_s, explored.started_s))
