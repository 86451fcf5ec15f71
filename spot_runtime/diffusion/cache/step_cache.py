"""What a step cache is to the denoise loop, and the rules that hold for any. Owns one sample's memory; never calls the transformer.

Each sample decides for itself, from all of its own tokens, so its result depends neither on its batch nor on how its tokens are spread over
ranks (`velocity.py` says how ranks come to decide alike). A cache is never committed: an engine that
is asked to go on without one takes a full forward, which makes another sample, so whoever schedules starts such a sample over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from spot_runtime.messages import SamplingParams


class StepCache(Protocol):
    """Memory of one sample between its denoising steps. Each step calls `measure`, then `is_due`, and after a forward `keep`."""

    def measure(self, modulated: Tensor) -> Tensor:
        """A vector of sums to decide by, from the timestep-modulated input of the first block over all tokens [tokens, width]."""

    def is_due(self, sums: Sequence[float]) -> bool:
        """Whether the sample needs a forward, given those sums."""

    def keep(self, residual: Tensor, velocity: Tensor) -> None:
        """After a forward: what all blocks together added to the image tokens [tokens, width], and v [tokens, channels].

        Both may be views of a batch.
        """

    @property
    def residual(self) -> Tensor:
        """What stands in for the blocks of a step without a forward [tokens, width]. Asked for only after a `keep`."""

    def memory(self) -> list[Tensor]:
        """All that it remembers, for a rank that joins. Asked for only after a `keep`."""

    def empty_memory(self, like: Tensor) -> list[Tensor]:
        """Tensors of the shapes of a `memory`, to be overwritten with one; `like` is a modulated input."""

    def remember(self, memory: list[Tensor]) -> None:
        """Takes another rank's `memory` for its own."""

    def __copy__(self) -> StepCache:
        """One that changes by itself; tensors are never written to and may be shared."""


StepCacheMaker = Callable[[SamplingParams], StepCache]
"""A cache for one sample of a request with these parameters, whose threshold is not 0."""


@dataclass
class CachedSample:
    """A sample's cache and its place in the loop. The first step and the first after a gap take a full forward, and so does `full_step`.

    `next_step` is the denoising step that would follow the last one taken.
    """

    cache: StepCache
    full_step: int | None = None
    next_step: int = 0

    @classmethod
    def of(cls, cache: StepCache, params: SamplingParams) -> CachedSample:
        return cls(cache, params.num_steps - 1 if params.cache_last_full else None)

    def __copy__(self) -> CachedSample:
        """What to go back to where a denoising step cannot be ended."""
        return replace(self, cache=copy(self.cache))

    def takes_forward(self, denoising_step: int, sums: Sequence[float]) -> bool:
        """Asked once a denoising step, whatever holds: the cache has to hear of every step."""
        due = self.cache.is_due(sums)
        resumed = denoising_step != self.next_step
        return due or resumed or denoising_step in (0, self.full_step)

    def step_taken(self, denoising_step: int) -> None:
        """Also called for a step without a forward."""
        self.next_step = denoising_step + 1
