"""The paired bootstrap, and what a run held."""

from __future__ import annotations

import numpy as np
import pytest
from sample_records import sample_record

from spot_runtime.types import SampleRecord, Usage
from tasks.cost import Meter, Spend, read_meter
from tasks.models import State, json_text
from tasks.statistics import compare, paired_bootstrap, sentence


def sample(prompt_id: str, seed: int, correct: bool) -> SampleRecord:
    return sample_record(prompt_id, seed, correct=correct)


def test_a_golden_interval() -> None:
    before = [0.0] * 60 + [1.0] * 40
    after = [1.0] * 25 + [0.0] * 35 + [1.0] * 30 + [0.0] * 10
    gain = paired_bootstrap(before, after)
    assert (gain.pairs, gain.before, gain.after) == (100, 0.4, 0.55)
    assert gain.difference == pytest.approx(0.15)
    assert (gain.low, gain.high) == (pytest.approx(0.04), pytest.approx(0.26))


def test_the_interval_is_that_of_the_normal_approximation_for_many_pairs() -> None:
    rng = np.random.default_rng(7)
    difference = rng.normal(0.2, 1.0, 5_000)
    gain = paired_bootstrap(np.zeros(5_000).tolist(), difference.tolist(), resamples=2000)
    half = 1.96 * difference.std() / np.sqrt(5_000)
    assert gain.low == pytest.approx(difference.mean() - half, abs=0.002)
    assert gain.high == pytest.approx(difference.mean() + half, abs=0.002)


def test_equal_arguments_give_equal_results_and_another_seed_others() -> None:
    before, after = [0.0, 1.0, 0.0, 1.0, 0.2], [1.0, 1.0, 0.3, 0.0, 0.9]
    assert paired_bootstrap(before, after) == paired_bootstrap(before, after)
    assert paired_bootstrap(before, after, seed=1) != paired_bootstrap(before, after)


def test_pairs_of_one_prompt_are_resampled_together() -> None:
    """Two prompts, of three pairs and of one: means of two draws are 1 (1 in 4), 3/4 (2 in 4) and 0 (1 in 4)."""
    gain = paired_bootstrap([0.0] * 4, [1.0, 1.0, 1.0, 0.0], prompts=["a", "a", "a", "b"])
    assert (gain.pairs, gain.prompts, gain.difference) == (4, 2, 0.75)
    assert (gain.low, gain.high) == (0.0, 1.0)
    assert sentence(gain).endswith("paired bootstrap over 2 prompts of 4 prompt-seed pairs)")


def test_the_interval_of_few_prompts_holds_their_mean_as_often_as_it_says() -> None:
    """Ten prompts that each moved by an amount of its own, 26 pairs each: pairs taken for independent would hold it .63 of the time."""
    rng = np.random.default_rng(3)
    names, held = np.repeat(np.arange(10), 26).astype(str).tolist(), 0
    for _ in range(200):
        after = np.clip(0.5 + rng.normal(0, 0.3, 10), 0, 1)
        now = (rng.random((10, 26)) < after[:, None]).ravel().astype(float).tolist()
        then = (rng.random((10, 26)) < 0.5).ravel().astype(float).tolist()
        gain = paired_bootstrap(then, now, prompts=names, resamples=400)
        held += gain.low <= 0 <= gain.high
    assert held >= 0.85 * 200


def test_the_interval_of_one_prompt_is_for_that_prompt() -> None:
    gain = paired_bootstrap([0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 1.0], prompts=["a"] * 4)
    assert (gain.pairs, gain.prompts) == (4, 1)
    assert gain.low < gain.difference < gain.high
    assert "over 4 prompt-seed pairs of one prompt)" in sentence(gain)


def test_no_change_has_no_interval() -> None:
    gain = paired_bootstrap([1.0, 0.0, 1.0], [1.0, 0.0, 1.0])
    assert (gain.difference, gain.low, gain.high) == (0.0, 0.0, 0.0)


