"""What scoring costs an iteration: the time between the last rollout and the last reward, beside the whole iteration.

    python -m benchmarks.reward --json FILE

Real processes on bench-dit, whose denoising step takes a time worth measuring, and one iteration (rollout, then training) for each scorer:
the shapes detector, and two that only wait, as for a model on another machine: 0.3 s an image, about a text reader, and 2 s, a slow one.
The limit is LIMIT for the first two: scoring is off the critical path. The third shows what a slow scorer does.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import typer
from msgspec.structs import replace

from benchmarks.local_cluster import LocalCluster
from spot_runtime.config import ClusterConfig, GrpoConfig, TrainConfig
from spot_runtime.models.recipe import make_bench
from spot_runtime.rewards.detection import Image
from spot_runtime.rewards.prompts import GenevalRow, Split, row_json, shapes_rows
from spot_runtime.types import Op

LIMIT: Final = 0.05
"""Share of an iteration that the reward tail may take."""
SCORERS: Final[Mapping[str, str]] = {
    "shapes detector": "geneval",
    "0.3 s an image": "benchmarks.reward:third_of_a_second",
    "2 s an image": "benchmarks.reward:two_seconds",
}
REWARD_THREADS: Final = 4


def third_of_a_second(row: GenevalRow, image: Image) -> float:
    """Waits 0.3 s; the reward is how bright the image is."""
    del row
    return _after(0.3, image)


def two_seconds(row: GenevalRow, image: Image) -> float:
    """Waits 2 s."""
    del row
    return _after(2.0, image)


def _after(wait_s: float, image: Image) -> float:
    time.sleep(wait_s)
    return float(image.mean()) / 255


def named(reward: str, count: int) -> tuple[GenevalRow, ...]:
    return tuple(replace(row, reward=reward) for row in shapes_rows(0, count, "train"))


def measure(run: LocalCluster, run_id: str, reward: str, prompts: int) -> dict[str, float]:
    """Seconds from the last finished sample to the end of the rollout job, and of the iteration around it."""
    key = f"prompts/{run_id}.jsonl"
    run.store.put_bytes(key, "\n".join(map(row_json, named(reward, prompts))).encode())
    started_s = time.monotonic()
    rollout = run.job(run_id, Op.ROLLOUT, train_prompts_key=key)
    run.client.submit(rollout)
    run.wait(rollout, lambda status: status.total > 0 and status.done == status.total)
    sampled_s = time.monotonic()
    (rolled,) = run.finish([rollout])
    scored_s = time.monotonic()
    assert rolled.result is not None
    run.run(run.job(run_id, Op.TRAIN_STEP, train_prompts_key=key, manifest_key=rolled.result.manifest_key))
    iteration_s = time.monotonic() - started_s
    tail_s = scored_s - sampled_s
    return {
        "rollout_s": scored_s - started_s,
        "tail_s": tail_s,
        "iteration_s": iteration_s,
        "share": tail_s / iteration_s,
        "attempts_max": float(max(sample.attempts for sample in run.manifest(rolled).samples)),
    }


def main(
    json_path: Annotated[Path, typer.Option("--json", help="Where the figures go.")],
    prompts: Annotated[int, typer.Option(min=2, help="Prompts an iteration.")] = 8,
    group_size: Annotated[int, typer.Option(min=2, help="Samples a prompt.")] = 6,
) -> None:
    """Writes seconds and the tail's share of the iteration, by scorer."""
    config = TrainConfig(
        grpo=GrpoConfig(prompts_per_iteration=prompts, group_size=group_size, optimizer_steps=1),
        cluster=ClusterConfig(reward_threads=REWARD_THREADS, step_deadline_s=600.0),
    )
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Path(folder) / "bench-dit"
        make_bench(bench, 0, False, typer.echo)
        rows = tuple(row for reward in SCORERS.values() for row in named(reward, prompts))
        split_rows: dict[Split, tuple[GenevalRow, ...]] = {"train": rows, "validation": rows}
        with LocalCluster(
            Path(folder) / "cluster", config, model=str(bench), iterations=1, deadline_s=3600.0, rows=split_rows
        ) as run:
            measure(run, "warm-up", "geneval", prompts)
            for number, (name, reward) in enumerate(SCORERS.items()):
                figures[name] = measure(run, f"measured-{number}", reward, prompts)
                typer.echo(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in figures[name].items()))
    json_path.write_text(json.dumps({"limit": LIMIT, "scorers": figures}, indent=2))


if __name__ == "__main__":
    typer.run(main)
