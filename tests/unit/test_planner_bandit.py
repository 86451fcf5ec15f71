"""The bandit: UCB by hand, feedback by hand, and what holds for every history."""

import itertools
import math
from dataclasses import replace

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from spot_runtime.errors import InputError
from spot_runtime.planner.arms import ARMS_MAX, Arm, Calibration, CalibrationRow, arms
from spot_runtime.planner.bandit import choose, feedback, group_deviations, observe, pend, retain, ucb
from spot_runtime.types import ArmStats, BanditState

A = Arm(20, 12)
B = Arm(24, 12)
C = Arm(32, 20)


def stats(arm: Arm, *observations: float, chosen: int | None = None) -> ArmStats:
    return ArmStats(arm.sequences, arm.effective_steps, len(observations) if chosen is None else chosen, observations)


def pending(state: BanditState) -> tuple[int, int]:
    return (state.pending_sequences, state.pending_effective_steps)


# ---- the action space -------------------------------------------------------------------------------------------------------------


def test_sequences_are_spread_between_group_size_and_the_maximum():
    # k = 16, d_max = 32: 16 + 16 * j // 4 for j = 1..4; k = 12: 12 + 20 * j // 4
    assert [arm.sequences for arm in arms(16, 32, Calibration.without_cache(10, 0.1))] == [20, 24, 28, 32]
    assert [arm.sequences for arm in arms(12, 32, Calibration.without_cache(10, 0.1))] == [17, 22, 27, 32]


def test_without_a_step_cache_every_arm_takes_all_steps():
    assert {(arm.effective_steps, arm.cache_threshold) for arm in arms(12, 32, Calibration.without_cache(10, 0.1))} == {
        (10, 0.0)
    }


def test_fewest_steps_are_those_that_reach_the_target_accuracy():
    rows = (CalibrationRow(20, 0.0, 1.0), CalibrationRow(12, 0.3, 0.8), CalibrationRow(9, 0.5, 0.79))
    space = arms(16, 32, Calibration(0.1, rows))
    assert sorted({(arm.effective_steps, arm.cache_threshold) for arm in space}) == [(12, 0.3), (20, 0.0)]
    assert len(space) == 8


def test_many_calibrated_rows_are_thinned_to_a_dozen_arms_that_keep_both_ends():
    rows = tuple(CalibrationRow(s, 1 - s / 20, 0.9) for s in range(8, 21))
    space = arms(16, 32, Calibration(0.1, rows))
    assert len(space) == ARMS_MAX == 12
    assert sorted({arm.effective_steps for arm in space}) == [8, 14, 20]


def test_no_arm_where_the_maximum_leaves_nothing_to_select_or_no_row_is_accurate():
    assert arms(32, 32, Calibration.without_cache(10, 0.1)) == ()
    assert arms(33, 32, Calibration.without_cache(10, 0.1)) == ()
    assert arms(16, 32, Calibration(0.1, (CalibrationRow(5, 0.9, 0.5),))) == ()


