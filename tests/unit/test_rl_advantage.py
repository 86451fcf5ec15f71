import numpy as np
import pytest

from spot_runtime.errors import TrainingError
from spot_runtime.rl.advantage import EPS, advantages

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.25, 0.75, 0.5, 0.5]
GROUPS = ["a"] * 4 + ["b"] * 4


def values(
    normalisation: str, rewards: list[float] = REWARDS, groups: list[str] = GROUPS, clip: float = 5.0
) -> list[float]:
    return advantages(rewards, groups, normalisation=normalisation, advantage_clip=clip).values.tolist()


def test_group_normalisation_by_hand() -> None:
    a, b = 0.5 / (0.5 + EPS), 0.25 / (0.1767767 + EPS)
    assert values("group") == pytest.approx([a, -a, -a, a, -b, b, 0, 0], abs=1e-5)


def test_batch_normalisation_by_hand() -> None:
    """Mean of all rewards .5, squares .25 * 4 + .0625 * 2 over 8: std = sqrt(.140625) = .375."""
    a, b = 0.5 / (0.375 + EPS), 0.25 / (0.375 + EPS)
    assert values("batch") == pytest.approx([a, -a, -a, a, -b, b, 0, 0], abs=1e-5)


@pytest.mark.parametrize("normalisation", ["group", "batch", "unexplored", "none"])
def test_rewards_whose_spread_overflows_are_refused(normalisation: str) -> None:
    with pytest.raises(TrainingError, match=r"rewards from 0 to 1e\+200: their spread must be finite"):
        values(normalisation, [1e200, 0.0, 0.0, 0.0], ["a"] * 4)


def test_unexplored_normalisation_by_hand() -> None:
    """Only b has default seeds: std of (.25, .75, .5, .5) is sqrt(.03125) = .1767767, and exploration's a does not raise it."""
    got = advantages(
        REWARDS, GROUPS, normalisation="unexplored", advantage_clip=5.0, explored=[True] * 4 + [False] * 4
    ).values
    a, b = 0.5 / (0.1767767 + EPS), 0.25 / (0.1767767 + EPS)
    assert got.tolist() == pytest.approx([a, -a, -a, a, -b, b, 0, 0], abs=1e-5)


def test_without_exploration_unexplored_is_batch() -> None:
    assert values("unexplored") == values("batch")


def test_unexplored_prompts_without_any_spread_are_no_measure() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    explored = [True] * 4 + [False] * 4
    got = advantages(rewards, GROUPS, normalisation="unexplored", advantage_clip=5.0, explored=explored).values
    assert got.tolist() == values("batch", rewards)


def test_unexplored_needs_a_prompt_with_default_seeds() -> None:
    with pytest.raises(TrainingError, match="'unexplored': 0 prompts with default seeds, must be >= 1"):
        advantages(REWARDS, GROUPS, normalisation="unexplored", advantage_clip=5.0, explored=[True] * 8)


def test_none_only_centres() -> None:
    assert values("none") == pytest.approx([0.5, -0.5, -0.5, 0.5, -0.25, 0.25, 0, 0], abs=1e-7)


def test_advantages_are_clipped() -> None:
    assert values("group", [0.0] * 9 + [1.0], ["a"] * 10, clip=2.0)[-1] == 2.0


@pytest.mark.parametrize("normalisation", ["group", "batch", "none"])
def test_flat_and_singleton_groups_are_zero_and_inactive(normalisation: str) -> None:
    rewards = [0.1] * 3 + [0.7] + [0.0, 1.0]
    got = advantages(rewards, ["flat"] * 3 + ["single"] + ["live"] * 2, normalisation=normalisation, advantage_clip=5)
    assert got.values[:4].tolist() == [0, 0, 0, 0]
    assert got.active.tolist() == [False] * 4 + [True] * 2
    assert (got.groups, got.zero_variance_groups) == (3, 2)
    assert np.isfinite(got.values).all()


def test_a_nearly_flat_group_is_live_however_small_its_std() -> None:
    got = advantages([0.5, 0.5 + 1e-9], ["a", "a"], normalisation="group", advantage_clip=5)
    assert got.active.all()
    assert got.zero_variance_groups == 0


def test_order_of_samples_does_not_matter() -> None:
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    shuffled = values("batch", [REWARDS[i] for i in order], [GROUPS[i] for i in order])
    assert shuffled == pytest.approx([values("batch")[i] for i in order], abs=1e-7)


def test_group_std_is_the_mean_over_groups() -> None:
    got = advantages(REWARDS, GROUPS, normalisation="batch", advantage_clip=5)
    assert got.group_std_mean == pytest.approx((0.5 + 0.1767767) / 2, abs=1e-6)
