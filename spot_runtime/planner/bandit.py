"""Owns the sliding-window UCB over exploration arms and its feedback. Never knows the time window: eligible arms come in.

Symbols (paper §4.3.2, §4.3.3): sigma_g reward deviation of prompt group g, r feedback, N_i updates of arm i, N = sum of N_i,
n_i = min(N_i, W_b) observations in the window W_b, mu_i their mean.

An action is pending from its plan until the rollouts that used its seeds are scored. Its feedback is then observed exactly once. Where
there is none (exploration dropped, a ratio that is undefined), the action counts as never tried: N_i stays, so n_i = min(N_i, W_b) holds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from spot_runtime.planner.arms import Arm
from spot_runtime.types import ArmStats, BanditState

LARGEST_SHARE = math.nextafter(1.0, 0.0)
"""The largest mean of numbers below 1: rounding may reach 1 itself."""


def ucb(stats: ArmStats, updates: int, beta: float, window: int) -> float:
    """UCB(a_i) = mu_i + beta * sqrt(ln(N + 1) / n_i), +inf for an arm without observations. `updates` is N."""
    recent = stats.observations[-window:]
    if not recent:
        return math.inf
    return _mean(recent) + beta * math.sqrt(math.log(updates + 1) / len(recent))


def choose(state: BanditState, eligible: Iterable[Arm], beta: float, window: int) -> Arm | None:
    """The eligible arm with the highest UCB; ties go to lower planned cost, then fewer steps, then fewer sequences.

    None where no arm is eligible. The order of `eligible` and of `state.arms` does not matter. Source: paper §4.3.3.
    """
    assert window >= 1, f"window = {window}: must be >= 1"
    assert beta >= 0, f"beta = {beta}: must be >= 0"
    known = {(stats.sequences, stats.effective_steps): stats for stats in state.arms}
    updates = sum(stats.chosen for stats in state.arms)

    def rank(arm: Arm) -> tuple[float, float, int, int]:
        stats = known.get(_key(arm), ArmStats(*_key(arm)))
        return (-ucb(stats, updates, beta, window), arm.steps_per_prompt, arm.effective_steps, arm.sequences)

    return min(eligible, key=rank, default=None)


def pend(state: BanditState, arm: Arm | None) -> BanditState:
    """`state` with `arm` as the pending action; an older pending action that was never observed is forgotten. None: nothing pends."""
    sequences, effective_steps = (0, 0) if arm is None else _key(arm)
    return replace(state, pending_sequences=sequences, pending_effective_steps=effective_steps)


def observe(state: BanditState, reward: float | None, window: int) -> BanditState:
    """Books `reward` (r) for the pending action, keeps the last `window` observations, and clears the pending action.

    A reward of None (unknown) only clears it; without a pending action nothing changes, so a repeat is harmless.
    """
    assert window >= 1, f"window = {window}: must be >= 1"
    key = (state.pending_sequences, state.pending_effective_steps)
    cleared = pend(state, None)
    if key == (0, 0) or reward is None:
        return cleared
    assert math.isfinite(reward), f"feedback = {reward}: must be finite"
    known = {(stats.sequences, stats.effective_steps): stats for stats in state.arms}
    before = known.get(key, ArmStats(*key))
    known[key] = replace(before, chosen=before.chosen + 1, observations=(*before.observations, reward)[-window:])
    return replace(cleared, arms=tuple(known[key] for key in sorted(known)))


def retain(state: BanditState, space: Collection[Arm]) -> BanditState:
    """`state` without the arms that `space` no longer has, as after a recalibration, so that N counts only what can still be chosen."""
    keys = {_key(arm) for arm in space}
    return replace(state, arms=tuple(stats for stats in state.arms if (stats.sequences, stats.effective_steps) in keys))


def feedback(sigma: Mapping[str, float], unexplored_ids: Collection[str]) -> float | None:
    """r = mean of sigma_g over all groups / mean of sigma_g over the unexplored groups.

    `sigma` maps each prompt of the batch to its group's reward deviation; prompts that are not in `unexplored_ids` were explored, and ids
    that `sigma` lacks (failed groups) do not count. None, "no feedback", where the ratio says nothing about the action: no explored or no
    unexplored group (one prompt is always one of these), or unexplored groups without variance. Source: paper §4.3.2.
    """
    assert all(math.isfinite(value) and value >= 0 for value in sigma.values()), f"deviations {sigma}"
    unexplored = [value for prompt_id, value in sigma.items() if prompt_id in unexplored_ids]
    if not unexplored or len(unexplored) == len(sigma):
        return None
    sigma_all = _mean(list(sigma.values()))
    sigma_unc = _mean(unexplored)
    if sigma_unc == 0:
        return None
    ratio = sigma_all / sigma_unc
    return ratio if math.isfinite(ratio) else None


def group_deviations(rewards: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """sigma_g = sqrt(mean((R - mean R)^2)) of each prompt's rewards. Groups of fewer than two samples have none and are left out."""
    return {prompt_id: _deviation(group) for prompt_id, group in rewards.items() if len(group) >= 2}


def _deviation(group: Sequence[float]) -> float:
    if min(group) == max(group):
        return 0.0  # a rounded mean would leave a residue, and a tiny reference would blow the ratio up
    scale = _power_of_two_above(group)
    shares = [math.ldexp(reward, -scale) for reward in group]  # within [-1, 1], so that no square is beyond floats
    mean = math.fsum(shares) / len(shares)
    spread = math.sqrt(math.fsum((share - mean) ** 2 for share in shares) / len(shares))
    return math.ldexp(min(LARGEST_SHARE, spread), scale)


def _mean(values: Sequence[float]) -> float:
    """Also of values whose sum is beyond floats."""
    scale = _power_of_two_above(values)
    mean = math.fsum(math.ldexp(value, -scale) for value in values) / len(values)
    return math.ldexp(max(-LARGEST_SHARE, min(LARGEST_SHARE, mean)), scale)


def _power_of_two_above(values: Sequence[float]) -> int:
    """The exponent e of the largest of them, |value| < 2^e: scaling by it is exact."""
    return math.frexp(max(map(abs, values)))[1]


def _key(arm: Arm) -> tuple[int, int]:
    return (arm.sequences, arm.effective_steps)
