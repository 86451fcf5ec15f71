"""A calibration from start to end: record, fit, screen, time. Owns the order and what is written down; measurements are profiling's."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from spot_runtime.config import CalibratedLatency, CalibratedSteps, CalibrationConfig, RunSettings
from spot_runtime.diffusion.cache.recorder import fitted_polynomial, thresholds_by_steps
from spot_runtime.diffusion.embeddings import PromptEncoder
from spot_runtime.diffusion.geometry import model_folder, read_json
from spot_runtime.diffusion.group_profile import GroupPoint, group_latencies_s
from spot_runtime.diffusion.profiling import CacheShape, Judge, Profiler, at_resolution, training_s
from spot_runtime.errors import InputError
from spot_runtime.messages import GenerationRequest
from spot_runtime.parallel.degree import check_degree
from spot_runtime.planner.screening import Trial, calibration_rows, trials

RECORDED_MAX: Final = 64
"""Samples that polynomial and thresholds are chosen from, spread over all."""
DIGITS: Final = 4
DEGREES: Final = (1, 2)
"""Of sequence parallelism, where nobody says which."""


@dataclass(frozen=True)
class Findings:
    """What was measured, and each threshold beside no cache."""

    calibration: CalibrationConfig
    trials: tuple[Trial, ...]


def calibrate(
    settings: RunSettings,
    requests: Sequence[GenerationRequest],
    judge: Judge,
    *,
    last_full: bool,
    device: str,
    hardware: str,
    resolutions: Sequence[int] = (),
    degrees: Sequence[int] = (1,),
    on_batch: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005 - nobody listens
) -> Findings:
    """Profiles `requests`: exploration requests without a cache, the same number for each prompt and at least group_size.

    `last_full`: the last denoising step takes a forward whatever changed. `resolutions` are timed beside the run's own,
    each at these `degrees` of sequence parallelism. Batch, threads and dtype are the cluster's of `settings`. Raises ModelError as the
    engine, GroupError where ranks fail, and InputError where no prompt has seeds that differ in reward: there is nothing to rank.
    """
    config = settings.config
    batch, threads, dtype = config.cluster.max_batch, config.cluster.threads, config.cluster.rollout_dtype
    embeds = _embeds(settings.model, requests, device)
    profiler = Profiler(settings.model, embeds, batch=batch, device=device, threads=threads, dtype=dtype)
    recorded = profiler.record(requests[:: -(-len(requests) // RECORDED_MAX)])
    slope, intercept = fitted_polynomial([change for changes in recorded for change in changes[:-1]])
    cache = CacheShape((_rounded(slope), _rounded(intercept)), last_full)
    thresholds = sorted(set(thresholds_by_steps(recorded, cache.polynomial, last_full=last_full).values()))
    full, *cached = profiler.screen(requests, (0.0, *thresholds), cache, judge, on_batch)
    tried = trials(full, cached)
    if not tried:
        raise InputError(f"prompts = {len(full.rewards)}: none has seeds that differ in reward, must be at least 1")
    points = _points((settings.resolution, *resolutions), _batches(batch))
    latencies = _latencies(profiler, requests[0], points)
    group = [request for request in requests if request.prompt_id == requests[0].prompt_id][: config.grpo.group_size]
    samples = profiler.training_samples(group)
    profiler.close()
    text = embeds[requests[0].embedding_key].shape
    for degree in degrees:
        if degree > 1:
            latencies += _latencies_of_groups(settings, requests[0], text, points, degree, device)
    sample_s = sum(full.batch_s) / len(requests)
    calibration = CalibrationConfig(
        model_digest=settings.model_digest,
        dataset=settings.dataset,
        resolution=settings.resolution,
        num_steps=config.sampling.num_steps,
        sampling=config.sampling,
        hardware=hardware,
        step_s=_rounded(sample_s / config.sampling.num_steps),
        train_s=_rounded(training_s(settings.model, samples, config, device=device, threads=threads)),
        train_samples=config.grpo.prompts_per_iteration * config.grpo.group_size,
        polynomial=cache.polynomial,
        last_full=last_full,
        rows=_rows(config.sampling.num_steps, tried),
        latencies=latencies,
    )
    return Findings(calibration, tried)


def this_hardware(device: str, threads: int) -> str:
    """The name of the GPU that `device` is, or of the processor's architecture with as many threads. Raises InputError without that GPU."""
    if not device.startswith("cuda"):
        return f"{platform.machine()} CPU, {threads} threads"
    if not torch.cuda.is_available():
        raise InputError(f"hardware = '': must be given where the machine that checks the inputs has no {device}")
    return str(torch.cuda.get_device_name(device))


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _embeds(model: str, requests: Sequence[GenerationRequest], device: str) -> dict[str, np.ndarray]:
    """By embedding key; the text encoder is gone again before the transformer comes."""
    prompts = {request.embedding_key: request.prompt for request in requests}
    return dict(zip(prompts, PromptEncoder(model, device=device).encode(list(prompts.values())), strict=True))


