"""A nightly run with fixed inputs; `pyflyte register --activate-launchplans workflows launchplans` schedules it."""

from __future__ import annotations

from flytekit import CronSchedule, LaunchPlan

from spot_runtime.config import DatasetName
from workflows.dit_grpo import train

STORE = "s3://spotlight/store"
"""An example: put the store of your own cluster here, or give `store` when the plan is launched by hand."""

nightly = LaunchPlan.get_or_create(
    train,
    name="dit_grpo_nightly",
    fixed_inputs={"dataset": DatasetName.GENEVAL},
    default_inputs={"iterations": 200, "seed": 0, "store": STORE},
    schedule=CronSchedule(schedule="0 2 * * *"),
    max_parallelism=4,
)
