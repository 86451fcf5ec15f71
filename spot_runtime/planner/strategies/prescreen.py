"""Sol-RL's exploration (paper §2.2): many cheap candidates of each prompt before the rollout, then full samples of the chosen seeds alone.
Owns its fixed plan.

Cheap is the step cache at the fewest effective steps that are accurate enough, as for the bandit: without it there is nothing to save.
"""

from __future__ import annotations

from spot_runtime.planner.arms import Arm, arms
from spot_runtime.planner.bandit import pend
from spot_runtime.planner.strategies.strategy import Question
from spot_runtime.types import BanditState, ExplorationPlan


class Prescreen:
    """max_sequences candidates of every prompt, each at the cheapest calibrated step count."""

    after_training = True
    keeps_samples = False

    def plan(self, question: Question) -> tuple[ExplorationPlan, BanditState]:
        bandit = pend(question.bandit, None)
        cheapest = self._cheapest(question)
        if cheapest is None:
            reason = "nothing to screen with: max_sequences must be > group_size, and an accurate step count cost less than all"
            return ExplorationPlan(reason=reason), bandit
        chosen = ExplorationPlan(
            sequences=cheapest.sequences,
            effective_steps=cheapest.effective_steps,
            cache_threshold=cheapest.cache_threshold,
            explored_prompt_ids=question.prompt_ids,
            planned_s=cheapest.steps_per_prompt * len(question.prompt_ids) * question.step_s,
        )
        return chosen, bandit

    @staticmethod
    def _cheapest(question: Question) -> Arm | None:
        """Of the arms with most sequences the one that costs least, where that is less than full sampling."""
        if question.calibration is None:
            return None
        space = arms(question.group_size, question.max_sequences, question.calibration, question.target_accuracy)
        full = question.max_sequences * question.num_steps
        cached = [arm for arm in space if arm.cache_threshold and arm.sequences == question.max_sequences]
        cheap = [arm for arm in cached if arm.steps_per_prompt < full]
        return min(cheap, key=lambda arm: arm.steps_per_prompt, default=None)
