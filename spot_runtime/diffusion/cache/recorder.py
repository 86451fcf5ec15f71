"""A step cache that never skips and writes down what it sees: what a TeaCache polynomial and its thresholds are chosen from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Final, NamedTuple

from torch import Tensor

from spot_runtime.diffusion.cache.teacache import IDENTITY, Accumulation, TeaCache

THRESHOLD_MAX: Final = 16.0
BISECTIONS: Final = 14
"""Thresholds are multiples of 2**-10 then: finer ones would not leave other step counts."""


class Change(NamedTuple):
    """From one denoising step to the next, in relative L1: the first block's modulated input, and the velocity."""

    modulated: float
    velocity: float


class Recorder:
    """StepCache that is always due. `changes` has one entry a denoising step after the first."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._inner = TeaCache(0.0)
        self._velocity: Tensor | None = None
        self._modulated_change = 0.0

    def measure(self, modulated: Tensor) -> Tensor:
        return self._inner.measure(modulated)

    def is_due(self, sums: Sequence[float]) -> bool:
        change, size = sums
        self._modulated_change = change / size if size else 0.0
        return True

    def keep(self, residual: Tensor, velocity: Tensor) -> None:
        self._inner.keep(residual, velocity)
        before, self._velocity = self._velocity, velocity.clone()
        if before is not None:
            change = ((velocity - before).abs().sum() / before.abs().sum()).item()
            self.changes.append(Change(self._modulated_change, change))

    @property
    def residual(self) -> Tensor:
        return self._inner.residual

    def memory(self) -> list[Tensor]:
        return self._inner.memory()

    def empty_memory(self, like: Tensor) -> list[Tensor]:
        return self._inner.empty_memory(like)

    def remember(self, memory: list[Tensor]) -> None:
        self._inner.remember(memory)

    def __copy__(self) -> Recorder:
        other = Recorder()
        other.changes = self.changes.copy()
        other._inner, other._velocity, other._modulated_change = (
            copy(self._inner),
            self._velocity,
            self._modulated_change,
        )
        return other


def steps_taken(changes: Sequence[Change], threshold: float, polynomial: Sequence[float], *, last_full: bool) -> int:
    """Full forwards that a TeaCache would take over a sample with these changes; the first step always takes one."""
    rule = Accumulation(threshold, tuple(polynomial))
    taken = 1
    for denoising_step, change in enumerate(changes, start=1):
        if rule.add(change.modulated) or (last_full and denoising_step == len(changes)):
            taken += 1
            rule.restart()
    return taken


def fitted_polynomial(changes: Sequence[Change]) -> tuple[float, float]:
    """(slope, intercept) of the least-squares line from the input's change to the velocity's; the identity where there is no line.

    A line, because a higher power need not be monotone where few steps were seen.
    """
    n = len(changes)
    if n < 2:
        return IDENTITY
    x_mean = sum(change.modulated for change in changes) / n
    y_mean = sum(change.velocity for change in changes) / n
    spread = sum((change.modulated - x_mean) ** 2 for change in changes)
    slope = sum((c.modulated - x_mean) * (c.velocity - y_mean) for c in changes) / spread if spread else 0.0
    return (slope, y_mean - slope * x_mean) if slope > 0 else IDENTITY


def thresholds_by_steps(
    recorded: Sequence[Sequence[Change]], polynomial: Sequence[float], *, last_full: bool
) -> dict[int, float]:
    """For each step count between 2 and the number of denoising steps less one, the threshold that comes closest to it on average."""
    num_steps = len(recorded[0]) + 1

    def mean_steps(threshold: float) -> float:
        taken = (steps_taken(changes, threshold, polynomial, last_full=last_full) for changes in recorded)
        return sum(taken) / len(recorded)

    return {steps: _bisected(mean_steps, steps) for steps in range(2, num_steps)}


def _bisected(mean_steps: Callable[[float], float], steps: float) -> float:
    """The threshold where `mean_steps`, which falls with it, comes down to `steps`."""
    low, high = 0.0, THRESHOLD_MAX
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_steps(middle) > steps else (low, middle)
    return high