@given(
    group_size=st.integers(2, 64),
    max_sequences=st.integers(2, 64),
    rows=st.lists(
        st.builds(CalibrationRow, st.integers(1, 50), st.floats(0, 1), st.floats(-1, 1)),
        min_size=1,
        max_size=20,
        unique_by=lambda row: row.effective_steps,
    ),
)
def test_every_arm_selects_is_allowed_and_accurate(group_size, max_sequences, rows):
    space = arms(group_size, max_sequences, Calibration(0.1, tuple(rows)))
    known = {(row.effective_steps, row.cache_threshold): row.accuracy for row in rows}
    assert len(space) <= ARMS_MAX
    assert len({(arm.sequences, arm.effective_steps) for arm in space}) == len(space)
    assert all(group_size < arm.sequences <= max_sequences for arm in space)
    assert all(known[arm.effective_steps, arm.cache_threshold] >= 0.8 for arm in space)
    if space:
        assert max(arm.sequences for arm in space) == max_sequences
        assert min(arm.effective_steps for arm in space) == min(
            s for (s, _), accuracy in known.items() if accuracy >= 0.8
        )


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ((0.0, (CalibrationRow(10, 0, 1),)), "calibration.step_s = 0.0: must be finite and > 0"),
        ((math.nan, (CalibrationRow(10, 0, 1),)), "calibration.step_s = nan: must be finite and > 0"),
        ((0.1, (CalibrationRow(10, 0, 1),), -1.0), "calibration.train_s = -1.0: must be finite and >= 0"),
        ((0.1, ()), "calibration.rows = 0: must be at least 1"),
        ((0.1, (CalibrationRow(0, 0, 1),)), "calibration.effective_steps = 0: must be >= 1"),
        ((0.1, (CalibrationRow(10, -0.5, 1),)), "calibration.cache_threshold = -0.5: must be >= 0"),
        ((0.1, (CalibrationRow(10, 0, 1.5),)), "calibration.accuracy = 1.5: must be within [-1, 1]"),
        ((0.1, (CalibrationRow(10, 0, 1, 0.0),)), "calibration.step_cost = 0.0: must be finite and > 0"),
        (
            (0.1, (CalibrationRow(10, 0, 1), CalibrationRow(10, 0.2, 0.9))),
            "calibration.effective_steps = [10, 10]: must be distinct",
        ),
    ],
)
def test_a_calibration_that_cannot_be_used_is_named_in_one_line(values, line):
    with pytest.raises(InputError) as caught:
        Calibration(*values)
    assert str(caught.value) == line


def test_calibration_round_trips_through_json():
    calibration = Calibration(0.25, (CalibrationRow(20, 0.0, 1.0), CalibrationRow(12, 0.3, 0.85)), 40.0)
    assert msgspec.json.decode(msgspec.json.encode(calibration), type=Calibration) == calibration


# ---- choosing ---------------------------------------------------------------------------------------------------------------------


def test_ucb_by_hand():
    # mu = (1.2 + 1.4) / 2 = 1.3, N = 3, n = 2: 1.3 + .5 * sqrt(ln 4 / 2) = 1.3 + .5 * .832555 = 1.716277
    assert ucb(stats(A, 1.2, 1.4), updates=3, beta=0.5, window=10) == pytest.approx(1.716277, abs=1e-6)
    # n = 1: 1.5 + .5 * sqrt(ln 4) = 1.5 + .5 * 1.177410 = 2.088705
    assert ucb(stats(B, 1.5), updates=3, beta=0.5, window=10) == pytest.approx(2.088705, abs=1e-6)


def test_beta_decides_between_the_proven_and_the_seldom_tried():
    # N = 4. A: mu 1.5, n 3, bonus sqrt(ln 5 / 3) = .732460. B: mu 1.2, n 1, bonus sqrt(ln 5) = 1.268636.
    # They tie at beta = .3 / (1.268636 - .732460) = .559518.
    state = BanditState((stats(A, 1.5, 1.5, 1.5), stats(B, 1.2)))
    assert choose(state, (A, B), beta=0.0, window=10) == A
    assert choose(state, (A, B), beta=0.5595, window=10) == A
    assert choose(state, (A, B), beta=0.5596, window=10) == B


def test_the_mean_is_over_the_window_while_n_counts_all_updates():
    # A was chosen 20 times, the window holds 3: mean of (3, 1, 1) = 5/3, and with W_b = 2 the 3 is forgotten: mean 1.
    # N = 21: A = 5/3 + .5 * sqrt(ln 22 / 3) = 2.174197; with W_b = 2: 1 + .5 * sqrt(ln 22 / 2) = 1.621595
    old = stats(A, 3.0, 1.0, 1.0, chosen=20)
    assert ucb(old, updates=21, beta=0.5, window=3) == pytest.approx(5 / 3 + 0.5 * math.sqrt(math.log(22) / 3))
    assert ucb(old, updates=21, beta=0.5, window=3) == pytest.approx(2.174197, abs=1e-6)
    assert ucb(old, updates=21, beta=0.5, window=2) == pytest.approx(1.621595, abs=1e-6)


