"""Measurements on an engine that a calibration is made of: what cache thresholds do to samples, and seconds a sample-step by batch.

Owns the loops and the clock around them. Never judges an image (the caller does) and never turns measurements into a calibration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import msgspec
import numpy as np

from spot_runtime.diffusion.engine import RolloutEngine
from spot_runtime.messages import GenerationRequest, StepItem
from spot_runtime.planner.screening import Screening

Embeds = Mapping[str, np.ndarray]
"""Prompt embedding by embedding key."""
Judge = Callable[[GenerationRequest, np.ndarray], float]
"""Reward of an image [H, W, 3] uint8 for a request."""
LATENCY_STEPS: Final = 5
"""Denoising steps timed for each batch size; their median counts."""


@dataclass(frozen=True)
class Drawn:
    """One batch: images, full forwards of each sample, and seconds for all of it, decoding included."""

    images: list[np.ndarray]
    full_steps: tuple[int, ...]
    elapsed_s: float


def draw(engine: RolloutEngine, requests: Sequence[GenerationRequest], embeds: Embeds) -> Drawn:
    """Samples `requests` together from the first denoising step to the image, in slots 0, 1, ... which must be free."""
    slots = range(len(requests))
    for slot, request in enumerate(requests):
        engine.admit(slot, request, embeds[request.embedding_key])
    latents = [engine.initial_latents(slot) for slot in slots]
    started_s = time.perf_counter()
    for denoising_step in range(requests[0].params.num_steps):
        items = [StepItem(slot=slot, denoising_step=denoising_step) for slot in slots]
        latents = [step.latents for step in engine.denoise(items, latents)]
    images = engine.decode(slots, latents)
    elapsed_s = time.perf_counter() - started_s
    full_steps = tuple(engine.full_steps(slot) for slot in slots)
    for slot in slots:
        engine.release(slot)
    return Drawn(images, full_steps, elapsed_s)


def screen(
    engine: RolloutEngine,
    requests: Sequence[GenerationRequest],
    embeds: Embeds,
    thresholds: Iterable[float],
    judge: Judge,
    *,
    batch: int,
    on_batch: Callable[[int, int], None],
) -> tuple[Screening, ...]:
    """One Screening for each of `thresholds`, over exploration requests of one shape.

    Every batch is drawn under all thresholds, one after the other, so that what slows the machine slows all of them. `on_batch` hears
    (requests done, requests in all).
    """
    found = [_Tally(threshold) for threshold in thresholds]
    for start in range(0, len(requests), batch):
        part = requests[start : start + batch]
        for tally in found:
            tally.add(part, draw(engine, [_cached(request, tally.threshold) for request in part], embeds), judge)
        on_batch(start + len(part), len(requests))
    return tuple(tally.screening() for tally in found)


def step_latencies(
    engine: RolloutEngine, request: GenerationRequest, embeds: Embeds, batches: Iterable[int]
) -> dict[int, float]:
    """Seconds a sample-step, latency(batch) / batch, for each batch size, of full forwards."""
    return {batch: _step_latency(engine, request, embeds, batch) / batch for batch in batches}


class _Tally:
    """A screening in the making."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._rewards: dict[str, dict[int, float]] = {}
        self._full_steps: list[int] = []
        self._batch_s: list[float] = []

    def add(self, requests: Sequence[GenerationRequest], drawn: Drawn, judge: Judge) -> None:
        for request, image in zip(requests, drawn.images, strict=True):
            self._rewards.setdefault(request.prompt_id, {})[request.seed] = judge(request, image)
        self._full_steps += drawn.full_steps
        self._batch_s.append(drawn.elapsed_s)

    def screening(self) -> Screening:
        return Screening(self.threshold, self._rewards, tuple(self._full_steps), tuple(self._batch_s))


def _cached(request: GenerationRequest, threshold: float) -> GenerationRequest:
    return msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, cache_threshold=threshold))


def _step_latency(engine: RolloutEngine, request: GenerationRequest, embeds: Embeds, batch: int) -> float:
    plain = _cached(request, 0.0)
    for slot in range(batch):
        engine.admit(slot, plain, embeds[request.embedding_key])
    items = [StepItem(slot=slot, denoising_step=0) for slot in range(batch)]
    latents = [engine.initial_latents(slot) for slot in range(batch)]
    engine.denoise(items, latents)  # the first one may compile, allocate and warm up
    times_s = []
    for _ in range(LATENCY_STEPS):
        started_s = time.perf_counter()
        engine.denoise(items, latents)
        times_s.append(time.perf_counter() - started_s)
    for slot in range(batch):
        engine.release(slot)
    return median(times_s)
