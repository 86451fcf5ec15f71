"""From measured thresholds to calibration rows, by hand."""

import pytest

from spot_runtime.planner.arms import Arm, Calibration, CalibrationRow, arms
from spot_runtime.planner.ranking import Agreement
from spot_runtime.planner.screening import Screening, Trial, calibration_rows, trials

TRUE = {"a": {1: 1.0, 2: 2.0, 3: 3.0}, "b": {1: 1.0, 2: 1.0, 3: 1.0}}
FULL = Screening(0.0, TRUE, (10,) * 6, (4.0, 8.0, 4.0))


def trial(steps: float, accuracy: float, speedup: float = 1.0, threshold: float = 0.1) -> Trial:
    return Trial(threshold, steps, speedup, Agreement(accuracy, 5, 0))


def test_a_threshold_is_judged_by_the_screening_without_a_cache():
    """Swapping the best two of three costs half the correlation; 4 / 2, 8 / 2, 4 / 8: the median batch was twice as fast."""
    swapped = {"a": {1: 1.0, 2: 3.0, 3: 2.0}, "b": {1: 1.0, 2: 2.0, 3: 3.0}}
    cached = Screening(0.3, swapped, (4, 5, 4, 5, 5, 5), (2.0, 2.0, 8.0))
    (tried,) = trials(FULL, [cached])
    assert tried.agreement == Agreement(spearman=pytest.approx(0.5), groups=1, flat_groups=1)
    assert (tried.cache_threshold, tried.full_steps_mean, tried.speedup) == (0.3, 28 / 6, 2.0)


def test_prompts_without_variance_judge_nothing():
    flat = Screening(0.0, {"a": {1: 1.0, 2: 1.0}}, (10, 10), (1.0,))
    assert trials(flat, [Screening(0.3, {"a": {1: 1.0, 2: 2.0}}, (5, 5), (1.0,))]) == ()


def test_a_row_keeps_the_whole_cost_of_a_sample():
    """T(0) = 10 t_step. At 4.6 effective steps, rounded to 5, and 1.6 times the speed a sample takes 6.25 t_step: 1.25 a step."""
    assert calibration_rows(10, [trial(4.6, 0.9, speedup=1.6, threshold=0.3)]) == (
        CalibrationRow(5, 0.3, 0.9, step_cost=1.25),
        CalibrationRow(10, 0.0, 1.0),
    )


def test_of_thresholds_with_the_same_steps_the_most_accurate_stays_then_the_fastest():
    tried = [trial(5.2, 0.8, 2.0, 0.3), trial(4.8, 0.9, 2.0, 0.4), trial(5.0, 0.9, 2.5, 0.5), trial(5.4, 0.7, 9.0, 0.2)]
    assert [row.cache_threshold for row in calibration_rows(10, tried)] == [0.5, 0.0]


def test_rows_are_ordered_and_a_threshold_that_skips_nothing_is_none():
    tried = [trial(8.0, 0.99, threshold=0.1), trial(3.1, 0.4, threshold=0.9), trial(9.7, 1.0, threshold=0.01)]
    rows = calibration_rows(10, tried)
    assert [(row.effective_steps, row.cache_threshold) for row in rows] == [(3, 0.9), (8, 0.1), (10, 0.0)]
    assert calibration_rows(10, []) == (CalibrationRow(10, 0.0, 1.0),)


def test_arms_cost_what_their_steps_cost():
    # d * s * step_cost: 20 * 5 * 1.5 = 150, 20 * 10 = 200
    space = arms(16, 20, Calibration(0.1, (CalibrationRow(5, 0.3, 0.9, 1.5), CalibrationRow(10, 0.0, 1.0))))
    assert {arm.steps_per_prompt for arm in space if arm.sequences == 20} == {150.0, 200.0}
    assert Arm(20, 5).steps_per_prompt == 100
