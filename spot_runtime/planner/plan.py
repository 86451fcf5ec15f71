"""Owns one iteration's exploration plan: the time window, what fits it, and which prompts take part. Never starts work.

Symbols (paper §4.3.1): W = T_train * N_spot - evaluation the window in GPU-seconds, C explored prompts,
T_plan(d, s) = d * C * s * t_step the planned GPU-seconds of an action, where t_step is that of the action's step cache (`Arm.step_cost`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from spot_runtime.planner.arms import Arm
from spot_runtime.planner.bandit import choose, pend, retain
from spot_runtime.types import BanditState, ExplorationPlan

TRAIN_TIMES_KEPT = 5
"""Odd, so the median is a real window; short, so the estimate follows a rise within three iterations; one outlier moves nothing."""


@dataclass(frozen=True)
class PlanInputs:
    """All that a plan depends on.

    `bandit` has already observed the feedback of the action before. `train_s` is T_train, `spot_slots` is N_spot (GPUs that take work now),
    `step_s` is t_step without a step cache, in GPU-seconds a sample-step (measured, else calibrated), `evaluation_gpu_s` what evaluation
    will take of the window.
    """

    bandit: BanditState
    arms: tuple[Arm, ...]
    explored_prompt_ids: tuple[str, ...]
    spot_slots: int
    train_s: float
    step_s: float
    evaluation_gpu_s: float = 0.0
    beta: float = 0.5
    window: int = 2

    def __post_init__(self) -> None:
        assert self.spot_slots >= 0, f"spot_slots = {self.spot_slots}: must be >= 0"
        assert math.isfinite(self.train_s), f"train_s = {self.train_s}: must be finite"
        assert math.isfinite(self.step_s), f"step_s = {self.step_s}: must be finite"
        assert self.train_s >= 0, f"train_s = {self.train_s}: must be >= 0"
        assert self.step_s > 0, f"step_s = {self.step_s}: must be > 0"
        assert self.evaluation_gpu_s >= 0, f"evaluation_gpu_s = {self.evaluation_gpu_s}: must be >= 0"

    @property
    def window_s(self) -> float:
        """W in GPU-seconds; evaluation may take all of it, never more."""
        return max(0.0, self.train_s * self.spot_slots - self.evaluation_gpu_s)

    def planned_s(self, arm: Arm) -> float:
        """T_plan(d, s) in GPU-seconds."""
        return arm.steps_per_prompt * len(self.explored_prompt_ids) * self.step_s


def plan(inputs: PlanInputs) -> tuple[ExplorationPlan, BanditState]:
    """The exploration of this iteration, and the bandit with that action pending.

    No prompt to explore, no spot slot, no arm, or no arm with T_plan <= W: `sequences == 0`, `reason` says why in one line, nothing pends.
    """
    bandit = retain(inputs.bandit, inputs.arms)
    eligible = [arm for arm in inputs.arms if inputs.planned_s(arm) <= inputs.window_s]
    obstacle = _obstacle(inputs, eligible)
    arm = None if obstacle else choose(bandit, eligible, inputs.beta, inputs.window)
    if arm is None:
        return ExplorationPlan(window_s=inputs.window_s, reason=obstacle), pend(bandit, None)
    chosen = ExplorationPlan(
        sequences=arm.sequences,
        effective_steps=arm.effective_steps,
        cache_threshold=arm.cache_threshold,
        explored_prompt_ids=inputs.explored_prompt_ids,
        planned_s=inputs.planned_s(arm),
        window_s=inputs.window_s,
    )
    return chosen, pend(bandit, arm)


def _obstacle(inputs: PlanInputs, eligible: Sequence[Arm]) -> str:
    """Why nothing can be explored, as one line; "" if something can."""
    if not inputs.explored_prompt_ids:
        return "no prompt to explore"
    if inputs.spot_slots == 0:
        return "no spot slot takes work"
    if not inputs.arms:
        return "no action: max_sequences must be > group_size, and one calibrated step count accurate enough"
    if not eligible:
        cheapest = min(inputs.arms, key=lambda arm: arm.steps_per_prompt)
        return (
            f"no eligible action: the cheapest, {cheapest.sequences} sequences of {cheapest.effective_steps} steps, plans "
            f"{inputs.planned_s(cheapest):.4g} GPU-s: must be <= window = {inputs.window_s:.4g} GPU-s"
        )
    return ""


@dataclass(frozen=True)
class TrainTimeEstimate:
    """T_train: how long spot slots may explore beside the next training step, in seconds.

    One observation is T = train_s + weight_push_s - reward_tail_s. Exploration may go on while the new weights are written and pushed: no
    rollout starts before they arrive. But its last samples must be scored by then, so the tail between the last denoised and the last
    scored sample comes off. The estimate is the median of the last TRAIN_TIMES_KEPT observations, or the longer of the last two where that
    is less: what is planned too long delays the iteration, so a fall is followed sooner than a rise, and still one outlier moves nothing.
    Before the first observation it is `calibrated_s`.
    """

    calibrated_s: float
    observed_s: tuple[float, ...] = ()

    def observe(self, train_s: float, weight_push_s: float = 0.0, reward_tail_s: float = 0.0) -> TrainTimeEstimate:
        """With one more finished training step. `train_s` is the whole train_step job unless `weight_push_s` is measured apart."""
        for name, value in (("train_s", train_s), ("weight_push_s", weight_push_s), ("reward_tail_s", reward_tail_s)):
            assert math.isfinite(value), f"{name} = {value}: must be finite"
            assert value >= 0, f"{name} = {value}: must be >= 0"
        usable_s = max(0.0, train_s + weight_push_s - reward_tail_s)
        return replace(self, observed_s=(*self.observed_s, usable_s)[-TRAIN_TIMES_KEPT:])

    @property
    def estimate_s(self) -> float:
        if not self.observed_s:
            return self.calibrated_s
        return min(median(self.observed_s), max(self.observed_s[-2:]))


def split_prompts(
    prompt_ids: Sequence[str], seed: int, iteration: int, unexplored: int = 4
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(explored, unexplored) prompts of `iteration`, each in the order given; `unexplored` is how many keep default seeds (paper §4.3.2).

    At least one prompt is explored, so of n prompts min(unexplored, n - 1) are held back. Who they are is a function of (seed, iteration)
    and the ids, whatever their order; they change from iteration to iteration, so that no prompt goes without exploration for ever.
    """
    assert len(set(prompt_ids)) == len(prompt_ids), "prompt ids must be distinct"
    assert unexplored >= 0, f"unexplored = {unexplored}: must be >= 0"
    held_back = max(0, min(unexplored, len(prompt_ids) - 1))
    reserved = set(sorted(prompt_ids, key=lambda prompt_id: _lot(seed, iteration, prompt_id))[:held_back])
    return (
        tuple(prompt_id for prompt_id in prompt_ids if prompt_id not in reserved),
        tuple(prompt_id for prompt_id in prompt_ids if prompt_id in reserved),
    )


def _lot(seed: int, iteration: int, prompt_id: str) -> bytes:
    return hashlib.sha256(f"{seed}:{iteration}:{prompt_id}".encode()).digest()
