"""Rank transfer and overhead of an exploration, by hand."""

from __future__ import annotations

import pytest
from sample_records import sample_record

from spot_runtime.planner.ranking import Agreement
from spot_runtime.planner.review import overhead_s, rank_transfer, rewards_by_prompt, spot_busy_share
from spot_runtime.types import Pool, SampleRecord, Usage

ROLLOUTS = (
    sample_record("a", 1, 0.1),
    sample_record("a", 2, 0.9),
    sample_record("b", 1, 0.5),
    sample_record("b", 2, 0.2),
    sample_record("c", 9, 1.0),
)


def test_transfer_is_over_the_seeds_that_were_explored_and_rolled_out() -> None:
    """Prompt a kept its order and b swapped it; c was not explored."""
    explored = {"a": {1: 0.3, 2: 0.4, 3: 0.9}, "b": {1: 0.1, 2: 0.2}}
    assert rank_transfer(explored, ROLLOUTS) == Agreement(spearman=0.0, groups=2, flat_groups=0)
    assert rank_transfer({"a": explored["a"]}, ROLLOUTS) == Agreement(spearman=1.0, groups=1, flat_groups=0)


def test_without_a_bank_there_is_no_transfer() -> None:
    assert rank_transfer({}, ROLLOUTS) is None


def test_rewards_of_a_manifest_by_prompt_and_seed() -> None:
    assert rewards_by_prompt(ROLLOUTS) == {"a": {1: 0.1, 2: 0.9}, "b": {1: 0.5, 2: 0.2}, "c": {9: 1.0}}


@pytest.mark.parametrize(
    ("trained", "explored", "seconds"),
    [
        ((10.0, 30.0), (10.0, 25.0), 0.0),
        ((10.0, 30.0), (10.0, 32.5), 2.5),
        ((10.0, 30.0), (31.0, 33.0), 2.0),
        ((10.0, 30.0), (31.0, 31.0), 0.0),
    ],
)
def test_overhead_is_what_was_left_when_training_was_over(
    trained: tuple[float, float], explored: tuple[float, float], seconds: float
) -> None:
    assert overhead_s(Usage(*trained), Usage(*explored)) == seconds


def busy(started_s: float, finished_s: float, busy_s: float, pool: Pool = Pool.SPOT) -> SampleRecord:
    return sample_record(started_s=started_s, finished_s=finished_s, busy_s=busy_s, pool=pool)


def test_spot_is_as_busy_as_its_samples_were_while_training_ran() -> None:
    """Two slots over 10 s. Whole samples count whole, one across the end by half, one after it and one on a reserved slot not at all."""
    trained = Usage(10.0, 20.0, spot_gpu_s=20.0)
    beside = [
        busy(10.0, 14.0, 4.0),
        busy(12.0, 18.0, 6.0),
        busy(18.0, 22.0, 3.0),
        busy(20.0, 24.0, 4.0),
        busy(10.0, 20.0, 10.0, Pool.RESERVED),
    ]
    assert spot_busy_share(trained, beside) == (4.0 + 6.0 + 1.5) / 20.0


def test_without_spot_slots_nothing_is_busy_or_idle() -> None:
    assert spot_busy_share(Usage(10.0, 20.0), [busy(10.0, 14.0, 4.0)]) is None


def test_a_sample_that_took_no_time_is_no_division_by_zero() -> None:
    assert spot_busy_share(Usage(0.0, 1.0, spot_gpu_s=1.0), [busy(0.5, 0.5, 0.0)]) == 0.0
