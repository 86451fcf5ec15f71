import math

import pytest
import torch

from spot_runtime.rl.guard import guarded_log_ratio, step_weight
from spot_runtime.rl.loss import clipped_policy_loss
from spot_runtime.rl.sde import STEPS


def test_log_ratio_by_hand() -> None:
    mean_old, mean = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.5, 1.0]])
    sample, std = torch.tensor([[1.4, 2.6]]), torch.tensor([0.2])  # noise (2, 3)
    assert guarded_log_ratio(mean, mean_old, std, sample).item() == pytest.approx((2 * 0.5 - 3 * 1.0) / 2)


def test_it_is_the_plain_log_ratio_without_its_bias_on_the_scale_of_its_std() -> None:
    """The first line of the formula, in float64 and by torch.distributions; the module computes the second."""
    generator = torch.Generator().manual_seed(3)
    mean_old, shift, noise = (torch.randn(4, 5, 6, generator=generator, dtype=torch.float64) for _ in range(3))
    std = torch.tensor([0.05, 0.2, 0.7, 1.5], dtype=torch.float64)
    mean, sample = mean_old + 0.01 * shift, mean_old + std.view(-1, 1, 1) * noise
    now, before = (
        torch.distributions.Normal(m, std.view(-1, 1, 1)).log_prob(sample).mean((1, 2)) for m in (mean, mean_old)
    )
    bias = (mean - mean_old).square().mean((1, 2)) / (2 * std**2)
    torch.testing.assert_close(guarded_log_ratio(mean, mean_old, std, sample), std * (now - before + bias))


@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_the_mean_of_a_step_that_was_drawn_follows_from_its_noise(kind: str) -> None:
    generator = torch.Generator().manual_seed(4)
    velocity, latents, noise = (torch.randn(2, 3, 4, generator=generator) for _ in range(3))
    levels = [torch.full((2,), value) for value in (0.8, 0.6, 0.9, 0.7)]
    drawn = STEPS[kind](velocity, latents, *levels, noise=noise)
    mean_old = drawn.sample - drawn.std.view(-1, 1, 1) * noise
    torch.testing.assert_close(mean_old, drawn.mean, atol=1e-6, rtol=0)
    assert guarded_log_ratio(drawn.mean, drawn.mean, drawn.std, drawn.sample).abs().max() == 0


def test_ratios_of_all_denoising_steps_have_one_spread() -> None:
    """A policy that moved all means by as much: plain ratios differ by 1 / std, guarded ones do not."""
    generator = torch.Generator().manual_seed(5)
    mean_old, noise = torch.zeros(4000, 8), torch.randn(4000, 8, generator=generator)
    spreads = []
    for level in (0.05, 0.5):
        std = torch.full((4000,), level)
        log_ratio = guarded_log_ratio(mean_old + 0.01, mean_old, std, level * noise)
        assert log_ratio.mean().abs() < 3 * 0.01 / math.sqrt(4000 * 8)
        spreads.append(float(log_ratio.std()))
    assert spreads[0] == pytest.approx(spreads[1], rel=1e-3)


def test_weights_undo_the_factor_that_dt_leaves_in_the_gradient() -> None:
    weight = step_weight(torch.tensor([0.9, 0.2]), torch.tensor([0.8, 0.15]))
    torch.testing.assert_close(weight, torch.tensor([10.0, 20.0]))


def test_the_gradient_is_that_of_the_closed_form() -> None:
    """d/dμ of -A exp(mean(ε Δμ)) at Δμ = 0 is -A ε / D."""
    mean = torch.zeros(1, 4, requires_grad=True)
    noise = torch.tensor([[1.0, -2.0, 0.5, 0.0]])
    log_ratio = guarded_log_ratio(mean, torch.zeros(1, 4), torch.tensor([0.3]), 0.3 * noise)
    loss = clipped_policy_loss(log_ratio, torch.zeros(1), torch.tensor([1.5]), 0.1).loss
    loss.sum().backward()
    assert mean.grad is not None
    torch.testing.assert_close(mean.grad, -1.5 * noise / 4)
