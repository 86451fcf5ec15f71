"""Measurements on the base model that a calibration is made of: what step caches do to samples, and how long things take.

Owns the loops and the clock around them. Never judges an image (the caller does) and never decides what is accurate enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import msgspec
import numpy as np

from spot_runtime.config import TrainConfig
from spot_runtime.diffusion.adapter import Adapter
from spot_runtime.diffusion.cache import StepCache, teacache
from spot_runtime.diffusion.cache.recorder import Change, Recorder
from spot_runtime.diffusion.cache.teacache import IDENTITY
from spot_runtime.diffusion.engine import DiffusersEngine
from spot_runtime.diffusion.trainer import GrpoTrainer, TrainingSample
from spot_runtime.messages import GenerationRequest, SamplingParams, StepItem
from spot_runtime.parallel.group import SequenceGroup
from spot_runtime.planner.screening import Screening
from spot_runtime.types import PolicyRef

Judge = Callable[[GenerationRequest, np.ndarray], float]
"""Reward of an image [H, W, 3] uint8 for a request."""
LATENCY_STEPS: Final = 5
"""Denoising steps timed for each batch size, after one that is not; their median counts."""
TRAININGS: Final = 2
"""Training steps timed; the last counts, the first may allocate and warm up."""


@dataclass(frozen=True)
class CacheShape:
    """What the thresholds of one calibration share: see SamplingParams."""

    polynomial: tuple[float, ...] = IDENTITY
    last_full: bool = True


@dataclass(frozen=True)
class Drawn:
    """One batch: final latents and images, full forwards of each sample, seconds for all of it, and what training would need."""

    images: list[np.ndarray]
    full_steps: tuple[int, ...]
    elapsed_s: float
    trajectories: list[list[np.ndarray]]
    log_probs: list[list[float]]


class Profiler:
    """A base model under measurement. `embeds` are prompt embeddings by embedding key; `batch` samples are denoised together.

    `dtype` is what it is loaded in and computes with, as `cluster.rollout_dtype`.
    """

    def __init__(
        self,
        model: str,
        embeds: Mapping[str, np.ndarray],
        *,
        batch: int,
        device: str,
        threads: int,
        dtype: str = "float32",
    ) -> None:
        self._embeds = embeds
        self._batch = batch
        self._recorders: list[Recorder] | None = None
        self._engine = DiffusersEngine(model, device=device, threads=threads, dtype=dtype, step_cache=self._step_cache)
        self._engine.load_policy(PolicyRef(), None)

    def close(self) -> None:
        self._engine.close()

    def set_group(self, group: SequenceGroup) -> None:
        """Denoises as one of its ranks: all of them make the same calls from here on."""
        self._engine.set_group(group)

    def load_policy(self, policy: PolicyRef, adapter: Adapter) -> None:
        """Lets requests name `policy` too; the base is always there."""
        self._engine.load_policy(policy, adapter)

    def draw(self, requests: Sequence[GenerationRequest]) -> Drawn:
        """Samples `requests` together, from the first denoising step to the image."""
        slots = range(len(requests))
        latents = self._admit(requests)
        trajectories, log_probs = [[x] for x in latents], [[] for _ in slots]  # type: ignore[var-annotated]
        started_s = time.perf_counter()
        for denoising_step in range(requests[0].params.num_steps):
            items = [StepItem(slot=slot, denoising_step=denoising_step) for slot in slots]
            for slot, step in enumerate(self._engine.denoise(items, [trajectory[-1] for trajectory in trajectories])):
                trajectories[slot].append(step.latents)
                log_probs[slot] += [] if step.log_prob is None else [step.log_prob]
        images = self._engine.decode(slots, [trajectory[-1] for trajectory in trajectories])
        elapsed_s = time.perf_counter() - started_s
        full_steps = tuple(self._engine.full_steps(slot) for slot in slots)
        self._release(len(requests))
        return Drawn(images, full_steps, elapsed_s, trajectories, log_probs)

    def record(self, requests: Sequence[GenerationRequest]) -> list[list[Change]]:
        """What a step cache would see over each of these samples, every step of it a full forward."""
        found: list[Recorder] = []
        self._recorders = found
        try:
            for start in range(0, len(requests), self._batch):
                self.draw([cached(request, 1.0) for request in requests[start : start + self._batch]])
        finally:
            self._recorders = None
        return [recorder.changes for recorder in found]

    def screen(
        self,
        requests: Sequence[GenerationRequest],
        thresholds: Iterable[float],
        cache: CacheShape,
        judge: Judge,
        on_batch: Callable[[int, int], None],
    ) -> tuple[Screening, ...]:
        """One Screening for each of `thresholds`, over exploration requests of one shape.

        Every batch is drawn under all thresholds, one after the other, so that what slows the machine slows all of them. `on_batch` hears
        (requests done, requests in all).
        """
        found = [_Tally(threshold) for threshold in thresholds]
        for start in range(0, len(requests), self._batch):
            part = requests[start : start + self._batch]
            for tally in found:
                tally.add(part, self.draw([cached(request, tally.threshold, cache) for request in part]), judge)
            on_batch(start + len(part), len(requests))
        return tuple(tally.screening() for tally in found)

    def step_latency_s(self, request: GenerationRequest, batch: int) -> float:
        """Seconds of one denoising step of `batch` samples without a step cache."""
        latents = self._admit([cached(request, 0.0)] * batch)
        items = [StepItem(slot=slot, denoising_step=0) for slot in range(batch)]
        times_s = []
        for _ in range(1 + LATENCY_STEPS):
            started_s = time.perf_counter()
            self._engine.denoise(items, latents)
            times_s.append(time.perf_counter() - started_s)
        self._release(batch)
        return median(times_s[1:])

    def training_samples(self, requests: Sequence[GenerationRequest]) -> list[TrainingSample]:
        """Rollouts of `requests` with rewards that differ, so that all of them are trained on."""
        samples = []
        for start in range(0, len(requests), self._batch):
            part = requests[start : start + self._batch]
            drawn = self.draw([cached(request, 0.0) for request in part])
            samples += [
                self.training_sample(request, trajectory, log_probs, reward=float((start + place) % 2))
                for place, (request, trajectory, log_probs) in enumerate(
                    zip(part, drawn.trajectories, drawn.log_probs, strict=True)
                )
            ]
        return samples

    def training_sample(
        self, request: GenerationRequest, trajectory: list[np.ndarray], log_probs: list[float], reward: float
    ) -> TrainingSample:
        """One sample of a `Drawn` as training reads it."""
        start, stop = request.sde_window
        return TrainingSample(
            request_id=request.request_id,
            prompt_id=request.prompt_id,
            seed=request.seed,
            reward=reward,
            embeds=self._embeds[request.embedding_key],
            window_latents=np.stack(trajectory[start : stop + 1]),
            log_probs=np.array(log_probs, dtype=np.float32),
            sde_window=request.sde_window,
            num_steps=request.params.num_steps,
            noise_level=request.params.noise_level,
        )

    def _admit(self, requests: Sequence[GenerationRequest]) -> list[np.ndarray]:
        for slot, request in enumerate(requests):
            self._engine.admit(slot, request, self._embeds[request.embedding_key])
        return [self._engine.initial_latents(slot) for slot in range(len(requests))]

    def _release(self, slots: int) -> None:
        for slot in range(slots):
            self._engine.release(slot)

    def _step_cache(self, params: SamplingParams) -> StepCache:
        if self._recorders is None:
            return teacache(params)
        self._recorders.append(Recorder())
        return self._recorders[-1]


def training_s(
    model: str, samples: Sequence[TrainingSample], config: TrainConfig, *, device: str, threads: int
) -> float:
    """Seconds that one training step of `config` takes, measured on the whole groups of `samples` and scaled up to all of them."""
    trainer = GrpoTrainer(model, device=device, threads=threads)
    grpo = config.grpo.model_copy(update={"optimizer_steps": 1})
    elapsed_s = 0.0
    for _ in range(TRAININGS):
        started_s = time.perf_counter()
        trainer.train(
            None,
            samples,
            sampling=config.sampling,
            grpo=grpo,
            seed=0,
            policy_version=0,
            on_progress=lambda done, total: None,  # noqa: ARG005 - the signature is the trainer's
            should_stop=lambda: False,
        )
        elapsed_s = time.perf_counter() - started_s
    return elapsed_s / len(samples) * config.grpo.prompts_per_iteration * config.grpo.group_size


def cached(request: GenerationRequest, threshold: float, cache: CacheShape | None = None) -> GenerationRequest:
    """`request` with this step cache; threshold 0 is none."""
    shape = cache or CacheShape()
    params = msgspec.structs.replace(
        request.params,
        cache_threshold=threshold,
        cache_polynomial=shape.polynomial,
        cache_last_full=shape.last_full,
    )
    return msgspec.structs.replace(request, params=params)


def at_resolution(request: GenerationRequest, resolution: int) -> GenerationRequest:
    """`request` at another height and width in pixels."""
    params = msgspec.structs.replace(request.params, height=resolution, width=resolution)
    return msgspec.structs.replace(request, params=params)


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
