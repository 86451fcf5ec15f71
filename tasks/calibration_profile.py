"""The tasks of a calibration: check what is to be profiled, profile it, write it down.

Owns their inputs and outputs. Between checking and profiling travels all that a profile depends on, so that Flyte finds an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from flytekit import Cache, FlyteFile, current_context, task

from spot_runtime.client import job_spec
from spot_runtime.config import (
    RESOLUTION_MAX,
    RESOLUTION_MIN,
    SEQUENCES_MAX,
    CalibrationConfig,
    DatasetName,
    RunSettings,
    TrainConfig,
)
from spot_runtime.diffusion.calibration import Findings, calibrate, default_device, profiled_degrees, this_hardware
from spot_runtime.diffusion.geometry import check_model
from spot_runtime.errors import InputError
from spot_runtime.messages import GenerationRequest
from spot_runtime.planner.screening import Trial
from spot_runtime.rewards.catalog import check_reward, load_judges
from spot_runtime.rewards.choice import draws_photographs, rewarded
from spot_runtime.rewards.prompts import parse_row, prompt_id, reward_of, row_json
from spot_runtime.scheduler.expansion import JobInputs, PromptRow, expand
from spot_runtime.types import ExplorationPlan, Op, PolicyRef, RunId
from tasks.calibration import calibration_file
from tasks.changes import Changes
from tasks.decks import show
from tasks.images import RUNTIME_IMAGE
from tasks.local_run import current_run
from tasks.models import Travelling
from tasks.report import Part, table
from tasks.resources import JOIN_LIMITS, JOIN_REQUESTS, PROFILE_LIMITS, PROFILE_REQUESTS
from tasks.start_run import prompt_rows

RUN = RunId("calibration")
FILE_NAME = "calibration.json"
STEPS_MIN = 3
"""Denoising steps: thresholds are sought for two steps and more, as long as they are fewer than all."""


class ProfileOrder(Travelling):
    """All that a profile depends on: settings with the model's digest, prompt rows, seeds a prompt, and where it runs."""

    settings_json: str
    rows_json: list[str]
    sequences: int
    last_full: bool
    resolutions: list[int]
    degrees: list[int]
    device: str
    hardware: str

    @property
    def settings(self) -> RunSettings:
        return RunSettings.parse_json(self.settings_json)


class Profile(Travelling):
    """What was found, as JSON of CalibrationConfig and of Trial."""

    calibration_json: str
    trials_json: list[str]


class CalibrationOutputs(NamedTuple):
    """`calibration` is a file for `train --cfg`."""

    summary: str
    calibration: FlyteFile


@task(container_image=RUNTIME_IMAGE, requests=JOIN_REQUESTS, limits=JOIN_LIMITS)  # type: ignore[untyped-decorator]
def order_profile(
    dataset: DatasetName,
    resolution: int,
    model: str,
    prompts: str,
    reward: str,
    prompts_profiled: int,
    sequences: int,
    last_full: bool,
    resolutions: list[int],
    degrees: list[int],
    hardware: str,
    seed: int,
    cfg: Changes,
) -> ProfileOrder:
    """Checks everything. Raises InputError or ModelError, each with one line."""
    config = _config(cfg)
    _check_shape(config, sequences, (resolution, *resolutions))
    check_reward(reward)
    checked = check_model(model, resolution)
    for timed in resolutions:
        check_model(model, timed)
    photographs = draws_photographs(checked.default_resolution)
    train_rows, _ = prompt_rows(dataset, prompts, seed, config, photographs=photographs)
    if not 1 <= prompts_profiled <= len(train_rows):
        raise InputError(
            f"prompts_profiled = {prompts_profiled}: must be within 1..{len(train_rows)}, the rows there are"
        )
    device = _device(config)
    settings = RunSettings.parse(
        {
            "run_id": RUN,
            "dataset": dataset,
            "iterations": 2,
            "resolution": resolution or checked.default_resolution,
            "seed": seed,
            "model": str(checked.path) if Path(model).expanduser().is_dir() else model,
            "model_digest": checked.digest,
            "store": "memory://calibration",
            "train_prompts_key": "",
            "validation_prompts_key": "",
            "config": config,
        }
    )
    return ProfileOrder(
        settings_json=settings.model_dump_json(),
        rows_json=[row_json(row) for row in rewarded(train_rows[:prompts_profiled], reward, photographs=photographs)],
        sequences=sequences,
        last_full=last_full,
        resolutions=resolutions,
        degrees=list(profiled_degrees(model, degrees, device)),
        device=device,
        hardware=hardware or this_hardware(device, config.cluster.threads),
    )


@task(
    container_image=RUNTIME_IMAGE,
    requests=PROFILE_REQUESTS,
    limits=PROFILE_LIMITS,
    cache=Cache(version="4", serialize=True),
)  # type: ignore[untyped-decorator]
def profile_model(order: ProfileOrder) -> Profile:
    """Found again by model digest, prompts, configuration and hardware. Raises ModelError or InputError."""
    return _profile(find(order))


@task(container_image=RUNTIME_IMAGE, requests=JOIN_REQUESTS, limits=JOIN_LIMITS, enable_deck=True, deck_fields=[])  # type: ignore[untyped-decorator]
def write_calibration(profile: Profile) -> CalibrationOutputs:
    """Leaves the file in the working directory of a local run, else where Flyte keeps files."""
    calibration = CalibrationConfig.parse_json(profile.calibration_json)
    local = current_run() is not None
    path = Path(FILE_NAME).absolute() if local else Path(current_context().working_directory) / FILE_NAME
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_bytes(calibration_file(calibration))
    unfinished.replace(path)  # never half of one
    show([Part("Calibration", report(profile))])
    return CalibrationOutputs(summary(profile), FlyteFile(str(path), **({"remote_path": False} if local else {})))


