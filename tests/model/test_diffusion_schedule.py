import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

from spot_runtime.diffusion.schedule import dynamic_shift, schedule_digest, sigmas

QWEN_IMAGE = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}


@pytest.mark.parametrize("tokens", [64, 1024, 6400])
def test_the_shift_is_the_pipelines(tokens: int) -> None:
    assert dynamic_shift(QWEN_IMAGE, tokens) == calculate_shift(tokens, 256, 8192, 0.5, 0.9)
    assert dynamic_shift({}, tokens) == calculate_shift(tokens, 256, 4096, 0.5, 1.15)


@pytest.mark.parametrize("num_steps", [2, 10, 50])
def test_the_schedule_is_what_the_pipeline_steps_through(num_steps: int) -> None:
    got = sigmas(QWEN_IMAGE, num_steps, 1024)
    stock = FlowMatchEulerDiscreteScheduler(**QWEN_IMAGE)
    raw = torch.linspace(1, 1 / num_steps, num_steps, dtype=torch.float64).numpy()
    stock.set_timesteps(sigmas=raw, mu=calculate_shift(1024, 256, 8192, 0.5, 0.9))
    torch.testing.assert_close(got, stock.sigmas, rtol=0, atol=1e-7)
    assert got.shape == (num_steps + 1,)
    assert got[0] == 1
    assert got[-2] == pytest.approx(0.02, abs=1e-6)
    assert got[-1] == 0
    assert bool((got.diff() < 0).all())


def test_the_digest_tells_schedules_apart() -> None:
    digests = {schedule_digest(sigmas(QWEN_IMAGE, n, tokens)) for n in (5, 10) for tokens in (64, 1024)}
    assert len(digests) == 4
    assert schedule_digest(sigmas(QWEN_IMAGE, 5, 64)) in digests
