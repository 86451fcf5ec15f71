"""TeaCache (arXiv 2411.19108): reuse the blocks' residual while their input has changed little. Owns its rule and memory of one sample.

m_i timestep-modulated input of the first block at denoising step i [tokens, width], delta threshold:
    a_i = a_{i-1} + |p(||m_i - m_{i-1}||_1 / ||m_{i-1}||_1)|;   a forward is due where a_i >= delta, and sets a to 0.
p rescales input change to output change. Published coefficients belong to one model each and need not be monotone, so it is the identity
unless a calibration says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

IDENTITY: Final = (1.0, 0.0)
"""p(x) = x."""


class TeaCache:
    """StepCache with `threshold` delta; `polynomial` are p's coefficients, the highest power first."""

    def __init__(self, threshold: float, polynomial: Sequence[float] = IDENTITY) -> None:
        self._threshold = threshold
        self._polynomial = tuple(polynomial)
        self._modulated: Tensor | None = None
        self._residual: Tensor | None = None
        self._accumulated = 0.0

    def measure(self, modulated: Tensor) -> Tensor:
        """[2] fp32: ||m_i - m_{i-1}||_1 and ||m_{i-1}||_1 over these tokens; zeros at the first step."""
        before, self._modulated = self._modulated, modulated.clone()  # a view would keep its whole batch alive
        if before is None:
            return torch.zeros(2, device=modulated.device)
        change = (modulated.float() - before.float()).abs()
        return torch.stack([change.sum(), before.float().abs().sum()])

    def is_due(self, sums: Sequence[float]) -> bool:
        change, size = sums
        self._accumulated += abs(self._rescaled(change / size)) if size else 0.0
        return self._residual is None or self._accumulated >= self._threshold

    def keep(self, residual: Tensor) -> None:
        self._residual = residual
        self._accumulated = 0.0

    @property
    def residual(self) -> Tensor:
        assert self._residual is not None, "no forward was taken yet"
        return self._residual

    def _rescaled(self, x: float) -> float:
        value = 0.0
        for coefficient in self._polynomial:
            value = value * x + coefficient
        return value
