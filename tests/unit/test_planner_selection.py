"""Seed selection: the best and the worst halves of what exploration found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_records import sample_record

from spot_runtime.planner.selection import Candidate, ChosenSeed, Side, choose_by_prompt, choose_seeds


def candidates(*rewards: float) -> list[Candidate]:
    """Candidates with seeds 100, 101, ... in order."""
    return [Candidate(100 + index, reward) for index, reward in enumerate(rewards)]


def test_the_best_half_comes_first_and_the_worst_half_last() -> None:
    chosen = choose_seeds(candidates(0.1, 0.9, 0.5, 0.7, 0.0, 0.3), group_size=4)
    assert chosen == (
        ChosenSeed(101, 0.9, 0, Side.TOP),
        ChosenSeed(103, 0.7, 1, Side.TOP),
        ChosenSeed(100, 0.1, 4, Side.BOTTOM),
        ChosenSeed(104, 0.0, 5, Side.BOTTOM),
    )


def test_an_odd_number_of_candidates_leaves_out_the_middle() -> None:
    chosen = choose_seeds(candidates(5, 4, 3, 2, 1), group_size=4)
    assert [item.reward for item in chosen] == [5, 4, 2, 1]


def test_as_many_candidates_as_the_group_are_all_taken() -> None:
    chosen = choose_seeds(candidates(0.2, 0.8), group_size=2)
    assert [(item.seed, item.side) for item in chosen] == [(101, Side.TOP), (100, Side.BOTTOM)]


def test_fewer_candidates_than_the_group_give_nothing() -> None:
    assert choose_seeds(candidates(1, 0, 1), group_size=4) == ()
    assert choose_seeds([], group_size=2) == ()


def test_equal_rewards_are_ordered_by_seed_whatever_their_order_of_arrival() -> None:
    arrived = candidates(1, 1, 1, 0, 0, 0)
    expected = [100, 101, 104, 105]
    assert [item.seed for item in choose_seeds(arrived, group_size=4)] == expected
    assert [item.seed for item in choose_seeds(arrived[::-1], group_size=4)] == expected


def test_a_group_of_equal_rewards_is_chosen_by_the_same_rule() -> None:
    chosen = choose_seeds(candidates(0, 0, 0, 0, 0), group_size=2)
    assert [(item.seed, item.rank) for item in chosen] == [(100, 0), (104, 4)]


@pytest.mark.parametrize("group_size", [1, 3, 0])
def test_an_odd_or_tiny_group_is_a_programming_error(group_size: int) -> None:
    with pytest.raises(AssertionError, match="group_size"):
        choose_seeds(candidates(1, 0, 1, 0), group_size)


def test_a_repeated_seed_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="twice"):
        choose_seeds([Candidate(1, 0.0), Candidate(1, 1.0)], group_size=2)


def test_a_reward_that_is_not_finite_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="finite"):
        choose_seeds([Candidate(1, float("nan")), Candidate(2, 1.0)], group_size=2)


def test_prompts_are_chosen_apart_and_unfinished_ones_left_out() -> None:
    samples = [
        sample_record("b", 1, 0.0),
        sample_record("a", 2, 1.0),
        sample_record("a", 3, 0.0),
        sample_record("b", 4, 1.0),
        sample_record("c", 5, 1.0),
    ]
    chosen = choose_by_prompt(samples, group_size=2)
    assert {prompt_id: [item.seed for item in seeds] for prompt_id, seeds in chosen.items()} == {
        "a": [2, 3],
        "b": [4, 1],
    }


@given(
    rewards=st.lists(st.integers(0, 4), min_size=2, max_size=24),
    half=st.integers(1, 8),
)
def test_no_unchosen_candidate_beats_the_top_or_undercuts_the_bottom(rewards: list[int], half: int) -> None:
    found = candidates(*map(float, rewards))
    chosen = choose_seeds(found, 2 * half)
    if len(found) < 2 * half:
        assert chosen == ()
        return
    assert len(chosen) == 2 * half
    assert len({item.seed for item in chosen}) == 2 * half
    left = [item.reward for item in found if item.seed not in {other.seed for other in chosen}]
    worst_of_top = min(item.reward for item in chosen if item.side is Side.TOP)
    best_of_bottom = max(item.reward for item in chosen if item.side is Side.BOTTOM)
    assert all(best_of_bottom <= reward <= worst_of_top for reward in left)
