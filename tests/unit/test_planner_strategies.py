"""Exploration strategies, by hand: 4 prompts, k = 4, at most 8 candidates, 10 denoising steps of 0.01 GPU-s."""

from dataclasses import replace

import pytest

from spot_runtime.planner.arms import Calibration, CalibrationRow
from spot_runtime.planner.strategies import STRATEGIES, Question
from spot_runtime.types import ArmStats, BanditState, ExplorationPlan

PROMPTS = ("a", "b", "c", "d")
CALIBRATION = Calibration(
    0.01,
    (
        CalibrationRow(3, 0.9, 0.5, 2.0),
        CalibrationRow(5, 0.3, 0.9, 1.5),
        CalibrationRow(8, 0.1, 0.95, 1.1),
        CalibrationRow(10, 0.0, 1.0),
    ),
)
LEARNT = BanditState((ArmStats(8, 5, 3, (1.2, 1.3)),), 8, 5)
QUESTION = Question(
    iteration=3,
    prompt_ids=PROMPTS,
    seed=0,
    group_size=4,
    num_steps=10,
    max_sequences=8,
    unexplored_prompts=1,
    calibration=CALIBRATION,
    target_accuracy=0.8,
    bandit=LEARNT,
    beta=0.5,
    window=10,
    spot_slots=2,
    train_s=3.0,
    step_s=0.01,
    evaluation_gpu_s=0.0,
)


def test_only_the_bandit_hides_behind_training_and_only_best_of_n_is_the_rollout_itself() -> None:
    assert {name: (s.after_training, s.keeps_samples) for name, s in STRATEGIES.items()} == {
        "bandit": (False, False),
        "best_of_n": (True, True),
        "prescreen": (True, False),
    }


def test_the_bandit_holds_prompts_back_and_keeps_to_its_window() -> None:
    plan, bandit = STRATEGIES["bandit"].plan(QUESTION)
    assert len(plan.explored_prompt_ids) == 3
    assert plan.window_s == 6.0
    # unseen arms first, the cheapest of them: 5 candidates of 5 steps at 1.5, three prompts
    assert (plan.sequences, plan.effective_steps, plan.planned_s) == (5, 5, pytest.approx(5 * 5 * 1.5 * 3 * 0.01))
    assert (bandit.pending_sequences, bandit.pending_effective_steps) == (5, 5)


def test_only_the_bandit_fills_its_window_and_not_where_evaluation_waits_for_the_slots() -> None:
    asked = replace(QUESTION, fill_sequences=32)
    fills = {name: strategy.plan(asked)[0].fill_sequences for name, strategy in STRATEGIES.items()}
    assert fills == {"bandit": 32, "best_of_n": 0, "prescreen": 0}
    bandit = STRATEGIES["bandit"]
    assert bandit.plan(replace(asked, evaluation_gpu_s=0.5))[0].fill_sequences == 0
    assert bandit.plan(replace(asked, fill_sequences=5))[0].fill_sequences == 0  # the plan draws as many
    assert bandit.plan(replace(asked, spot_slots=0))[0].fill_sequences == 0  # nothing is explored


def test_best_of_n_draws_all_candidates_of_all_prompts_in_full_whatever_the_window() -> None:
    plan, bandit = STRATEGIES["best_of_n"].plan(replace(QUESTION, spot_slots=0, train_s=0.0))
    assert plan == ExplorationPlan(8, 10, 0.0, PROMPTS, pytest.approx(8 * 4 * 10 * 0.01))
    assert bandit == BanditState(LEARNT.arms)


def test_prescreen_draws_all_candidates_of_all_prompts_at_the_cheapest_accurate_step_count() -> None:
    plan, bandit = STRATEGIES["prescreen"].plan(replace(QUESTION, spot_slots=0))
    assert plan == ExplorationPlan(8, 5, 0.3, PROMPTS, pytest.approx(8 * 4 * 5 * 1.5 * 0.01))
    assert bandit == BanditState(LEARNT.arms)


@pytest.mark.parametrize("calibration", [None, Calibration.without_cache(10, 0.01)])
def test_prescreen_has_nothing_to_screen_with_where_every_step_is_a_forward(calibration: Calibration | None) -> None:
    plan, _ = STRATEGIES["prescreen"].plan(replace(QUESTION, calibration=calibration))
    assert plan.sequences == 0
    assert plan.reason.startswith("nothing to screen with: max_sequences must be > group_size")


def test_prescreen_has_nothing_to_screen_with_where_cached_steps_cost_more_than_all_of_them() -> None:
    """8 steps at 1.25 cost what 10 full ones do; at 1.2 they cost less."""
    dear = Calibration(0.01, (CalibrationRow(8, 0.1, 0.95, 1.25), CalibrationRow(10, 0.0, 1.0)))
    plan, _ = STRATEGIES["prescreen"].plan(replace(QUESTION, calibration=dear))
    assert (plan.sequences, plan.reason.endswith("an accurate step count cost less than all")) == (0, True)
    cheap = Calibration(0.01, (CalibrationRow(8, 0.1, 0.95, 1.2), CalibrationRow(10, 0.0, 1.0)))
    assert STRATEGIES["prescreen"].plan(replace(QUESTION, calibration=cheap))[0].effective_steps == 8


@pytest.mark.parametrize("name", ["bandit", "best_of_n", "prescreen"])
def test_as_many_candidates_as_the_group_leave_nothing_to_choose(name: str) -> None:
    plan, bandit = STRATEGIES[name].plan(replace(QUESTION, max_sequences=4))
    assert (plan.sequences, bandit.pending_sequences) == (0, 0)
    assert "max_sequences" in plan.reason


def test_best_of_n_needs_no_step_time() -> None:
    plan, _ = STRATEGIES["best_of_n"].plan(replace(QUESTION, calibration=None, step_s=0.0))
    assert (plan.sequences, plan.planned_s) == (8, 0.0)


def test_the_bandit_plans_nothing_without_a_step_time() -> None:
    plan, bandit = STRATEGIES["bandit"].plan(replace(QUESTION, calibration=None, step_s=0.0))
    assert plan == ExplorationPlan(reason="no denoising step was measured yet")
    assert bandit == LEARNT