def test_ties_go_to_lower_cost_then_fewer_steps_then_fewer_sequences():
    cheap, dear = Arm(18, 10), Arm(20, 12)  # 180 < 240 forwards a prompt
    assert choose(BanditState(), (dear, cheap), 0.5, 10) == cheap
    cheap_of_many_steps, dear_of_few = Arm(14, 12), Arm(20, 10)  # 168 < 200: cost comes before steps
    assert choose(BanditState(), (dear_of_few, cheap_of_many_steps), 0.5, 10) == cheap_of_many_steps
    few_steps, many_steps = Arm(24, 10), Arm(20, 12)  # both 240
    assert choose(BanditState(), (many_steps, few_steps), 0.5, 10) == few_steps
    cached, full = Arm(20, 10, 0.3, step_cost=1.3), Arm(20, 12)  # 260 > 240: a cached step costs more than a full one
    assert choose(BanditState(), (cached, full), 0.5, 10) == full
    # equal observations tie as unseen arms do
    state = BanditState((stats(few_steps, 1.1), stats(many_steps, 1.1)))
    assert choose(state, (many_steps, few_steps), 0.5, 10) == few_steps
    # equal cost and steps means equal sequences: only the threshold differs, and then the first is as good as the second
    assert choose(BanditState(), (Arm(20, 12, 0.3),), 0.5, 10) == Arm(20, 12, 0.3)


def test_updates_of_arms_that_do_not_fit_now_count_in_n():
    # beta 1; A and B alone, N = 5: A = 2.2 + sqrt(ln 6 / 4) = 2.869, B = 1.5 + sqrt(ln 6) = 2.839
    state = BanditState((stats(A, 2.2, 2.2, 2.2, 2.2), stats(B, 1.5)))
    assert choose(state, (A, B), beta=1.0, window=10) == A
    # with 40 of C, one of them in the window, N = 45: A = 3.178, B = 3.457; N = 6 would leave A ahead, 2.897 to 2.895
    longer = BanditState((*state.arms, stats(C, 1.0, chosen=40)))
    assert choose(longer, (A, B), beta=1.0, window=10) == B


def test_nothing_eligible_chooses_nothing():
    assert choose(BanditState((stats(A, 9.0),)), (), 0.5, 10) is None


arm_lists = st.lists(
    st.builds(Arm, st.integers(13, 32), st.integers(1, 20)),
    max_size=12,
    unique_by=lambda a: (a.sequences, a.effective_steps),
)
rewards = st.floats(0, 10, allow_nan=False)


@st.composite
def histories(draw: st.DrawFn) -> tuple[BanditState, list[Arm], int]:
    space = draw(arm_lists)
    window = draw(st.integers(1, 6))
    state = BanditState()
    for arm, reward in draw(st.lists(st.tuples(st.sampled_from(space), rewards), max_size=30)) if space else ():
        state = observe(pend(state, arm), reward, window)
    return state, space, window


@given(histories(), st.floats(0, 2), st.randoms(use_true_random=False), st.data())
def test_choice_is_eligible_unseen_first_and_blind_to_order(history, beta, random, data):
    state, space, window = history
    eligible = data.draw(st.lists(st.sampled_from(space), unique=True)) if space else []
    chosen = choose(state, eligible, beta, window)
    assert (chosen is None) == (not eligible)
    if chosen is None:
        return
    assert chosen in eligible
    seen = {(entry.sequences, entry.effective_steps) for entry in state.arms}
    unseen = [arm for arm in eligible if (arm.sequences, arm.effective_steps) not in seen]
    if unseen:
        assert chosen == min(unseen, key=lambda a: (a.sequences * a.effective_steps, a.effective_steps, a.sequences))
    shuffled = random.sample(eligible, len(eligible))
    mixed = replace(state, arms=tuple(random.sample(state.arms, len(state.arms))))
    assert choose(mixed, shuffled, beta, window) == chosen


