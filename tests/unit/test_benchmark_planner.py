"""The replay of recorded explorations, by hand: it must pay an arm what a run would have paid it."""

from __future__ import annotations

import pytest

from benchmarks.exploration_replay import accuracy, payoffs, replay, space
from benchmarks.exploration_rewards import Record, chosen_places
from spot_runtime.config import CalibratedSteps, CalibrationConfig
from spot_runtime.planner import Arm
from spot_runtime.planner.plan import split_prompts

NAMES = [f"p{i}" for i in range(6)]
FULL = [0.0, 0.5, 1.0, 0.25]
"""Rewards of all candidates with the new weights: the first two, a default group, deviate by .25; the best and the worst of all by .5."""
RECORD = Record(
    group_size=2,
    num_steps=10,
    stale={10: {key: [0.1, 0.2, 0.9, 0.3] for key in NAMES}, 5: {key: [0.1, 0.9, 0.2, 0.3] for key in NAMES}},
    full=dict.fromkeys(NAMES, FULL),
)
BOTH, HALF = Arm(4, 10), Arm(4, 5, 0.3)


def test_seeds_are_chosen_as_a_run_chooses_them() -> None:
    assert chosen_places([0.3, 0.9, 0.1, 0.5], 2) == [1, 2]
    assert chosen_places([0.3, 0.9, 0.1, 0.5], 4) == [1, 3, 0, 2]


def test_an_arm_is_paid_by_the_rewards_of_the_seeds_that_it_chooses() -> None:
    """Two of six prompts explored. d = 4, s = 10: seeds 2 and 0, deviation .5, so r = (2 * .5 + 4 * .25) / 6 / .25 = 4/3. s = 5 chooses
    seeds 1 and 0, which deviate as the default ones do."""
    explored, unexplored = split_prompts(NAMES, 0, 0, 4)
    assert (len(explored), len(unexplored)) == (2, 4)
    paid = payoffs([RECORD], [BOTH, HALF], iterations=21, replays=2)
    assert paid.gains[0][0] == (pytest.approx(1 / 3), pytest.approx(0.0))
    assert (paid.of_arm(0), paid.of_arm(1)) == (pytest.approx(1 / 3), pytest.approx(0.0))


def test_the_planner_settles_on_the_better_arm_without_a_bonus_and_tries_both_with_one() -> None:
    paid = payoffs([RECORD], [BOTH, HALF], iterations=40, replays=3)
    greedy = replay(paid, beta=0.0, window=10)
    assert all(sorted(set(chosen[:2])) == [0, 1] for chosen in greedy.chosen)
    assert all(set(chosen[2:]) == {0} for chosen in greedy.chosen)
    assert greedy.gain == pytest.approx(1 / 3)
    assert greedy.arms_of_last_ten == 1
    assert set(replay(paid, beta=5.0, window=10).chosen[0][2:]) == {0, 1}


def test_a_prompt_set_without_variance_pays_nothing_and_never_divides_by_zero() -> None:
    flat = Record(group_size=2, num_steps=10, stale=RECORD.stale, full=dict.fromkeys(NAMES, [0.5] * 4))
    paid = payoffs([flat], [BOTH], iterations=21, replays=1)
    assert set(paid.gains[0][0]) == {None}
    assert replay(paid, beta=0.5, window=10).gain == 0.0


def test_an_arm_that_changes_nothing_is_credited_with_what_the_prompts_held_back_differ_in() -> None:
    """Four of six prompts are held back; where all deviate alike their mean is that of all, else it depends on who they are."""
    assert payoffs([RECORD], [BOTH], iterations=21, replays=2).of_no_op == pytest.approx(0.0)
    uneven = Record(
        group_size=2, num_steps=10, stale=RECORD.stale, full=dict(RECORD.full) | {"p0": [0.0, 8.0, 1.0, 0.25]}
    )
    paid = payoffs([uneven], [BOTH], iterations=21, replays=1)
    _, unexplored = split_prompts(NAMES, 0, 20, 4)
    sigma = {name: 4.0 if name == "p0" else 0.25 for name in NAMES}
    expected = (sum(sigma.values()) / 6) / (sum(sigma[name] for name in unexplored) / 4) - 1
    assert paid.of_no_op == paid.no_op[0][20] == pytest.approx(expected)


def test_accuracy_is_within_prompts_and_counts_those_without_a_ranking() -> None:
    mixed = dict(RECORD.full) | {"p5": [0.5] * 4}
    found = accuracy([Record(group_size=2, num_steps=10, stale=RECORD.stale, full=mixed)])
    # ranks 0 1 3 2 against 0 2 3 1: one swap of distance one, rho = 1 - 6 * 2 / (4 * 15)
    assert found[10] == {"spearman": pytest.approx(0.8), "prompts": 5.0, "left_out": 1.0}
    # 0 3 1 2 against 0 2 3 1: 1 - 6 * (1 + 4 + 1) / 60
    assert found[5]["spearman"] == pytest.approx(0.4)


def test_the_arms_are_those_of_the_planner_whose_steps_were_recorded() -> None:
    rows = [(3, 0.5, 0.4), (5, 0.3, 0.9), (7, 0.1, 0.95), (10, 0.0, 1.0)]
    calibration = CalibrationConfig(
        resolution=64,
        num_steps=10,
        step_s=0.01,
        rows=tuple(CalibratedSteps(effective_steps=s, cache_threshold=t, accuracy=a) for s, t, a in rows),
    )
    found = {(arm.sequences, arm.effective_steps) for arm in space([RECORD], calibration, 0.8)}
    assert found == {(3, 5), (4, 5), (3, 10), (4, 10)}
