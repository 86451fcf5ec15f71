"""TeaCache (arXiv 2411.19108): reuse the blocks' residual while their input has changed little. Owns its rule and memory of one sample.

m_i timestep-modulated input of the first block at denoising step i [tokens, width], delta threshold:
    a_i = a_{i-1} + |p(||m_i - m_{i-1}||_1 / ||m_{i-1}||_1)|;   a forward is due where a_i >= delta, and sets a to 0.
p rescales the input's change to the velocity's. Published coefficients belong to one model each and need not be monotone, so p is the
identity unless a calibration fitted another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.linalg import vector_norm

from spot_runtime.errors import InputError
from spot_runtime.messages import SamplingParams

IDENTITY: Final = (1.0, 0.0)
"""p(x) = x."""


@dataclass
class Accumulation:
    """The rule without its tensors; `total` is a."""

    threshold: float
    polynomial: tuple[float, ...]
    total: float = 0.0

    def add(self, change: float) -> bool:
        """Takes one step's relative change in; whether a forward is due."""
        value = 0.0
        for coefficient in self.polynomial:
            value = value * change + coefficient
        self.total += abs(value)
        return self.total >= self.threshold

    def restart(self) -> None:
        self.total = 0.0


class TeaCache:
    """StepCache with `threshold` delta; `polynomial` are p's coefficients, the highest power first. Remembers m, r and a."""

    def __init__(self, threshold: float, polynomial: Sequence[float] = IDENTITY) -> None:
        self._rule = Accumulation(threshold, tuple(polynomial))
        self._modulated: Tensor | None = None
        self._residual: Tensor | None = None

    def measure(self, modulated: Tensor) -> Tensor:
        """[2] fp32: ||m_i - m_{i-1}||_1 and ||m_{i-1}||_1 over these tokens; zeros at the first step."""
        before, self._modulated = self._modulated, modulated.clone()  # a view would keep its whole batch alive
        if before is None:
            return torch.zeros(2, device=modulated.device)
        before = before.float()
        return torch.stack([vector_norm(part, 1) for part in (modulated.float() - before, before)])

    def is_due(self, sums: Sequence[float]) -> bool:
        change, size = sums
        due = self._rule.add(change / size) if size else False
        return due or self._residual is None

    def keep(self, residual: Tensor, velocity: Tensor) -> None:  # noqa: ARG002 - other caches keep it
        self._residual = residual
        self._rule.restart()

    @property
    def residual(self) -> Tensor:
        assert self._residual is not None, "no forward was taken yet"
        return self._residual

    def memory(self) -> list[Tensor]:
        assert self._modulated is not None, "no step was taken yet"
        total = torch.tensor([self._rule.total], dtype=torch.float64, device=self._modulated.device)
        return [self._modulated, self.residual, total]

    def empty_memory(self, like: Tensor) -> list[Tensor]:
        return [torch.empty_like(like), torch.empty_like(like), torch.empty(1, dtype=torch.float64, device=like.device)]

    def remember(self, memory: list[Tensor]) -> None:
        self._modulated, self._residual, total = memory
        self._rule.total = total.item()

    def __copy__(self) -> TeaCache:
        other = TeaCache(self._rule.threshold, self._rule.polynomial)
        other._rule.total = self._rule.total
        other._modulated, other._residual = self._modulated, self._residual
        return other


def teacache(params: SamplingParams) -> TeaCache:
    """StepCacheMaker of the default cache. Raises InputError for coefficients that make no polynomial."""
    coefficients = params.cache_polynomial
    if not coefficients or not all(math.isfinite(coefficient) for coefficient in coefficients):
        raise InputError(f"cache_polynomial = {coefficients}: must be at least 1 coefficient, all finite")
    return TeaCache(params.cache_threshold, coefficients)