def test_sides_of_different_length_are_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="must be pairs"):
        paired_bootstrap([1.0], [1.0, 0.0])


def test_samples_are_paired_by_prompt_and_seed_in_any_order() -> None:
    before = [sample("a", 1, False), sample("a", 2, True), sample("b", 1, False), sample("c", 9, True)]
    after = [sample("b", 1, True), sample("a", 2, True), sample("a", 1, False), sample("d", 9, True)]
    gain = compare(before, after)
    assert gain is not None
    assert (gain.pairs, gain.prompts) == (3, 2)
    assert (gain.before, gain.after) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert compare(before, [sample("x", 1, True)]) is None


def test_the_sentence_has_both_scores_the_interval_and_the_number_of_pairs() -> None:
    gain = paired_bootstrap([0.0] * 60 + [1.0] * 40, [1.0] * 25 + [0.0] * 35 + [1.0] * 30 + [0.0] * 10)
    assert sentence(gain) == (
        "validation 0.400 -> 0.550, +0.150 (95% interval +0.040 to +0.260, paired bootstrap over 100 prompt-seed pairs)"
    )
    assert sentence(None) == "validation: no pair was scored both before and after"


def used(start_s: float, end_s: float, before: tuple[float, float], after: tuple[float, float]) -> Usage:
    """A job during which the cluster's totals of (reserved, spot) GPU-seconds went from `before` to `after`."""
    (reserved_before, spot_before), (reserved_after, spot_after) = before, after
    return Usage(
        start_s,
        end_s,
        reserved_after - reserved_before,
        spot_after - spot_before,
        reserved_total_s=reserved_after,
        spot_total_s=spot_after,
    )


def test_jobs_beside_each_other_and_the_gap_before_them_are_charged_once() -> None:
    rollout = used(50.0, 60.0, (50.0, 100.0), (60.0, 120.0))
    train = used(62.0, 72.0, (62.0, 124.0), (72.0, 144.0))
    explore = used(62.0, 67.0, (62.0, 124.0), (67.0, 134.0))
    meter = read_meter([explore, train, rollout])
    assert meter == Meter(Spend(50.0, 100.0), Spend(72.0, 144.0))
    assert meter.spend == Spend(22.0, 44.0)


def test_capacity_that_leaves_in_the_middle_of_a_long_job_is_charged_only_while_it_was_held() -> None:
    rollout = used(0.0, 30.0, (0.0, 0.0), (30.0, 60.0))
    explore = used(30.0, 60.0, (30.0, 60.0), (60.0, 60.0))
    evaluate = used(0.0, 60.0, (0.0, 0.0), (60.0, 60.0))
    meter = read_meter([rollout, explore, evaluate])
    assert meter is not None
    assert meter.spend == Spend(60.0, 60.0)


def test_the_meter_of_iterations_is_that_of_the_run() -> None:
    jobs = [
        used(10.0, 14.0, (10.0, 20.0), (14.0, 28.0)),
        used(15.0, 19.0, (15.0, 30.0), (19.0, 34.0)),
        used(15.0, 17.0, (15.0, 30.0), (17.0, 32.0)),
        used(21.0, 22.0, (21.0, 38.0), (22.0, 40.0)),
    ]
    state = State(run_id="run", settings_json="{}", iterations=1)
    assert (state.meter, state.spend) == (None, Spend())
    for part in (jobs[:1], jobs[1:3], jobs[3:]):
        state = state.model_copy(update={"meter_json": json_text(read_meter(part, state.meter))})
    assert state.meter == read_meter(jobs)
    assert state.spend == Spend(12.0, 20.0)
    assert state.spend.usd == pytest.approx((12 * 10.08 + 20 * 2.87) / 3600)


def test_a_job_that_was_told_no_total_moves_no_meter() -> None:
    before = Meter(Spend(1.0, 2.0), Spend(3.0, 4.0))
    assert read_meter([Usage(), Usage(0.0, 9.0, 9.0, 9.0)], before) == before
    assert read_meter([]) is None
