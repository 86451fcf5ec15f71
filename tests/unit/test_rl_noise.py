import numpy as np
import pytest
import torch

from spot_runtime.rl.noise import SEED_MAX, initial_latents, sde_noise

GOLDEN_INITIAL = [[-0.2933390, 1.7038306, 1.5391918]]
GOLDEN_NOISE = [[-0.5934703, 1.5478250, -0.5029522]]


def test_draws_have_their_published_values() -> None:
    torch.testing.assert_close(initial_latents(7, 1, 3), torch.tensor(GOLDEN_INITIAL), rtol=0, atol=1e-6)
    torch.testing.assert_close(sde_noise(7, 0, 1, 3), torch.tensor(GOLDEN_NOISE), rtol=0, atol=1e-6)


def test_a_draw_is_the_philox_stream_of_its_key() -> None:
    stream = np.random.Generator(np.random.Philox(key=np.array([5, 3], dtype=np.uint64)))
    expected = stream.standard_normal((4, 2), dtype=np.float32)
    assert np.array_equal(sde_noise(5, 2, 4, 2).numpy(), expected)


def test_draws_ignore_threads_and_whatever_was_drawn_before() -> None:
    threads = torch.get_num_threads()
    first = sde_noise(11, 4, 64, 16)
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        torch.manual_seed(0)
        np.random.default_rng(0)
        initial_latents(12, 64, 16)
        assert torch.equal(sde_noise(11, 4, 64, 16), first)
    finally:
        torch.set_num_threads(threads)


def test_every_seed_and_step_has_its_own_stream() -> None:
    seeds = [0, 1, 2**32, 2**32 + 1, 2**52 - 1, SEED_MAX]
    draws = [initial_latents(seed, 4, 4) for seed in seeds]
    draws += [sde_noise(seed, step, 4, 4) for seed in seeds for step in range(3)]
    assert len({draw.numpy().tobytes() for draw in draws}) == len(draws)


def test_draws_are_standard_normal_and_steps_are_uncorrelated() -> None:
    one, two = sde_noise(1, 0, 400, 50).flatten(), sde_noise(1, 1, 400, 50).flatten()
    assert abs(float(one.mean())) < 0.02
    assert abs(float(one.std()) - 1) < 0.02
    assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 0.02


@pytest.mark.parametrize("seed", [-1, SEED_MAX + 1])
def test_a_seed_out_of_range_is_a_programming_error(seed: int) -> None:
    with pytest.raises(AssertionError, match="seed"):
        initial_latents(seed, 1, 1)
