"""What exploration costs a real cluster: iterations of rollout, training and exploration on bench-dit, whose steps take real time.

Owns the loop of `benchmarks.planner`'s overhead figures: the same jobs and the same join as a run's, without Flyte between them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from msgspec.structs import replace

from benchmarks.local_cluster import LocalCluster
from spot_runtime.client import job_spec
from spot_runtime.config import (
    ClusterConfig,
    EvaluationConfig,
    ExplorationConfig,
    GrpoConfig,
    SamplingConfig,
    TrainConfig,
)
from spot_runtime.messages import JobSpec, JobStatus
from spot_runtime.planner.review import overhead_s, spot_busy_share
from spot_runtime.planner.selection import choose_by_prompt
from spot_runtime.rewards.prompts import SPLITS, GenevalRow, Split, shapes_rows
from spot_runtime.types import BanditState, JobResult, Op, PolicyRef, RunId, SampleRecord

ITERATIONS = 7
WARM_UP = 2
"""Iterations that are not counted: the first explores nothing, since T_train is not known, and the second with all that is new."""
FILL_SEQUENCES = 32
RUN = "overhead"
PROMPTS = 64


def overhead_config() -> TrainConfig:
    """Small groups of long steps: one slot of each pool on a core of its own.

    In sample-steps, decoding included: training takes 16 samples x 4 steps x about 1.8, arms 2 prompts x 5 to 7 candidates x 6 steps, so
    all fit and none fits well: 60, 72 and 84 of about 115.
    """
    return TrainConfig(
        sampling=SamplingConfig(num_steps=6, sde_window_stop=4, sde_window_size=4),
        grpo=GrpoConfig(prompts_per_iteration=4, group_size=4, optimizer_steps=1, micro_batch=2, lora_rank=8),
        exploration=ExplorationConfig(max_sequences=7, unexplored_prompts=2, fill_sequences=FILL_SEQUENCES),
        evaluation=EvaluationConfig(pairs=1, every=0),
        cluster=ClusterConfig(spot_nodes=1, max_batch=1, heartbeat_s=0.5, start_deadline_s=600, step_deadline_s=600),
    )


class Iterations:
    """State of the loop: policy, bandit and bank."""

    def __init__(self, run: LocalCluster) -> None:
        self._run = run
        self._policy, self._bandit, self._bank_key = PolicyRef(), BanditState(), ""

    def take(self, iteration: int) -> dict[str, float]:
        """One iteration; its seconds, overhead and shares."""
        rolled = self._finish(self._job(Op.ROLLOUT, iteration, bank_key=self._bank_key))
        key = rolled.manifest_key
        beside = (
            self._job(Op.TRAIN_STEP, iteration, manifest_key=key),
            self._job(Op.EXPLORE, iteration, manifest_key=key, bank_key=self._bank_key, bandit=self._bandit),
        )
        statuses = self._run.run(*beside)
        trained, explored = (_result(status) for status in statuses)
        self._policy, self._bandit = trained.policy, explored.bandit
        self._bank_key = self._choose(statuses[1], iteration)
        span_s = max(trained.usage.finished_s, explored.usage.finished_s) - rolled.usage.started_s
        samples = self._run.manifest(statuses[1]).samples
        planned = [sample for sample in samples if _place(sample) < explored.plan.sequences]
        return {
            "span_s": span_s,
            "train_s": trained.usage.finished_s - trained.usage.started_s,
            "overhead_pct": 100 * overhead_s(trained.usage, explored.usage) / span_s,
            "spot_busy_pct": 100 * (spot_busy_share(trained.usage, samples) or 0.0),
            "planned_busy_pct": 100 * (spot_busy_share(trained.usage, planned) or 0.0),
            "filled": explored.metrics["filled"],
            "sequences": float(explored.plan.sequences),
            "planned_s": explored.plan.planned_s,
            "window_s": explored.plan.window_s,
        }

    def _job(self, op: Op, iteration: int, **changed: Any) -> JobSpec:
        settings = self._run.settings.model_copy(update={"run_id": RUN})
        return job_spec(
            run_id=RunId(RUN),
            op=op,
            iteration=iteration,
            policy=self._policy,
            settings_json=settings.model_dump_json(),
            **changed,
        )

    def _finish(self, job: JobSpec) -> JobResult:
        (status,) = self._run.run(job)
        return _result(status)

    def _choose(self, explored: JobStatus, iteration: int) -> str:
        samples = self._run.manifest(explored).samples
        chosen = choose_by_prompt(samples, self._run.settings.config.grpo.group_size)
        if not chosen:
            return ""
        key = f"runs/{RUN}/banks/{iteration + 1:06d}.json"
        seeds = {prompt_id: [item.seed for item in items] for prompt_id, items in chosen.items()}
        self._run.store.put_bytes(key, msgspec.json.encode(seeds))
        return key


def jpeg_rows(split: Split) -> list[GenevalRow]:
    """Prompts judged by compressibility: the pictures of random weights differ in nothing else."""
    return [replace(row, reward="jpeg") for row in shapes_rows(0, PROMPTS, split)]


def measure_overhead(model: Path, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Means over the iterations after the warm-up, and each of them."""
    with LocalCluster(
        folder / "cluster",
        overhead_config(),
        model=str(model),
        iterations=ITERATIONS + 1,
        deadline_s=1800.0,
        rows={split: jpeg_rows(split) for split in SPLITS},
    ) as run:
        loop, rows = Iterations(run), []
        for iteration in range(ITERATIONS):
            rows.append(loop.take(iteration))
            tell(f"iteration {iteration}: " + ", ".join(f"{name} {value:.2f}" for name, value in rows[-1].items()))
    counted = rows[WARM_UP:]
    return {
        "overhead_pct": fmean(row["overhead_pct"] for row in counted),
        "spot_busy_pct": fmean(row["spot_busy_pct"] for row in counted),
        "planned_busy_pct": fmean(row["planned_busy_pct"] for row in counted),
        "iterations": rows,
    }


def _place(sample: SampleRecord) -> int:
    """Which candidate of its prompt a sample is."""
    return int(sample.request_id.rpartition(".")[2])


def _result(status: JobStatus) -> JobResult:
    assert status.result is not None, f"{status.job_id} has no result"
    return status.result
