"""DanceGRPO's exploration, as veRL-omni runs it (paper §2.2, §6.1): N full candidates of each prompt before training, the best and the
worst of which are trained on. Owns its fixed plan.

The candidates are drawn with the policy that the rollout will use and without a step cache, so the chosen ones are the rollout.
"""

from __future__ import annotations

from spot_runtime.planner.bandit import pend
from spot_runtime.planner.strategies.strategy import Question
from spot_runtime.types import BanditState, ExplorationPlan


class BestOfN:
    """N = max_sequences candidates of every prompt, each at all its denoising steps."""

    after_training = True
    keeps_samples = True

    def plan(self, question: Question) -> tuple[ExplorationPlan, BanditState]:
        bandit = pend(question.bandit, None)
        if question.max_sequences <= question.group_size:
            reason = f"max_sequences = {question.max_sequences}: must be > group_size = {question.group_size}"
            return ExplorationPlan(reason=reason), bandit
        sample_steps = question.max_sequences * len(question.prompt_ids) * question.num_steps
        chosen = ExplorationPlan(
            sequences=question.max_sequences,
            effective_steps=question.num_steps,
            explored_prompt_ids=question.prompt_ids,
            planned_s=sample_steps * question.step_s,
        )
        return chosen, bandit
