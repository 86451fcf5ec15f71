"""Profiles a model's step cache for exploration: the DAG and nothing else.

pyflyte run workflows/calibrate.py calibrate                                     # the tiny model, here
pyflyte run workflows/dit_grpo.py train --cfg calibration.json                   # a run that plans with it
"""

from __future__ import annotations

from functools import partial

from spot_runtime.config import DatasetName
from tasks.calibration_profile import (
    CalibrationOutputs,
    closing_lines,
    order_profile,
    profile_model,
    write_calibration,
)
from tasks.changes import NO_CHANGES, Changes
from tasks.local_run import run_workflow

NO_OTHERS: list[int] = []


@partial(run_workflow, closing=closing_lines)
def calibrate(
    dataset: DatasetName = DatasetName.GENEVAL,
    resolution: int = 0,
    model: str = "tiny",
    prompts: str = "",
    reward: str = "",
    prompts_profiled: int = 24,
    sequences: int = 16,
    last_full: bool = False,
    resolutions: list[int] = NO_OTHERS,
    degrees: list[int] = NO_OTHERS,
    hardware: str = "",
    seed: int = 0,
    cfg: Changes = NO_CHANGES,
) -> CalibrationOutputs:
    """Measure how far a step cache may go before exploration no longer ranks seeds as full rollouts do, and how long steps take.

    Args:
        dataset: prompt set and its reward
        resolution: height and width in pixels; 0 takes the model's own
        model: tiny, a pipeline folder, or a hub id
        prompts: URL of a prompts file; empty generates prompts
        reward: reward function; empty takes the dataset's
        prompts_profiled: prompts to sample
        sequences: seeds a prompt
        last_full: whether the last denoising step takes a forward whatever changed
        resolutions: further heights and widths in pixels to time a denoising step at, as JSON
        degrees: sequence-parallel degrees to time steps at, as JSON; none: 1, and 2 where there are as many devices
        hardware: name of what it runs on, part of what an earlier result is found by; empty asks the machine that checks the inputs
        seed: seed of prompts and samples
        cfg: fields of TrainConfig that differ from their defaults, as JSON or a JSON or YAML file
    """
    order = order_profile(
        dataset=dataset,
        resolution=resolution,
        model=model,
        prompts=prompts,
        reward=reward,
        prompts_profiled=prompts_profiled,
        sequences=sequences,
        last_full=last_full,
        resolutions=resolutions,
        degrees=degrees,
        hardware=hardware,
        seed=seed,
        cfg=cfg,
    )
    outputs: CalibrationOutputs = write_calibration(profile=profile_model(order=order))
    return outputs
