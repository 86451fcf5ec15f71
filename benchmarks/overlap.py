"""How well exploration hides behind training: wall time of both together against the longer of the two alone.

    python -m benchmarks.overlap --json FILE

The same training step and exploration run alone and together, on one cluster whose trainer and spot slots have a core each, then on
one where nothing is pinned. The limit is 1: exploration would cost nothing. `core_slowdown` is what this machine itself takes: how much
slower matrix products on one core get when the other core does the same, with no cluster at all.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.local_cluster import LocalCluster
from spot_runtime.config import ClusterConfig, ExplorationConfig, GrpoConfig, TrainConfig
from spot_runtime.types import Op

ANY_WINDOW_S = 10_000.0
"""T_train that makes every arm eligible, so that all runs explore the same plan: the cheapest arm."""


RATE_S = 3.0


def config(*, pinned: bool, prompts: int, group_size: int) -> TrainConfig:
    return TrainConfig(
        grpo=GrpoConfig(prompts_per_iteration=prompts, group_size=group_size),
        exploration=ExplorationConfig(max_sequences=2 * group_size, calibrated_train_s=ANY_WINDOW_S),
        cluster=ClusterConfig(pin_cores=pinned),
    )


def measure(run: LocalCluster, name: str) -> dict[str, float]:
    """Seconds of train_step alone, explore alone, and both; each on a run of its own, after the same rollout."""
    durations: dict[str, float] = {}
    for kind, ops in (
        ("warm", ()),
        ("train", (Op.TRAIN_STEP,)),
        ("explore", (Op.EXPLORE,)),
        ("both", (Op.TRAIN_STEP, Op.EXPLORE)),
    ):
        run_id = f"{name}-{kind}"
        (rolled,) = run.run(run.job(run_id, Op.ROLLOUT))
        assert rolled.result is not None
        done = run.run(*(run.job(run_id, op, manifest_key=rolled.result.manifest_key) for op in ops))
        usages = [status.result.usage for status in done if status.result]
        if usages:
            durations[f"{kind}_s"] = max(u.finished_s for u in usages) - min(u.started_s for u in usages)
    durations["ratio"] = durations["both_s"] / max(durations["train_s"], durations["explore_s"])
    return durations


def core_slowdown() -> float:
    """The worse of two cores: its rate of matrix products alone over that beside the other."""
    alone = [_rates((core,))[core] for core in (0, 1)]
    together = _rates((0, 1))
    return max(alone[core] / together[core] for core in (0, 1))


def _rates(cores: tuple[int, ...]) -> dict[int, float]:
    """Each core's rate; a product is of one thread, or two cores would wait for each other's."""
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    context = multiprocessing.get_context("spawn")
    with context.Pool(len(cores)) as pool:
        return dict(pool.map(_rate, cores, chunksize=1))


def _rate(core: int) -> tuple[int, float]:
    """Products a second on `core`, over RATE_S."""
    os.sched_setaffinity(0, {core})
    left, right, count = np.ones((64, 128), np.float32), np.ones((128, 512), np.float32), 0
    until_s = time.monotonic() + RATE_S
    while time.monotonic() < until_s:
        np.tanh(left @ right)
        count += 1
    return core, count / RATE_S


def main(
    json_path: Annotated[Path, typer.Option("--json", help="Where the figures go.")],
    prompts: Annotated[int, typer.Option(min=2, help="Prompts an iteration.")] = 24,
    group_size: Annotated[int, typer.Option(min=2, help="Samples a prompt.")] = 12,
) -> None:
    """Writes seconds and ratios, pinned and unpinned."""
    figures: dict[str, dict[str, float]] = {"machine": {"core_slowdown": core_slowdown()}}
    typer.echo(f"machine: core_slowdown {figures['machine']['core_slowdown']:.2f}")
    for name, pinned in (("pinned", True), ("unpinned", False)):
        with (
            tempfile.TemporaryDirectory() as folder,
            LocalCluster(
                Path(folder), config(pinned=pinned, prompts=prompts, group_size=group_size), iterations=1
            ) as run,
        ):
            figures[name] = measure(run, name)
        typer.echo(f"{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in figures[name].items()))
    json_path.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    typer.run(main)
