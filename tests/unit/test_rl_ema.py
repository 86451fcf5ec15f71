import torch

from spot_runtime.rl.ema import update_ema


def test_average_by_hand() -> None:
    ema = {"w": torch.tensor([1.0, 0.0])}
    update_ema(ema, {"w": torch.tensor([2.0, 4.0])}, 0.75)
    torch.testing.assert_close(ema["w"], torch.tensor([1.25, 1.0]))
    update_ema(ema, {"w": torch.tensor([2.0, 4.0])}, 0.75)
    torch.testing.assert_close(ema["w"], torch.tensor([1.4375, 1.75]))


def test_without_decay_it_is_the_policy_itself() -> None:
    ema, weights = {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, -1.0], requires_grad=True)}
    update_ema(ema, weights, 0.0)
    assert torch.equal(ema["w"], weights["w"])
    assert not ema["w"].requires_grad
