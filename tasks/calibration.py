"""Which calibration of the step cache a run takes: the user's, or the one that ships with the model. Owns whether it fits."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Final

import msgspec

from spot_runtime.config import CalibrationConfig, DatasetName, TrainConfig
from spot_runtime.diffusion.geometry import TINY, CheckedModel
from spot_runtime.errors import InputError
from tasks.local_run import current_run

SHIPPED: Final = {TINY: "calibrations/tiny.json"}
"""Calibrations by model name, as package data of the planner."""


def with_calibration(
    config: TrainConfig, model: str, checked: CheckedModel, dataset: DatasetName, resolution: int
) -> TrainConfig:
    """`config` with the calibration that exploration will plan with, if any.

    A calibration in `config` must fit the run; one that ships is left out where it does not, and a local run says why. Raises InputError
    that names field and bound, also where a strategy cannot do without one.
    """
    _check_candidates(config)
    given = config.exploration.calibration
    if given is not None:
        if reason := misfit(given, config, checked, dataset, resolution):
            raise InputError(f"cfg.exploration.calibration.{reason}")
        return config
    shipped = shipped_calibration(model) if config.exploration.mode != "none" else None
    reason = misfit(shipped, config, checked, dataset, resolution) if shipped else "none ships with this model"
    if not reason:
        exploration = config.exploration.model_copy(update={"calibration": shipped})
        return config.model_copy(update={"exploration": exploration})
    if config.exploration.mode == "prescreen":
        raise InputError(
            f"exploration = prescreen: needs a calibration of the step cache, must be given in cfg: {reason}"
        )
    if config.deterministic and config.exploration.mode == "bandit":
        raise InputError(
            f"deterministic = True: exploration plans by calibrated times, a calibration must be given in cfg: {reason}"
        )
    if shipped is not None and (run := current_run()) is not None:
        run.progress.note(
            f"exploration goes without a step cache; the calibration that ships was made for another run: {reason}"
        )
    return config


def _check_candidates(config: TrainConfig) -> None:
    """Strategies on the critical path are asked for by name: with nothing to choose from they would be none. Raises InputError."""
    exploration, size = config.exploration, config.grpo.group_size
    if exploration.mode in ("best_of_n", "prescreen") and exploration.max_sequences <= size:
        raise InputError(
            f"exploration = {exploration.mode}: exploration.max_sequences = {exploration.max_sequences}: must be > grpo.group_size = {size}"
        )


def shipped_calibration(model: str) -> CalibrationConfig | None:
    """The calibration that comes with the package for this model name."""
    if model not in SHIPPED:
        return None
    return read_calibration(files("spot_runtime.planner").joinpath(SHIPPED[model]).read_bytes())


def read_calibration(data: bytes) -> CalibrationConfig:
    """From what `calibration_file` wrote. Raises InputError."""
    config = TrainConfig.parse(msgspec.json.decode(data))
    assert config.exploration.calibration is not None, "the file has no calibration"
    return config.exploration.calibration


def calibration_file(calibration: CalibrationConfig) -> bytes:
    """As JSON that `train --cfg FILE` takes: with the sampling that was profiled, since a run under another would refuse it."""
    cfg: dict[str, Any] = {"exploration": {"calibration": calibration.model_dump(mode="json")}}
    if calibration.sampling is not None:
        cfg["sampling"] = calibration.sampling.model_dump(mode="json")
    return msgspec.json.format(msgspec.json.encode(cfg), indent=2) + b"\n"


def misfit(
    calibration: CalibrationConfig, config: TrainConfig, checked: CheckedModel, dataset: DatasetName, resolution: int
) -> str:
    """The first field that was made for another run, as one line; "" where there is none."""
    wanted = {
        "model_digest": checked.digest if calibration.model_digest else "",
        "dataset": dataset,
        "resolution": resolution or checked.default_resolution,
        "num_steps": config.sampling.num_steps,
    }
    for field, value in wanted.items():
        if getattr(calibration, field) != value:
            return f"{field} = {getattr(calibration, field)}: must be this run's {value}"
    made = (calibration.sampling or config.sampling).model_dump()
    for field, value in config.sampling.model_dump().items():
        if made[field] != value:
            return f"sampling.{field} = {made[field]}: must be this run's {value}"
    return ""
