"""The plan: windows by hand, every reason not to explore, and which prompts take part."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot_runtime.planner.arms import Arm, Calibration, CalibrationRow, arms
from spot_runtime.planner.bandit import observe, pend
from spot_runtime.planner.plan import PlanInputs, TrainTimeEstimate, plan, split_prompts
from spot_runtime.types import ArmStats, BanditState, ExplorationPlan

CALIBRATION = Calibration(0.25, (CalibrationRow(20, 0.0, 1.0), CalibrationRow(12, 0.3, 0.8)))
SPACE = arms(16, 32, CALIBRATION)
PROMPTS = tuple(f"p{i}" for i in range(20))

# d * C * s * t_step with C = 20, t_step = .25: (20, 12) 1200, (24, 12) 1440, (28, 12) 1680, (32, 12) 1920,
#                                                (20, 20) 2000, (24, 20) 2400, (28, 20) 2800, (32, 20) 3200 GPU-s
INPUTS = PlanInputs(BanditState(), SPACE, PROMPTS, spot_slots=8, train_s=220.0, step_s=0.25)


def test_first_plan_takes_the_cheapest_action_and_leaves_it_pending():
    # W = 220 * 8 = 1760: three eligible, none seen, cheapest first
    chosen, bandit = plan(INPUTS)
    assert chosen == ExplorationPlan(20, 12, 0.3, PROMPTS, planned_s=1200.0, window_s=1760.0)
    assert bandit == BanditState(pending_sequences=20, pending_effective_steps=12)


def test_plan_walks_through_unseen_eligible_arms_then_keeps_the_best():
    reward = {(20, 12): 1.1, (24, 12): 1.9, (28, 12): 1.2}
    bandit, taken = BanditState(), []
    for _ in range(6):
        chosen, bandit = plan(replace(INPUTS, bandit=bandit))
        taken.append((chosen.sequences, chosen.effective_steps))
        bandit = observe(bandit, reward[taken[-1]], INPUTS.window)
    # fourth: N = 3, all n = 1, equal bonus: mean decides, (24, 12). Fifth: N = 4, sqrt(ln 5) = 1.2686:
    # (24, 12) 1.9 + .5 * .8971 = 2.3485 against 1.2 + .5 * 1.2686 = 1.8343. Sixth: 1.9 + .5 * sqrt(ln 6 / 3) = 2.2864 against 1.8693.
    assert taken == [(20, 12), (24, 12), (28, 12), (24, 12), (24, 12), (24, 12)]


def test_an_action_that_fills_the_window_exactly_is_eligible():
    only = replace(INPUTS, arms=(Arm(20, 20),), spot_slots=10, train_s=200.0)  # T_plan = W = 2000
    assert plan(only)[0].sequences == 20
    assert plan(replace(only, evaluation_gpu_s=1e-9))[0].sequences == 0


def test_evaluation_comes_off_the_window():
    # W = 1760 - 400 = 1360: only (20, 12) at 1200 is left, though (24, 12) was better
    seen = BanditState((ArmStats(20, 12, 1, (1.0,)), ArmStats(24, 12, 1, (2.0,)), ArmStats(28, 12, 1, (1.0,))))
    assert plan(replace(INPUTS, bandit=seen))[0].sequences == 24
    chosen, _ = plan(replace(INPUTS, bandit=seen, evaluation_gpu_s=400.0))
    assert (chosen.sequences, chosen.window_s) == (20, 1360.0)


def test_fewer_spot_slots_make_the_best_action_ineligible_and_more_bring_it_back():
    seen = BanditState(tuple(ArmStats(a.sequences, a.effective_steps, 1, (a.sequences / 10,)) for a in SPACE))
    assert plan(replace(INPUTS, bandit=seen, spot_slots=16))[0].sequences == 32  # W = 3520: all eligible
    assert plan(replace(INPUTS, bandit=seen, spot_slots=7))[0].sequences == 24  # W = 1540
    assert plan(replace(INPUTS, bandit=seen, spot_slots=16))[0].sequences == 32


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"explored_prompt_ids": ()}, "no prompt to explore"),
        ({"spot_slots": 0}, "no spot slot takes work"),
        ({"arms": ()}, "no action: max_sequences must be > group_size, and one calibrated step count accurate enough"),
        (
            {"spot_slots": 5},
            "no eligible action: the cheapest, 20 sequences of 12 steps, plans 1200 GPU-s: must be <= window = 1100 GPU-s",
        ),
        (
            {"evaluation_gpu_s": 9999.0},
            "no eligible action: the cheapest, 20 sequences of 12 steps, plans 1200 GPU-s: must be <= window = 0 GPU-s",
        ),
    ],
)
def test_nothing_to_do_is_an_empty_plan_that_says_why(change, reason):
    asked = replace(INPUTS, bandit=pend(BanditState((ArmStats(20, 12, 1, (1.5,)),)), Arm(24, 12)), **change)
    chosen, bandit = plan(asked)
    assert chosen == ExplorationPlan(window_s=asked.window_s, reason=reason)
    assert (bandit.pending_sequences, bandit.pending_effective_steps) == (0, 0)


def test_zero_training_time_explores_nothing_without_an_error():
    assert plan(replace(INPUTS, train_s=0.0))[0].sequences == 0


def test_one_prompt_is_explored_alone():
    explored, unexplored = split_prompts(("only",), seed=1, iteration=2)
    assert (explored, unexplored) == (("only",), ())
    chosen, _ = plan(replace(INPUTS, explored_prompt_ids=explored))
    assert (chosen.sequences, chosen.planned_s) == (20, 60.0)  # 20 * 1 * 12 * .25


def test_arms_that_a_recalibration_removed_are_forgotten():
    stale = BanditState((ArmStats(20, 12, 3, (1.0, 1.0, 1.0)), ArmStats(20, 10, 9, (9.0,))))
    _, bandit = plan(replace(INPUTS, bandit=stale))
    assert bandit.arms == (ArmStats(20, 12, 3, (1.0, 1.0, 1.0)),)


@given(
    slots=st.integers(0, 64),
    train_s=st.floats(0, 1000),
    step_s=st.floats(0.001, 10),
    evaluation_gpu_s=st.floats(0, 1000),
    prompts=st.integers(0, 40),
    seen=st.lists(st.tuples(st.sampled_from(SPACE), st.floats(0, 5)), max_size=20),
)
def test_a_plan_always_fits_its_window(slots, train_s, step_s, evaluation_gpu_s, prompts, seen):
    bandit = BanditState()
    for arm, reward in seen:
        bandit = observe(pend(bandit, arm), reward, 10)
    ids = tuple(f"p{i}" for i in range(prompts))
    inputs = PlanInputs(bandit, SPACE, ids, slots, train_s, step_s, evaluation_gpu_s)
    chosen, after = plan(inputs)
    assert (after.pending_sequences, after.pending_effective_steps) == (chosen.sequences, chosen.effective_steps)
    assert after.arms == bandit.arms
    if chosen.sequences:
        assert not chosen.reason
        assert Arm(chosen.sequences, chosen.effective_steps, chosen.cache_threshold) in SPACE
        assert chosen.planned_s == pytest.approx(chosen.sequences * prompts * chosen.effective_steps * step_s)
        assert chosen.planned_s <= chosen.window_s <= train_s * slots
    else:
        assert chosen.reason
        assert chosen.explored_prompt_ids == ()
        budget = train_s * slots - evaluation_gpu_s
        assert prompts == 0 or slots == 0 or 20 * prompts * 12 * step_s > budget * (1 - 1e-12)


# ---- T_train ----------------------------------------------------------------------------------------------------------------------


def test_training_time_is_calibrated_until_it_was_measured():
    estimate = TrainTimeEstimate(calibrated_s=40.0)
    assert estimate.estimate_s == 40.0
    # 50 s of training + 15 s of weight push - 5 s until the last sample is scored
    assert estimate.observe(50.0, weight_push_s=15.0, reward_tail_s=5.0).estimate_s == 60.0
    assert estimate.estimate_s == 40.0


def test_training_time_is_the_median_of_the_last_five():
    estimate = TrainTimeEstimate(40.0)
    for train_s in (10.0, 20.0):
        estimate = estimate.observe(train_s)
    assert estimate.estimate_s == 15.0
    for train_s in (500.0, 21.0, 22.0):  # 10 20 21 22 500
        estimate = estimate.observe(train_s)
    assert estimate.estimate_s == 21.0
    for train_s in (31.0, 32.0, 33.0):  # 21 22 31 32 33
        estimate = estimate.observe(train_s)
    assert estimate.observed_s == (21.0, 22.0, 31.0, 32.0, 33.0)
    assert estimate.estimate_s == 31.0


@pytest.mark.parametrize(
    ("observed_s", "estimate_s"),
    [
        ((40.0, 40.0, 40.0, 40.0, 20.0), 40.0),  # one may be an outlier
        ((40.0, 40.0, 40.0, 20.0, 22.0), 22.0),  # two are a fall: what is planned beyond it delays the iteration
        ((20.0, 20.0, 20.0, 40.0, 40.0), 20.0),  # two are no rise yet
        ((40.0, 20.0), 30.0),
    ],
)
def test_a_fall_is_followed_sooner_than_a_rise(observed_s: tuple[float, ...], estimate_s: float):
    assert TrainTimeEstimate(1.0, observed_s).estimate_s == estimate_s


def test_a_reward_tail_longer_than_training_leaves_no_window():
    assert TrainTimeEstimate(40.0).observe(3.0, reward_tail_s=9.0).estimate_s == 0.0


@given(st.lists(st.floats(1, 100), min_size=1, max_size=12))
def test_training_time_stays_within_what_was_measured_lately(durations_s):
    estimate = TrainTimeEstimate(1e6)
    for duration_s in durations_s:
        estimate = estimate.observe(duration_s)
    assert min(durations_s[-5:]) <= estimate.estimate_s <= max(durations_s[-5:])


@pytest.mark.parametrize("train_s", [-1.0, math.nan, math.inf])
def test_an_impossible_training_time_is_a_programmer_error(train_s):
    with pytest.raises(AssertionError, match="train_s"):
        TrainTimeEstimate(40.0).observe(train_s)


# ---- which prompts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompts", "held_back"), [(0, 0), (1, 0), (2, 1), (4, 3), (5, 4), (24, 4)])
def test_four_prompts_are_held_back_but_never_all(prompts, held_back):
    explored, unexplored = split_prompts([f"p{i}" for i in range(prompts)], seed=0, iteration=0)
    assert (len(explored), len(unexplored)) == (prompts - held_back, held_back)


def test_the_split_is_fixed_by_seed_and_iteration():
    ids = [f"p{i}" for i in range(24)]
    assert split_prompts(ids, 7, 3)[1] == ("p16", "p17", "p18", "p23")
    assert len({split_prompts(ids, 7, iteration)[1] for iteration in range(20)}) == 20
    assert len({split_prompts(ids, seed, 3)[1] for seed in range(20)}) == 20


@given(
    st.lists(st.text(max_size=4), unique=True, max_size=30), st.integers(), st.integers(0), st.integers(0, 6), st.data()
)
def test_the_split_is_a_partition_in_order_whatever_the_order(ids, seed, iteration, held_back, data):
    explored, unexplored = split_prompts(ids, seed, iteration, held_back)
    assert sorted(explored + unexplored) == sorted(ids)
    assert list(explored) == [i for i in ids if i in explored]
    assert list(unexplored) == [i for i in ids if i in unexplored]
    shuffled = data.draw(st.permutations(ids))
    assert set(split_prompts(shuffled, seed, iteration, held_back)[1]) == set(unexplored)
