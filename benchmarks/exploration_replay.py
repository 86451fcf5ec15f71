"""Replays the planner on recorded rewards: what it would have chosen and been paid, beside every fixed arm and a choice at random. Pure.

r_{a,i}  feedback of arm a in iteration i, from the recorded rewards of the seeds that a chooses;  gain = r - 1.
Replays differ in which prompts are held back. A recording of fewer iterations than are replayed is stretched: iteration i looks at record
floor(i n / I) of n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.exploration_rewards import Record, chosen_places
from spot_runtime.config import CalibrationConfig
from spot_runtime.planner import (
    Arm,
    Calibration,
    CalibrationRow,
    arms,
    choose,
    feedback,
    group_deviations,
    observe,
    pend,
)
from spot_runtime.planner.plan import split_prompts
from spot_runtime.planner.ranking import agreement
from spot_runtime.types import BanditState

UNEXPLORED = 4
SETTLED_FROM = 20
"""Iterations before this are the bandit's own exploration (paper, appendix B.2)."""


@dataclass(frozen=True)
class Payoffs:
    """`gains[replay][iteration][arm]`, None where the ratio says nothing. `no_op[replay][iteration]` is the gain of an arm that changes
    nothing: every prompt keeps its default seeds. It is 0 but for the few prompts held back: a mean of ratios to a noisy mean lies above
    the ratio of the means, so every arm's gain has this much of its own accord.
    """

    arms: tuple[Arm, ...]
    gains: tuple[tuple[tuple[float | None, ...], ...], ...]
    no_op: tuple[tuple[float | None, ...], ...]

    def of_arm(self, arm: int) -> float:
        """Mean gain of a fixed arm once settled."""
        return _mean([row[arm] for replay in self.gains for row in replay[SETTLED_FROM:]])

    @property
    def of_no_op(self) -> float:
        """The same of the arm that changes nothing."""
        return _mean([gain for replay in self.no_op for gain in replay[SETTLED_FROM:]])


@dataclass(frozen=True)
class Replayed:
    """One planner over all replays: arms chosen, as places in `Payoffs.arms`, and its mean gain once settled."""

    chosen: tuple[tuple[int, ...], ...]
    gain: float

    @property
    def arms_of_last_ten(self) -> float:
        """Different arms in the last ten iterations, on average: 1 has settled."""
        return fmean(len(set(replay[-10:])) for replay in self.chosen)


def space(records: Sequence[Record], calibration: CalibrationConfig, target_accuracy: float) -> tuple[Arm, ...]:
    """The arms that the planner would have and whose step counts were recorded."""
    first = records[0]
    rows = tuple(
        CalibrationRow(row.effective_steps, row.cache_threshold, row.accuracy, row.step_cost)
        for row in calibration.rows
        if row.effective_steps in first.stale
    )
    candidates = len(next(iter(first.full.values())))
    return arms(first.group_size, candidates, Calibration(calibration.step_s, rows), target_accuracy)


def payoffs(records: Sequence[Record], actions: Sequence[Arm], *, iterations: int, replays: int) -> Payoffs:
    """Feedback of every arm in every iteration, for `replays` draws of the prompts that are held back."""
    places = [iteration * len(records) // iterations for iteration in range(iterations)]
    default = [group_deviations({name: full[: r.group_size] for name, full in r.full.items()}) for r in records]
    explored = [[_deviations(record, arm) for arm in actions] for record in records]
    gains = tuple(
        tuple(
            tuple(_gain(default[place], sigma, replay, iteration) for sigma in explored[place])
            for iteration, place in enumerate(places)
        )
        for replay in range(replays)
    )
    no_op = tuple(
        tuple(_gain(default[place], default[place], replay, iteration) for iteration, place in enumerate(places))
        for replay in range(replays)
    )
    return Payoffs(tuple(actions), gains, no_op)


def replay(paid: Payoffs, *, beta: float, window: int) -> Replayed:
    """The planner with every arm eligible in every iteration."""
    chosen, gains = [], []
    places = {arm: place for place, arm in enumerate(paid.arms)}
    for rows in paid.gains:
        state, picks = BanditState(), []
        for iteration, row in enumerate(rows):
            arm = choose(state, paid.arms, beta, window)
            assert arm is not None, "no arm"
            gain = row[places[arm]]
            state = observe(pend(state, arm), None if gain is None else 1 + gain, window)
            picks.append(places[arm])
            if iteration >= SETTLED_FROM:
                gains.append(gain)
        chosen.append(tuple(picks))
    return Replayed(tuple(chosen), _mean(gains))


def accuracy(records: Sequence[Record]) -> dict[int, dict[str, float]]:
    """By effective steps: Spearman within prompts of explored rewards against those of full rollouts with the new weights, and how many
    prompts that is over and how many had nothing to rank.
    """
    found = {}
    for steps in sorted(records[0].stale):
        agreed = [agreement(_by_place(record.stale[steps]), _by_place(record.full)) for record in records]
        ranked = [item for item in agreed if item is not None]
        groups = sum(item.groups for item in ranked)
        mean = sum(item.spearman * item.groups for item in ranked) / groups if groups else 0.0
        found[steps] = {
            "spearman": mean,
            "prompts": float(groups),
            "left_out": float(sum(len(record.full) for record in records) - groups),
        }
    return found


def _deviations(record: Record, arm: Arm) -> dict[str, float]:
    """sigma_g of every prompt under the seeds that `arm` chooses, by the rewards of full rollouts."""
    rolled_out = {}
    for name, rewards in record.stale[arm.effective_steps].items():
        places = chosen_places(rewards[: arm.sequences], record.group_size)
        rolled_out[name] = [record.full[name][place] for place in places]
    return group_deviations(rolled_out)


def _gain(default: Mapping[str, float], explored: Mapping[str, float], replay: int, iteration: int) -> float | None:
    """r - 1 where this replay holds its prompts back; both deviations are by prompt id."""
    _, unexplored = split_prompts(sorted(default), replay, iteration, UNEXPLORED)
    ratio = feedback({**explored, **{name: default[name] for name in unexplored}}, unexplored)
    return None if ratio is None else ratio - 1


def _by_place(rewards: dict[str, list[float]]) -> dict[str, dict[int, float]]:
    return {name: dict(enumerate(values)) for name, values in rewards.items()}


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return fmean(known) if known else 0.0