@given(histories(), st.floats(0, 2))
def test_choice_maximises_the_index_written_out_again(history, beta):
    state, space, window = history
    chosen = choose(state, space, beta, window)
    if chosen is None:
        return
    total = sum(entry.chosen for entry in state.arms)
    score = dict.fromkeys(space, math.inf)
    for arm, entry in itertools.product(space, state.arms):
        if (arm.sequences, arm.effective_steps) == (entry.sequences, entry.effective_steps):
            n = min(entry.chosen, window)
            assert n == len(entry.observations)
            score[arm] = sum(entry.observations) / n + beta * (math.log(total + 1) / n) ** 0.5
    best = max(score.values())
    assert score[chosen] == best or score[chosen] == pytest.approx(best)


# ---- observing --------------------------------------------------------------------------------------------------------------------


def test_feedback_is_booked_once_for_the_pending_action():
    state = observe(pend(BanditState(), A), 1.25, window=10)
    assert state == BanditState((ArmStats(20, 12, 1, (1.25,)),))
    assert observe(state, 9.0, window=10) == state


def test_unknown_feedback_clears_the_pending_action_and_leaves_the_arm_untried():
    state = observe(pend(BanditState((stats(B, 1.0),)), A), None, window=10)
    assert state == BanditState((stats(B, 1.0),))
    assert choose(state, (A, B), 0.5, 10) == A


def test_a_new_plan_replaces_a_pending_action_that_was_never_observed():
    state = observe(pend(pend(BanditState(), A), B), 1.5, window=10)
    assert state.arms == (stats(B, 1.5),)


@given(st.lists(rewards, min_size=1, max_size=30), st.integers(1, 8))
def test_the_window_keeps_the_last_observations_and_the_count_all(observations, window):
    state = BanditState()
    for reward in observations:
        state = observe(pend(state, A), reward, window)
    (entry,) = state.arms
    assert entry.observations == tuple(observations[-window:])
    assert entry.chosen == len(observations)


@given(st.lists(rewards, max_size=6), st.lists(rewards, max_size=6), st.lists(rewards, min_size=4, max_size=4))
def test_what_left_the_window_no_longer_matters(past, other_past, recent):
    states = []
    for observations in (past + recent, other_past + recent):
        state = BanditState()
        for reward in observations:
            state = observe(pend(state, A), reward, window=4)
        states.append(state)
    assert states[0].arms[0].observations == states[1].arms[0].observations == tuple(recent)


def test_recalibration_drops_vanished_arms_and_their_share_of_n():
    state = pend(BanditState((stats(A, 1.0, 1.0), stats(C, 2.0))), A)
    kept = retain(state, (B, C))
    assert kept.arms == (stats(C, 2.0),)
    assert pending(kept) == (20, 12)
    # N is 1 now, not 3: C = 2 + sqrt(ln 2) * .5
    assert ucb(kept.arms[0], sum(entry.chosen for entry in kept.arms), 0.5, 10) == pytest.approx(
        2 + 0.5 * math.sqrt(math.log(2))
    )


@given(histories(), arm_lists)
def test_bandit_state_round_trips_as_json(history, others):
    state, space, _ = history
    state = pend(state, (space + others or [None])[0])
    adapter = TypeAdapter(BanditState)
    assert msgspec.json.decode(msgspec.json.encode(state), type=BanditState) == state
    assert adapter.validate_json(adapter.dump_json(state)) == state
    assert adapter.validate_json(msgspec.json.encode(state)) == state
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=BanditState) == state


# ---- feedback ---------------------------------------------------------------------------------------------------------------------


