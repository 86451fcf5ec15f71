"""What to do with each request once the machine is to go: finish, commit, or let go of on purpose. Never sends anything.

A request is finished where all that is chosen fits into the time left, shortest first; else it is committed where a commit still fits,
those with the most steps to lose first; else it is handed back at its last commit. What has a step cache is never committed. A commit
that is under way is awaited: whoever waits loses nothing, since all is handed back before the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spot_runtime.node.flight import Flight, Stage
from spot_runtime.node.pace import Pace
from spot_runtime.types import GroupId, RequestId

MARGIN_SHARE = 0.25
MARGIN_S_MAX = 1.0
"""Kept free at the end of the grace period for the last messages and the end of the processes."""
SAFETY = 0.8
"""Share of the time left that a plan may fill."""


@dataclass(frozen=True)
class DrainPlan:
    """`finish` may go on stepping, `commit` is committed and returned, `let_go` is returned as it was last committed.

    The rest is awaited.
    """

    finish: frozenset[RequestId]
    commit: tuple[Flight, ...]
    let_go: tuple[Flight, ...]


def last_word_s(now_s: float, grace_period_s: float) -> float:
    """When the node wants to have left: the end of the grace period less a margin."""
    return now_s + grace_period_s - min(MARGIN_S_MAX, MARGIN_SHARE * grace_period_s)


def plan_drain(
    flights: Sequence[Flight],
    command_age_s: Mapping[GroupId, float],
    pace: Pace,
    *,
    max_batch: int,
    left_s: float,
    latent_bytes: int = 1,
) -> DrainPlan:
    """
    Args:
        flights: all of the node, first started first.
        command_age_s: groups that take commands, with how long ago their present one began.
        left_s: seconds until the node wants to have left; at 0 everything that has no result is let go of.
        latent_bytes: of one sample.
    """
    open_flights = [flight for flight in flights if flight.stage is not Stage.REPORTED]
    if left_s <= 0:
        return DrainPlan(frozenset(), (), tuple(open_flights))
    finish: set[RequestId] = set()
    for group_id in command_age_s:
        finish |= _finishable([f for f in open_flights if f.group_id == group_id], pace, max_batch, SAFETY * left_s)
    ending = [f for f in open_flights if f.request_id not in finish]
    let_go = [f for f in ending if f.stage is Stage.FETCHING or _steps_on_too_long(f, command_age_s, pace, left_s)]
    waiting = sorted((f for f in ending if f.stage is Stage.WAITING), key=lambda f: -f.uncommitted_steps)
    worth = _committable(
        [f for f in waiting if f.uncommitted_steps > 0 and not f.is_cached], ending, pace, left_s, latent_bytes
    )
    chosen = {flight.request_id for flight in worth}
    let_go += [flight for flight in waiting if flight.request_id not in chosen]
    return DrainPlan(frozenset(finish), tuple(worth), tuple(let_go))


def _committable(
    waiting: Sequence[Flight], ending: Sequence[Flight], pace: Pace, left_s: float, latent_bytes: int
) -> list[Flight]:
    """The first of `waiting` whose commits, with those under way, the store takes in time at the bandwidth that was measured."""
    worth = [flight for flight in waiting if flight.committing_step is not None]
    if pace.commit.value_s > left_s:
        return worth
    under_way = [flight for flight in ending if flight.stage is Stage.RETURNING] + worth
    used_s = sum(pace.store.seconds(flight.commit_latents() * latent_bytes) for flight in under_way)
    for flight in waiting:
        if flight.committing_step is not None:
            continue
        used_s += pace.store.seconds(flight.commit_latents() * latent_bytes)
        if used_s > SAFETY * left_s:
            break
        worth.append(flight)
    return worth


def _finishable(flights: Sequence[Flight], pace: Pace, max_batch: int, limit_s: float) -> set[RequestId]:
    """The most requests of one group that it can finish in time, shortest first: each batch takes as long as its longest member."""
    able = sorted((f for f in flights if f.stage in (Stage.WAITING, Stage.WORKING)), key=lambda f: f.steps_left)
    for count in range(len(able), 0, -1):
        batches = [able[start : min(start + max_batch, count)] for start in range(0, count, max_batch)]
        steps = sum(batch[-1].steps_left for batch in batches)
        stepping_s = steps * pace.step.value_s if steps else 0.0
        if stepping_s + len(batches) * pace.decode.value_s + pace.finish.value_s <= limit_s:
            return {flight.request_id for flight in able[:count]}
    return set()


def _steps_on_too_long(flight: Flight, command_age_s: Mapping[GroupId, float], pace: Pace, left_s: float) -> bool:
    """Whether the command that it is in ends too late for a commit."""
    if flight.stage is not Stage.WORKING or flight.group_id not in command_age_s or flight.committing_step is not None:
        return False
    command = pace.decode if flight.is_denoised else pace.step
    to_come_s = max(0.0, command.value_s - command_age_s[flight.group_id])
    return command.measured_s is not None and to_come_s + pace.commit.value_s > left_s
