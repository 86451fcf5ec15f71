import math

import pytest
import torch

from spot_runtime.rl.loss import clipped_policy_loss


def test_loss_by_hand() -> None:
    """Ratios 1.1, .9, 1.1, .9 under ε = .05: a gain stops at 1.05, a loss at .95; the harmful direction is never clipped."""
    log_prob = torch.log(torch.tensor([1.1, 0.9, 1.1, 0.9]))
    advantage = torch.tensor([2.0, 2.0, -2.0, -2.0])
    got = clipped_policy_loss(log_prob, torch.zeros(4), advantage, 0.05)
    assert got.loss.tolist() == pytest.approx([-2.1, -1.8, 2.2, 1.9], abs=1e-6)
    assert got.log_ratio.exp().tolist() == pytest.approx([1.1, 0.9, 1.1, 0.9], abs=1e-6)
    assert got.clipped.tolist() == [True, False, False, True]


def test_clipped_rows_give_no_gradient() -> None:
    log_prob = torch.log(torch.tensor([1.1, 0.9, 1.1, 0.9])).requires_grad_()
    got = clipped_policy_loss(log_prob, torch.zeros(4), torch.tensor([2.0, 2.0, -2.0, -2.0]), 0.05)
    (gradient,) = torch.autograd.grad(got.loss.sum(), log_prob)
    assert gradient.tolist() == pytest.approx([0.0, -1.8, 2.2, 0.0], abs=1e-6)


def test_gradient_on_a_two_parameter_toy_equals_the_closed_form() -> None:
    """Policy N(w x + b, τ²) with mean log-density over D values. At ratio 1, d loss / d(w, b) = -A mean((y - w x - b) / τ² · (x, 1))."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 50, generator=generator, dtype=torch.float64)
    tau, gain = 0.6, 1.7
    w = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    b = torch.tensor(-0.2, dtype=torch.float64, requires_grad=True)
    residual = y - w * x - b
    log_prob = (-residual.square() / (2 * tau**2) - math.log(tau * math.sqrt(2 * math.pi))).mean()[None]
    got = clipped_policy_loss(log_prob, log_prob.detach(), torch.tensor([gain], dtype=torch.float64), 1e-4)
    gradient = torch.autograd.grad(got.loss.sum(), (w, b))
    scaled = (residual / tau**2).detach()
    assert gradient[0].item() == pytest.approx(-gain * float((scaled * x).mean()), rel=1e-12)
    assert gradient[1].item() == pytest.approx(-gain * float(scaled.mean()), rel=1e-12)
