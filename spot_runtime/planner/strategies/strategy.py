"""What an exploration strategy is: which candidates the seeds of an iteration are chosen from, and when they are made.

Owns the interface. The choice among the candidates is the same for all (selection.py), and so are prompts, noise and who runs what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from spot_runtime.planner.arms import Calibration
from spot_runtime.types import BanditState, ExplorationPlan


@dataclass(frozen=True)
class Question:
    """All that a strategy may look at.

    `iteration` is the one whose prompts `prompt_ids` are, in order, and whose seeds are looked for. `calibration` is None where no step
    time is known; `step_s` is t_step (measured, else calibrated), 0 while unknown. `bandit` has observed the last action's feedback.
    `fill_sequences` candidates a prompt may be drawn by slots that would be idle.
    """

    iteration: int
    prompt_ids: tuple[str, ...]
    seed: int
    group_size: int
    num_steps: int
    max_sequences: int
    unexplored_prompts: int
    calibration: Calibration | None
    target_accuracy: float
    bandit: BanditState
    beta: float
    window: int
    spot_slots: int
    train_s: float
    step_s: float
    evaluation_gpu_s: float
    fill_sequences: int = 0


class Strategy(Protocol):
    """One way to explore. Stateless: what it has to remember is the bandit's state, which travels with the run."""

    @property
    def after_training(self) -> bool:
        """Whether it waits for the new policy and explores with it, on all slots, while nothing trains: on the critical path.

        Else it explores with the policy before, on spot slots, beside training.
        """

    @property
    def keeps_samples(self) -> bool:
        """Whether its samples are what a rollout of the same seeds would be: then the rollout takes them over and draws none again."""

    def plan(self, question: Question) -> tuple[ExplorationPlan, BanditState]:
        """What to explore, and the bandit after that choice. `sequences == 0` explores nothing and `reason` says why in one line."""
