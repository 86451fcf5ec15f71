"""Rules over several fields of a run's configuration."""

from __future__ import annotations

import pytest

from spot_runtime.config import SamplingConfig, TrainConfig
from spot_runtime.errors import InputError


def test_coefficient_preserving_steps_take_a_noise_level_up_to_one() -> None:
    """Beyond it sin(a π / 2) falls again: at 2 no noise is left, and a step has no density."""
    assert SamplingConfig.parse({"sde": "cps", "noise_level": 1.0}).noise_level == 1
    assert SamplingConfig.parse({"sde": "sde", "noise_level": 1.2}).noise_level == 1.2
    with pytest.raises(InputError, match=r"^noise_level = 1\.01: must be <= 1 where sde is 'cps'"):
        SamplingConfig.parse({"sde": "cps", "noise_level": 1.01})


@pytest.mark.parametrize("mode", ["best_of_n", "prescreen"])
def test_a_strategy_that_explores_every_prompt_leaves_no_deviation_of_unexplored_ones(mode: str) -> None:
    values = {"grpo": {"advantage_normalisation": "unexplored"}, "exploration": {"mode": mode}}
    with pytest.raises(InputError, match=rf"exploration\.mode must be 'bandit' or 'none', '{mode}' explores every"):
        TrainConfig.parse(values)
    for other in ("bandit", "none"):
        assert TrainConfig.parse({**values, "exploration": {"mode": other}}).exploration.mode == other
