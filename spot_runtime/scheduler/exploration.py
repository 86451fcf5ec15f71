"""Admission of an explore job: feedback to the bandit, then the strategy's plan (docs/architecture.md, paper §4.3). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from spot_runtime.config import ClusterConfig, RunSettings, TrainConfig
from spot_runtime.messages import JobSpec
from spot_runtime.planner import Calibration, CalibrationRow, feedback, group_deviations, observe
from spot_runtime.planner.strategies import STRATEGIES, Question
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


def calibrated_situation(settings: RunSettings, cluster: ClusterConfig, iteration: int) -> Situation:
    """What a deterministic run plans with: its cluster as started, times as calibrated. What is measured differs from run to run."""
    return Situation(
        spot_slots=cluster.spot_nodes * cluster.slots_per_spot_node,
        train_s=settings.config.exploration.calibrated_train_s,
        step_s=0.0,
        evaluation_samples=settings.config.evaluation.pairs if settings.evaluates_at(iteration) else 0,
    )


def plan_exploration(
    job: JobSpec, settings: RunSettings, inputs: JobInputs, situation: Situation
) -> tuple[ExplorationPlan, BanditState]:
    """Plan of one exploration phase and the bandit after this iteration's feedback."""
    exploration = settings.config.exploration
    bandit = observe(job.bandit, _feedback(job, inputs), exploration.window)
    strategy = STRATEGIES.get(exploration.mode)
    if strategy is None:
        return ExplorationPlan(reason="exploration is off"), bandit
    if job.iteration + 1 >= settings.iterations:
        return ExplorationPlan(reason="the last iteration has no next one to explore for"), bandit
    return strategy.plan(_question(job.iteration + 1, settings, inputs, situation, bandit))


def _question(
    iteration: int, settings: RunSettings, inputs: JobInputs, situation: Situation, bandit: BanditState
) -> Question:
    config = settings.config
    exploration = config.exploration
    rows = iteration_rows(
        inputs.train_rows, run_seed=settings.seed, iteration=iteration, count=config.grpo.prompts_per_iteration
    )
    calibration = _calibration(settings, situation)
    step_s = situation.step_s or (calibration.step_s if calibration else 0.0)
    return Question(
        iteration=iteration,
        prompt_ids=tuple(row.prompt_id for row in rows),
        seed=settings.seed,
        group_size=config.grpo.group_size,
        num_steps=config.sampling.num_steps,
        max_sequences=exploration.max_sequences,
        unexplored_prompts=exploration.unexplored_prompts,
        calibration=calibration,
        target_accuracy=exploration.target_accuracy,
        bandit=bandit,
        beta=exploration.beta,
        window=exploration.window,
        spot_slots=situation.spot_slots,
        train_s=situation.train_s or _calibrated_train_s(config),
        step_s=step_s,
        evaluation_gpu_s=situation.evaluation_samples * config.sampling.num_steps * step_s,
        fill_sequences=exploration.fill_sequences,
    )


def _calibration(settings: RunSettings, situation: Situation) -> Calibration | None:
    """The run's calibration, else one without a step cache; None where that would need a step time that nobody measured."""
    given = settings.config.exploration.calibration
    if given is not None:
        rows = (
            CalibrationRow(row.effective_steps, row.cache_threshold, row.accuracy, row.step_cost) for row in given.rows
        )
        return Calibration(given.step_s, tuple(rows), _calibrated_train_s(settings.config))
    if situation.step_s <= 0:
        return None
    return Calibration.without_cache(settings.config.sampling.num_steps, situation.step_s)


def _calibrated_train_s(config: TrainConfig) -> float:
    """Seconds of a training step on the samples of this run: training goes sample by sample. 0 where nobody measured any."""
    given = config.exploration.calibration
    if given is None:
        return 0.0
    samples = config.grpo.prompts_per_iteration * config.grpo.group_size
    return given.train_s * samples / (given.train_samples or samples)


def _feedback(job: JobSpec, inputs: JobInputs) -> float | None:
    """Feedback of the action that chose this iteration's seeds; None where nothing was explored.

    Explored are the prompts that are in the bank: one whose candidates did not suffice was rolled out with default seeds, like those that
    were held back.
    """
    if not job.bandit.pending_sequences:
        return None
    return feedback(group_deviations(inputs.rewards), inputs.rewards.keys() - inputs.bank.keys())
