"""Admission of an explore job: feedback to the bandit, then the plan (docs/architecture.md, paper §4.3). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from spot_runtime.config import RunSettings
from spot_runtime.messages import JobSpec
from spot_runtime.planner import (
    Calibration,
    CalibrationRow,
    PlanInputs,
    arms,
    feedback,
    group_deviations,
    observe,
    plan,
    split_prompts,
)
from spot_runtime.scheduler.expansion import JobInputs, iteration_rows
from spot_runtime.types import BanditState, ExplorationPlan


@dataclass(frozen=True)
class Situation:
    """What control measured: live spot slots, T_train in seconds, and t_step in GPU-seconds a full sample-step; 0: not measured yet."""

    spot_slots: int
    train_s: float
    step_s: float
    evaluation_samples: int = 0
    """Samples of this iteration's evaluation that are not made yet: they come off the window."""


def plan_exploration(
    job: JobSpec, settings: RunSettings, inputs: JobInputs, situation: Situation
) -> tuple[ExplorationPlan, BanditState]:
    """Plan of one exploration phase and the bandit after this iteration's feedback."""
    exploration = settings.config.exploration
    bandit = observe(job.bandit, _feedback(job, settings, inputs), exploration.window)
    if exploration.mode == "none":
        return ExplorationPlan(reason="exploration is off"), bandit
    if job.iteration + 1 >= settings.iterations:
        return ExplorationPlan(reason="the last iteration has no next one to explore for"), bandit
    calibration = _calibration(settings, situation)
    if calibration is None:
        return ExplorationPlan(reason="no denoising step was measured yet"), bandit
    explored, _ = _split(job.iteration + 1, settings, inputs)
    step_s = situation.step_s or calibration.step_s
    return plan(
        PlanInputs(
            bandit=bandit,
            arms=arms(
                settings.config.grpo.group_size,
                exploration.max_sequences,
                calibration,
                exploration.target_accuracy,
            ),
            explored_prompt_ids=explored,
            spot_slots=situation.spot_slots,
            train_s=situation.train_s or calibration.train_s,
            step_s=step_s,
            evaluation_gpu_s=situation.evaluation_samples * settings.config.sampling.num_steps * step_s,
            beta=exploration.beta,
            window=exploration.window,
        )
    )


def _calibration(settings: RunSettings, situation: Situation) -> Calibration | None:
    """The run's calibration, else one without a step cache; None where that would need a step time that nobody measured."""
    given = settings.config.exploration.calibration
    if given is not None:
        rows = (
            CalibrationRow(row.effective_steps, row.cache_threshold, row.accuracy, row.step_cost) for row in given.rows
        )
        return Calibration(given.step_s, tuple(rows), given.train_s)
    if situation.step_s <= 0:
        return None
    return Calibration.without_cache(settings.config.sampling.num_steps, situation.step_s)


def _feedback(job: JobSpec, settings: RunSettings, inputs: JobInputs) -> float | None:
    """Feedback of the action that chose this iteration's seeds; None where nothing was explored."""
    if not job.bandit.pending_sequences:
        return None
    _, unexplored = _split(job.iteration, settings, inputs)
    return feedback(group_deviations(inputs.rewards), unexplored)


def _split(iteration: int, settings: RunSettings, inputs: JobInputs) -> tuple[tuple[str, ...], tuple[str, ...]]:
    count = settings.config.grpo.prompts_per_iteration
    rows = iteration_rows(inputs.train_rows, run_seed=settings.seed, iteration=iteration, count=count)
    unexplored = settings.config.exploration.unexplored_prompts
    return split_prompts([row.prompt_id for row in rows], settings.seed, iteration, unexplored)
