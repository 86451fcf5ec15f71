import pytest
import torch
from torch.distributions import Normal, kl_divergence

from spot_runtime.rl.kl import gaussian_kl


def test_kl_by_hand() -> None:
    """Means differ by .3 and .1 under std .5: (.09 + .01) / 2 / (2 * .25) = .1."""
    got = gaussian_kl(torch.tensor([[0.3, 0.0]]), torch.tensor([[0.0, 0.1]]), torch.tensor([0.5]))
    assert got.item() == pytest.approx(0.1, abs=1e-7)


def test_kl_is_that_of_torch_distributions_a_dimension() -> None:
    mean, reference = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1))
    std = torch.tensor([0.2, 0.7, 1.3])
    wide = std.view(3, 1, 1).expand(3, 4, 5)
    want = kl_divergence(Normal(mean, wide), Normal(reference, wide)).flatten(1).mean(1)
    torch.testing.assert_close(gaussian_kl(mean, reference, std), want)


def test_kl_of_a_policy_with_itself_is_zero() -> None:
    mean = torch.randn(2, 3, 4)
    assert gaussian_kl(mean, mean, torch.ones(2)).tolist() == [0.0, 0.0]
