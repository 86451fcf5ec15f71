import math

import numpy as np
import pytest
import torch

from spot_runtime.rl.sde import STEPS, Transition, cps_step, ode_step, sde_step

SIGMAS = (1.0, 0.9, 0.75, 0.4, 0.1, 0.0)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def one(value: float) -> torch.Tensor:
    return torch.full((1, 1, 1), value)


def random_batch(size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    v, x, noise = torch.randn(3, size, 6, 4, generator=generator)
    return v, x, noise


def test_sde_step_by_hand() -> None:
    """s .8, s' .6, a .7: g = .7 sqrt(.8/.2) = 1.4, dt = -.2, g²/(2s) = 1.225, μ = .755 - .1 * 1.245, std = 1.4 sqrt(.2)."""
    got = sde_step(one(0.5), one(1.0), column(0.8), column(0.6), column(0.9), column(0.7), noise=one(1.0))
    assert got.mean.item() == pytest.approx(0.6305, abs=1e-6)
    assert got.std.item() == pytest.approx(0.6260990, abs=1e-6)
    assert got.sample.item() == pytest.approx(1.2565990, abs=1e-6)
    assert got.log_prob.item() == pytest.approx(-0.5 + 0.4682467 - 0.9189385, abs=1e-6)


def test_sde_step_at_sigma_one_uses_the_next_sigma_in_the_denominator() -> None:
    """s 1, s' .9, σ_1 .9, a .5: g² = .25 / .1 = 2.5, dt = -.1, μ = 1 (1 - .125) + .5 * -.1, std = sqrt(.25)."""
    got = sde_step(one(0.5), one(1.0), column(1.0), column(0.9), column(0.9), column(0.5), noise=one(0.0))
    assert got.mean.item() == pytest.approx(0.825, abs=1e-6)
    assert got.std.item() == pytest.approx(0.5, abs=1e-6)


def test_cps_step_by_hand() -> None:
    """s .8, s' .6, a .7: std = .6 sin(.35 π), μ = .4 * .6 + sqrt(.36 - std²) * 1.1, logp = -std² at ε = 1."""
    got = cps_step(one(0.5), one(1.0), column(0.8), column(0.6), column(0.9), column(0.7), noise=one(1.0))
    assert got.std.item() == pytest.approx(0.5346039, abs=1e-6)
    assert got.mean.item() == pytest.approx(0.24 + 1.1 * 0.2723943, abs=1e-6)
    assert got.log_prob.item() == pytest.approx(-(0.5346039**2), abs=1e-6)


def test_ode_step_by_hand() -> None:
    assert ode_step(one(0.5), one(1.0), column(0.8), column(0.6)).item() == pytest.approx(0.9)


def reference(kind: str, v: np.ndarray, x: np.ndarray, s: float, t: float, first: float, a: float, eps: np.ndarray):  # type: ignore[no-untyped-def]
    """One sample in float64, written from the stochastic differential equation rather than from the module's grouping of terms."""
    v, x, eps = (array.astype(np.float64) for array in (v, x, eps))
    if kind == "sde":
        variance_rate = a * a * s / (1.0 - (first if s == 1.0 else s))
        score = -(x + (1.0 - s) * v) / s
        after_mean = x + (v - variance_rate / 2.0 * score) * (t - s)
        std = math.sqrt(variance_rate * (s - t))
        after = after_mean + std * eps
        density = -((after - after_mean) ** 2) / (2 * std**2) - math.log(std * math.sqrt(2 * math.pi))
        return after, density.mean()
    std = t * math.sin(a * math.pi / 2)
    after = (1 - t) * (x - s * v) + math.sqrt(t * t - std * std) * (x + (1 - s) * v) + std * eps
    return after, -((std * eps) ** 2).mean()


@pytest.mark.parametrize("kind", ["sde", "cps"])
@pytest.mark.parametrize("noise_level", [0.3, 0.7])
def test_steps_agree_with_an_independent_float64_implementation(kind: str, noise_level: float) -> None:
    starts = [0, 1, 2, 3]
    v, x, noise = random_batch(len(starts))
    sigma, after = column(*(SIGMAS[i] for i in starts)), column(*(SIGMAS[i + 1] for i in starts))
    first, level = column(*[SIGMAS[1]] * 4), column(*[noise_level] * 4)
    got = STEPS[kind](v, x, sigma, after, first, level, noise=noise)
    for b, i in enumerate(starts):
        want, log_prob = reference(
            kind, v[b].numpy(), x[b].numpy(), SIGMAS[i], SIGMAS[i + 1], SIGMAS[1], noise_level, noise[b].numpy()
        )
        np.testing.assert_allclose(got.sample[b].numpy(), want, rtol=0, atol=2e-6)
        assert got.log_prob[b].item() == pytest.approx(log_prob, abs=2e-6)


def price(kind: str, sample: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> Transition:
    return STEPS[kind](v, x, column(0.75, 0.9), column(0.4, 0.75), column(0.9, 0.9), column(0.7, 0.7), sample=sample)


@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_pricing_a_stored_sample_gives_the_log_prob_of_drawing_it(kind: str) -> None:
    v, x, noise = random_batch(2)
    drawn = STEPS[kind](v, x, column(0.75, 0.9), column(0.4, 0.75), column(0.9, 0.9), column(0.7, 0.7), noise=noise)
    assert torch.equal(price(kind, drawn.sample, v, x).log_prob, drawn.log_prob)


@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_a_row_does_not_depend_on_the_other_rows(kind: str) -> None:
    v, x, noise = random_batch(2)
    both = price(kind, noise, v, x)
    alone = STEPS[kind](v[1:], x[1:], column(0.9), column(0.75), column(0.9), column(0.7), sample=noise[1:])
    torch.testing.assert_close(both.log_prob[1:], alone.log_prob, rtol=0, atol=1e-6)
    assert torch.equal(both.mean[1:], alone.mean)


def test_cps_keeps_the_noise_level_of_the_schedule_and_sde_follows_the_flow() -> None:
    """With the true velocity, x' has noise of standard deviation s' around (1 - s') x_0 after CPS; SDE's is near s' for small steps."""
    generator = torch.Generator().manual_seed(3)
    clean, pure, noise = torch.randn(3, 20_000, 1, 1, generator=generator)
    s, after, level = 0.5, 0.48, 0.6
    x = (1 - s) * clean + s * pure
    rows = [torch.full((len(x),), value) for value in (s, after, 0.9, level)]
    for kind, tolerance in (("cps", 0.01), ("sde", 0.02)):
        got = STEPS[kind](pure - clean, x, *rows, noise=noise)
        assert float((got.sample - (1 - after) * clean).std()) == pytest.approx(after, abs=tolerance)


def test_log_probs_are_fp32_even_of_bf16_velocities() -> None:
    v, x, noise = random_batch(2)
    got = price("sde", noise, v.bfloat16(), x)
    want = price("sde", noise, v.bfloat16().float(), x)
    assert got.log_prob.dtype == torch.float32
    assert torch.equal(got.log_prob, want.log_prob)


def test_noise_and_sample_exclude_each_other() -> None:
    v, x, noise = random_batch(2)
    with pytest.raises(AssertionError, match="exactly one"):
        STEPS["sde"](v, x, *[column(0.5, 0.5)] * 4, noise=noise, sample=noise)
    with pytest.raises(AssertionError, match="exactly one"):
        STEPS["sde"](v, x, *[column(0.5, 0.5)] * 4)