def find(order: ProfileOrder) -> Findings:
    """Carries the order out."""
    return calibrate(
        order.settings,
        exploration_requests(order),
        _judge(order),
        last_full=order.last_full,
        resolutions=order.resolutions,
        degrees=order.degrees,
        device=order.device,
        hardware=order.hardware,
        on_batch=_told(),
    )


def exploration_requests(order: ProfileOrder) -> tuple[GenerationRequest, ...]:
    """The requests of an exploration of all prompts without a step cache, as the runtime makes them."""
    settings = order.settings
    grpo = settings.config.grpo.model_copy(update={"prompts_per_iteration": len(order.rows_json), "optimizer_steps": 1})
    config = settings.config.model_copy(update={"grpo": grpo})
    settings = settings.model_copy(update={"config": config})
    rows = [parse_row(text) for text in order.rows_json]
    prompts = tuple(PromptRow(prompt_id=prompt_id(row), prompt=row.prompt, row_json=row_json(row)) for row in rows)
    job = job_spec(run_id=RUN, op=Op.EXPLORE, iteration=0, policy=PolicyRef(), settings_json=settings.model_dump_json())
    plan = ExplorationPlan(
        sequences=order.sequences,
        effective_steps=settings.config.sampling.num_steps,
        explored_prompt_ids=tuple(prompt.prompt_id for prompt in prompts),
    )
    return expand(job, settings, JobInputs(train_rows=prompts, validation_rows=()), plan)


def summary(profile: Profile) -> str:
    """One line for people."""
    calibration = CalibrationConfig.parse_json(profile.calibration_json)
    rows = ", ".join(f"{row.effective_steps} steps {row.accuracy:.2f}" for row in calibration.rows)
    return (
        f"step {calibration.step_s * 1e3:.3g} ms, training {calibration.train_s:.3g} s on {calibration.hardware}; "
        f"accuracy by effective steps: {rows}"
    )


def report(profile: Profile) -> str:
    """Tables for the deck."""
    found = [msgspec.json.decode(text, type=Trial) for text in profile.trials_json]
    rows = (
        [
            f"{trial.cache_threshold:.4g}",
            f"{trial.full_steps_mean:.2f}",
            f"{trial.agreement.spearman:.3f}",
            f"{trial.agreement.groups}",
            f"{trial.agreement.flat_groups}",
            f"{trial.speedup:.2f}",
        ]
        for trial in found
    )
    names = ("threshold", "effective steps", "accuracy", "prompts", "left out: all seeds equal", "speed-up a sample")
    calibration = CalibrationConfig.parse_json(profile.calibration_json)
    latencies = (
        [f"{row.resolution}", f"{row.batch}", f"{row.degree}", f"{row.latency_s * 1e3:.3g}", f"{row.step_s * 1e3:.3g}"]
        for row in calibration.latencies
    )
    timed = ("resolution", "batch", "degree", "ms a step", "GPU-ms a sample-step")
    return table(names, rows) + "<p></p>" + table(timed, latencies)


def closing_lines(outputs: Any) -> str:
    """What `pyflyte run` prints last."""
    return f"{outputs.summary}\n{FILE_NAME}"


def _config(cfg: Changes) -> TrainConfig:
    try:
        return TrainConfig.parse(cfg.fields())
    except InputError as error:
        raise InputError(f"cfg.{error}") from error


def _check_shape(config: TrainConfig, sequences: int, resolutions: Sequence[int]) -> None:
    """What no profile could be made of. Raises InputError."""
    if not config.grpo.group_size <= sequences <= SEQUENCES_MAX:
        raise InputError(
            f"sequences = {sequences}: must be >= grpo.group_size = {config.grpo.group_size} and <= {SEQUENCES_MAX}"
        )
    if config.sampling.num_steps < STEPS_MIN:
        raise InputError(
            f"cfg.sampling.num_steps = {config.sampling.num_steps}: must be >= {STEPS_MIN}, so that a step cache can leave one out"
        )
    for resolution in resolutions:
        if resolution and not RESOLUTION_MIN <= resolution <= RESOLUTION_MAX:
            raise InputError(f"resolution = {resolution}: must be within {RESOLUTION_MIN}..{RESOLUTION_MAX}")


def _device(config: TrainConfig) -> str:
    """The cluster's where `cfg` names one, else a GPU if there is any."""
    named = "cluster" in config.model_fields_set and "device" in config.cluster.model_fields_set
    return config.cluster.device if named else default_device()


def _judge(order: ProfileOrder) -> Callable[[GenerationRequest, np.ndarray], float]:
    judges = load_judges({reward_of(text) for text in order.rows_json})
    named = lru_cache(reward_of)

    def judge(request: GenerationRequest, image: np.ndarray) -> float:
        return judges.score(named(request.row_json), request.row_json.encode(), image).reward

    return judge


def _told() -> Callable[[int, int], None]:
    """Says how far it is on the terminal of a local run, at each tenth."""
    run = current_run()

    def on_batch(done: int, total: int) -> None:
        if run is not None and done * 10 // total > (done - 1) * 10 // total:
            run.progress.note(f"profiled {done} of {total} samples under each threshold")

    return on_batch


def _profile(findings: Findings) -> Profile:
    return Profile(
        calibration_json=findings.calibration.model_dump_json(),
        trials_json=[msgspec.json.encode(trial).decode() for trial in findings.trials],
    )