def profiled_degrees(model: str, asked: Sequence[int], device: str) -> tuple[int, ...]:
    """`asked`, rising, as far as this machine has a GPU or a core for each rank; none asked: 1 and 2.

    Raises InputError for a degree that the model does not allow, and for one asked for that has too few devices.
    """
    heads = int(read_json(model_folder(model), "transformer/config.json")["num_attention_heads"])
    devices = torch.cuda.device_count() if device.startswith("cuda") else len(os.sched_getaffinity(0))
    if not asked:
        return tuple(degree for degree in DEGREES if degree <= devices and heads % degree == 0)
    for degree in asked:
        check_degree(degree, heads)
        if degree > devices:
            raise InputError(f"degrees = {degree}: must be <= {devices}, the devices of this machine")
    return tuple(sorted({1, *asked}))


def _points(resolutions: Sequence[int], batches: Sequence[int]) -> tuple[GroupPoint, ...]:
    return tuple(GroupPoint(resolution, batch) for resolution in dict.fromkeys(resolutions) for batch in batches)


def _latencies(
    profiler: Profiler, request: GenerationRequest, points: Sequence[GroupPoint]
) -> tuple[CalibratedLatency, ...]:
    """One denoising step at each point on one device."""
    return tuple(
        CalibratedLatency(
            resolution=point.resolution,
            batch=point.batch,
            latency_s=_rounded(profiler.step_latency_s(at_resolution(request, point.resolution), point.batch)),
        )
        for point in points
    )


def _latencies_of_groups(
    settings: RunSettings,
    request: GenerationRequest,
    text: tuple[int, ...],
    points: Sequence[GroupPoint],
    degree: int,
    device: str,
) -> tuple[CalibratedLatency, ...]:
    """The same over groups of `degree`."""
    tokens, width = text
    cluster = settings.config.cluster
    latencies = group_latencies_s(
        settings.model,
        request,
        (tokens, width),
        points,
        degree=degree,
        device=device,
        threads=cluster.threads,
        dtype=cluster.rollout_dtype,
    )
    return tuple(
        CalibratedLatency(resolution=point.resolution, batch=point.batch, degree=degree, latency_s=_rounded(latency_s))
        for point, latency_s in zip(points, latencies, strict=True)
    )


def _batches(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest itself."""
    return [*(2**power for power in range(largest.bit_length()) if 2**power < largest), largest]


def _rows(num_steps: int, tried: Sequence[Trial]) -> tuple[CalibratedSteps, ...]:
    return tuple(
        CalibratedSteps(
            effective_steps=row.effective_steps,
            cache_threshold=row.cache_threshold,
            accuracy=round(row.accuracy, DIGITS),
            step_cost=round(row.step_cost, DIGITS),
        )
        for row in calibration_rows(num_steps, tried)
    )


def _rounded(value: float) -> float:
    """To DIGITS significant digits: more would be noise in the file."""
    return float(f"{value:.{DIGITS}g}")