def test_feedback_by_hand():
    # all = (.4 + .6 + .1 + .3) / 4 = .35; unexplored = (.1 + .3) / 2 = .2; r = 1.75
    assert feedback({"a": 0.4, "b": 0.6, "c": 0.1, "d": 0.3}, {"c", "d"}) == pytest.approx(1.75)


def test_constant_explored_groups_count_against_the_action():
    # all = (0 + .2) / 2 = .1; unexplored = .2; r = .5
    assert feedback({"a": 0.0, "b": 0.2}, {"b"}) == pytest.approx(0.5)


def test_groups_that_failed_do_not_count():
    assert feedback({"a": 0.4, "b": 0.2}, {"b", "gone"}) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("sigma", "unexplored"),
    [
        ({}, set()),
        ({"a": 0.3}, set()),  # one prompt, explored
        ({"a": 0.3}, {"a"}),  # one prompt, not explored
        ({"a": 0.3, "b": 0.2}, set()),  # none unexplored
        ({"a": 0.3, "b": 0.2}, {"a", "b"}),  # none explored
        ({"a": 0.3, "b": 0.0}, {"b"}),  # no variance to compare with
        ({"a": 0.0, "b": 0.0}, {"b"}),
        ({"a": 1e300, "b": 5e-324}, {"b"}),  # a ratio beyond floats
    ],
)
def test_feedback_is_undefined_where_the_ratio_says_nothing(sigma, unexplored):
    assert feedback(sigma, unexplored) is None


@given(st.dictionaries(st.text(max_size=3), st.floats(0.01, 10), min_size=2, max_size=10), st.data())
def test_feedback_does_not_depend_on_order_or_scale(sigma, data):
    ids = sorted(sigma)
    unexplored = set(ids[: data.draw(st.integers(1, len(ids) - 1))])
    r = feedback(sigma, unexplored)
    assert r is not None
    assert feedback({key: sigma[key] for key in data.draw(st.permutations(ids))}, unexplored) == r
    assert feedback({key: 4 * value for key, value in sigma.items()}, unexplored) == pytest.approx(r)
    assert r >= (len(unexplored) / len(ids)) * (1 - 1e-9)


def test_rewards_at_the_end_of_floats_are_no_arithmetic_error():
    largest = 1.7976931348623157e308
    sigma = group_deviations({"a": (0.0, 1e200), "b": (-largest, largest), "c": (0.0, 5e-324), "d": (largest, 0.0)})
    assert sigma == {"a": 5e199, "b": largest, "c": 0.0, "d": largest / 2}
    assert feedback({"a": largest, "b": largest, "c": largest}, {"c"}) == 1.0
    assert ucb(stats(A, largest, largest, largest), updates=3, beta=0.0, window=3) == largest
    assert ucb(stats(A, 0.0, 0.0), updates=3, beta=0.0, window=3) == 0.0


@given(st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=8), st.integers(-900, 900))
def test_a_deviation_scales_with_its_rewards(group, exponent):
    (sigma,) = group_deviations({"a": group}).values()
    mean = math.fsum(group) / len(group)
    assert sigma == pytest.approx(math.sqrt(math.fsum((r - mean) ** 2 for r in group) / len(group)), rel=1e-9, abs=1e-6)
    scaled = [math.ldexp(reward, exponent) for reward in group]
    assume([math.ldexp(reward, -exponent) for reward in scaled] == group)  # nothing fell below the smallest float
    assert group_deviations({"a": scaled})["a"] == pytest.approx(math.ldexp(sigma, exponent), rel=1e-9)


def test_group_deviations_by_hand():
    # mean .5, squares .25 each: sigma .5; (0, 0, 1, 1, 1): mean .6, sigma sqrt(.24)
    sigma = group_deviations({"a": (0, 1), "b": (0, 0, 1, 1, 1), "constant": (0.1,) * 3, "alone": (1.0,), "empty": ()})
    assert sigma == {"a": 0.5, "b": pytest.approx(math.sqrt(0.24)), "constant": 0.0}
