"""The exponential moving average of a policy. Owns the formula; who keeps the average is the caller's.

ema_0     = θ_0
ema_{n+1} = d ema_n + (1 - d) θ_{n+1}        after each optimizer step
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def update_ema(ema: Mapping[str, Tensor], weights: Mapping[str, Tensor], decay: float) -> None:
    """Takes one step of the average in place. `ema` and `weights` have the same names and shapes; 0 <= d < 1."""
    assert ema.keys() == weights.keys(), f"{len(ema)} averages of {len(weights)} weights"
    for name, average in ema.items():
        average.lerp_(weights[name].detach().float(), 1 - decay)
