"""Spotlight's exploration: a bandit's action beside training, within its window (paper §4.3). Owns what the bandit is asked."""

from __future__ import annotations

from dataclasses import replace

from spot_runtime.planner.arms import arms
from spot_runtime.planner.plan import PlanInputs, plan, split_prompts
from spot_runtime.planner.strategies.strategy import Question
from spot_runtime.types import BanditState, ExplorationPlan


class BanditBesideTraining:
    """Weights of before, spot slots, arms (d, s); some prompts keep default seeds as the reference."""

    after_training = False
    keeps_samples = False

    def plan(self, question: Question) -> tuple[ExplorationPlan, BanditState]:
        if question.calibration is None:
            return ExplorationPlan(reason="no denoising step was measured yet"), question.bandit
        explored, _ = split_prompts(question.prompt_ids, question.seed, question.iteration, question.unexplored_prompts)
        inputs = PlanInputs(
            bandit=question.bandit,
            arms=arms(question.group_size, question.max_sequences, question.calibration, question.target_accuracy),
            explored_prompt_ids=explored,
            spot_slots=question.spot_slots,
            train_s=question.train_s,
            step_s=question.step_s or question.calibration.step_s,
            evaluation_gpu_s=question.evaluation_gpu_s,
            beta=question.beta,
            window=question.window,
        )
        chosen, bandit = plan(inputs)
        return replace(chosen, fill_sequences=self._fill(question, chosen)), bandit

    @staticmethod
    def _fill(question: Question, chosen: ExplorationPlan) -> int:
        """Candidates a prompt to go on to; none beyond the plan where evaluation waits for the slots that it leaves."""
        goes_on = chosen.sequences and not question.evaluation_gpu_s and question.fill_sequences > chosen.sequences
        return question.fill_sequences if goes_on else 0
