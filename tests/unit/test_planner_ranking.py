"""Rank correlation and within-prompt agreement, by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from spot_runtime.planner.ranking import Agreement, agreement, average_ranks, rank_correlation

values = st.lists(st.integers(-5, 5).map(float), min_size=2, max_size=20)


def test_equal_values_share_the_mean_of_their_places():
    assert average_ranks([3.0, 1.0, 3.0, 2.0]) == [2.5, 0.0, 2.5, 1.0]


def test_correlation_by_hand():
    # ranks 0 1 2 3 and 1 0 3 2: 1 - 6 * 4 / (4 * 15) = .6
    assert rank_correlation([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(0.6)
    assert rank_correlation([1, 2, 3], [30, 20, 10]) == -1.0
    # ranks 0 1.5 1.5 3 and 0 1 2 3: (2.25 + 0 + 0 + 2.25) / sqrt(4.5 * 5)
    assert rank_correlation([1, 5, 5, 9], [1, 2, 3, 4]) == pytest.approx(4.5 / 22.5**0.5)


def test_a_constant_side_has_no_correlation():
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None
    assert rank_correlation([1, 2, 3], [0, 0, 0]) is None
    assert rank_correlation([], []) is None


@settings(deadline=None)
@given(st.data(), values)
def test_it_is_the_stock_one(data, first):
    second = data.draw(st.lists(st.integers(-5, 5).map(float), min_size=len(first), max_size=len(first)))
    ours = rank_correlation(first, second)
    if ours is None:
        assert len(set(first)) == 1 or len(set(second)) == 1
    else:
        assert ours == pytest.approx(spearmanr(first, second).statistic, abs=1e-12)


def test_prompts_are_ranked_apart_and_flat_ones_left_out():
    """Between the prompts the order is reversed, which says nothing: within each it is kept, reversed, or not there."""
    reference = {"kept": {1: 0.1, 2: 0.2, 3: 0.3}, "reversed": {1: 9.0, 2: 8.0}, "flat": {1: 5.0, 2: 5.0}}
    estimate = {"kept": {1: 7.0, 2: 8.0, 3: 9.0}, "reversed": {1: 0.1, 2: 0.2}, "flat": {1: 1.0, 2: 2.0}}
    assert agreement(estimate, reference) == Agreement(spearman=0.0, groups=2, flat_groups=1)


def test_an_estimate_that_tells_nothing_apart_counts_zero():
    reference = {"a": {1: 1.0, 2: 2.0}, "b": {1: 1.0, 2: 2.0}}
    assert agreement({"a": {1: 3.0, 2: 3.0}, "b": {1: 1.0, 2: 5.0}}, reference) == Agreement(0.5, 2, 0)


def test_only_seeds_that_both_have_count():
    reference = {"a": {1: 1.0, 2: 2.0, 3: 0.0}, "unexplored": {1: 1.0, 2: 2.0}}
    assert agreement({"a": {1: 1.0, 2: 2.0, 9: 5.0}, "gone": {1: 1.0}}, reference) == Agreement(1.0, 1, 0)


def test_nothing_to_rank_is_no_agreement():
    assert agreement({}, {"a": {1: 1.0, 2: 2.0}}) is None
    assert agreement({"a": {1: 1.0}}, {"a": {1: 1.0}}) is None
    assert agreement({"a": {1: 1.0, 2: 2.0}}, {"a": {1: 3.0, 2: 3.0}}) is None
