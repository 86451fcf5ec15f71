import dataclasses

import numpy as np
import pytest

from spot_runtime.config import GrpoConfig, SamplingConfig
from spot_runtime.diffusion.batch import TrainingSample, checked_batch, split_by_prompt
from spot_runtime.errors import TrainingError

SAMPLING = SamplingConfig(num_steps=6, noise_level=0.7, sde_window_stop=4, sde_window_size=4)
GRPO = GrpoConfig(prompts_per_iteration=3, group_size=2, optimizer_steps=1)


def make_sample(prompt: int, seed: int) -> TrainingSample:
    return TrainingSample(
        request_id=f"r{prompt}-{seed}",
        prompt_id=f"p{prompt}",
        seed=seed,
        reward=0.5,
        embeds=np.zeros((3, 4), np.float32),
        window_latents=np.zeros((3, 4, 2), np.float32),
        log_probs=np.zeros(2, np.float32),
        sde_window=(1, 3),
        num_steps=6,
        noise_level=0.7,
    )


def batch(**changes: object) -> list[TrainingSample]:
    """Three groups of two in shuffled order; the changes go to one sample."""
    samples = [make_sample(p, s) for p, s in ((2, 5), (0, 9), (1, 1), (0, 3), (2, 4))]
    return [*samples, dataclasses.replace(make_sample(1, 7), **changes)]


def test_a_batch_is_ordered_by_prompt_and_seed() -> None:
    got = checked_batch(batch(), sampling=SAMPLING, grpo=GRPO)
    assert [(s.prompt_id, s.seed) for s in got] == [("p0", 3), ("p0", 9), ("p1", 1), ("p1", 7), ("p2", 4), ("p2", 5)]


def test_parts_hold_whole_groups_as_evenly_as_can_be() -> None:
    samples = checked_batch(batch(), sampling=SAMPLING, grpo=GRPO)
    assert split_by_prompt(samples, 1) == [[0, 1, 2, 3, 4, 5]]
    assert split_by_prompt(samples, 2) == [[0, 1, 2, 3], [4, 5]]
    assert split_by_prompt(samples, 3) == [[0, 1], [2, 3], [4, 5]]
    assert split_by_prompt(samples, 9) == [[0, 1], [2, 3], [4, 5]]


NAN = float("nan")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": NAN}, "r1-7 of prompt p1: reward = nan: must be finite"),
        ({"reward": float("inf")}, "reward = inf: must be finite"),
        ({"log_probs": np.zeros(1, np.float32)}, "1 log-probs: must be 2"),
        ({"log_probs": np.zeros(0, np.float32)}, "0 log-probs: must be 2"),
        ({"log_probs": np.array([0, NAN], np.float32)}, "must be finite"),
        ({"window_latents": np.zeros((2, 4, 2), np.float32)}, r"must be \(3, L, C\)"),
        ({"window_latents": np.full((3, 4, 2), NAN, np.float32)}, "window latents: must be finite"),
        ({"sde_window": (2, 2)}, "must lie in 0..5, not empty"),
        ({"sde_window": (4, 6)}, "must lie in 0..5"),
        ({"sde_window": (2, 4)}, r"SDE windows \[\(1, 3\), \(2, 4\)\]: a group must share one"),
        ({"num_steps": 10}, "num_steps = 10: must be 6"),
        ({"noise_level": 0.5}, "noise_level = 0.5: must be 0.7"),
        ({"seed": 1}, "prompt p1: two samples share a seed"),
        ({"prompt_id": "p2"}, "prompt p2: 3 samples: must be group_size = 2"),
        ({"prompt_id": "p3"}, "prompt p1: 1 samples: must be group_size = 2"),
    ],
)
def test_an_unfit_sample_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        checked_batch(batch(**changes), sampling=SAMPLING, grpo=GRPO)


def test_no_samples_is_an_error() -> None:
    with pytest.raises(TrainingError, match="0 samples"):
        checked_batch([], sampling=SAMPLING, grpo=GRPO)
