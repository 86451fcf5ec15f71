"""An embedded cluster with a client, for benchmarks and fault tests: submit jobs of several runs, wait for them, kill their processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import psutil

from spot_runtime.client import Client, job_spec
from spot_runtime.config import RunSettings, TrainConfig
from spot_runtime.daemons.supervisor import EmbeddedCluster
from spot_runtime.diffusion.geometry import check_model
from spot_runtime.messages import JobSpec, JobStatus
from spot_runtime.rewards.prompts import SPLITS, GenevalRow, Split, row_json, shapes_rows
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import JobPhase, Manifest, Op, PolicyRef, RunId

PROMPT_ROWS = 512
POLL_S = 0.02
NO_POLICY = PolicyRef()


class LocalCluster:
    """Runs that share one cluster. They have the same seed, so the same job of two runs makes the same samples."""

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        *,
        model: str = "tiny",
        iterations: int = 2,
        deadline_s: float = 300.0,
        rows: Mapping[Split, Sequence[GenevalRow]] | None = None,
    ) -> None:
        """`rows`: prompts to train on and to validate with; generated ones where there are none."""
        checked = check_model(model)
        self.deadline_s = deadline_s
        self.store = TensorStore(f"file://{folder}/store")
        for split in SPLITS:
            lines = map(row_json, rows[split] if rows else shapes_rows(0, PROMPT_ROWS, split))
            self.store.put_bytes(f"prompts/{split}.jsonl", "\n".join(lines).encode())
        self.settings = RunSettings(
            run_id="local-run",
            iterations=iterations,
            resolution=checked.default_resolution,
            model=model,
            model_digest=checked.digest,
            store=self.store.url,
            train_prompts_key="prompts/train.jsonl",
            validation_prompts_key="prompts/validation.jsonl",
            config=config,
        )
        self.cluster = EmbeddedCluster(self.settings, folder)
        self.client = Client(self.cluster.start())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self.cluster.stop()

    def job(
        self,
        run_id: str,
        op: Op,
        *,
        iteration: int = 0,
        manifest_key: str = "",
        policy: PolicyRef = NO_POLICY,
        **changed: object,
    ) -> JobSpec:
        """A job of run `run_id`; `changed` are fields of its settings that differ from the cluster's."""
        settings = self.settings.model_copy(update={"run_id": run_id, **changed})
        return job_spec(
            run_id=RunId(run_id),
            op=op,
            iteration=iteration,
            policy=policy,
            settings_json=settings.model_dump_json(),
            manifest_key=manifest_key,
        )

    def wait(self, job: JobSpec, until: Callable[[JobStatus], bool]) -> JobStatus:
        """Polls until `until` holds. AssertionError where the job ended otherwise or `deadline_s` passed."""
        limit_s = time.monotonic() + self.deadline_s
        while not until(status := self.client.poll(job.job_id)):
            assert not status.phase.is_final, f"{status.phase}: {status.error}"
            assert time.monotonic() < limit_s, f"{job.job_id} is {status.phase} with {status.done} of {status.total}"
            time.sleep(POLL_S)
        return status

    def ended(self, job: JobSpec) -> JobStatus:
        """Waits until the job has ended, however it ended."""
        limit_s = time.monotonic() + self.deadline_s
        while not (status := self.client.poll(job.job_id)).phase.is_final:
            assert time.monotonic() < limit_s, f"{job.job_id} is {status.phase} with {status.done} of {status.total}"
            time.sleep(POLL_S)
        return status

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits until `condition` holds. AssertionError where `deadline_s` passed."""
        limit_s = time.monotonic() + self.deadline_s
        while not condition():
            assert time.monotonic() < limit_s, f"not within {self.deadline_s} s"
            time.sleep(POLL_S)

    def run(self, *jobs: JobSpec) -> list[JobStatus]:
        """Submits all, then waits for each to succeed."""
        for job in jobs:
            self.client.submit(job)
        return self.finish(jobs)

    def finish(self, jobs: Sequence[JobSpec]) -> list[JobStatus]:
        return [self.wait(job, lambda status: status.phase is JobPhase.SUCCEEDED) for job in jobs]

    def manifest(self, status: JobStatus) -> Manifest:
        assert status.result is not None
        return msgspec.json.decode(self.store.get_bytes(status.result.manifest_key), type=Manifest)

    def kill(self, name: str) -> None:
        """SIGKILL to a daemon by its name."""
        os.kill(self.cluster.pids()[name], signal.SIGKILL)

    def kill_child(self, node: str, module: str) -> None:
        """SIGKILL to the first child of a node that runs `module`."""
        children = psutil.Process(self.cluster.pids()[node]).children()
        next(child for child in children if module in child.cmdline()).kill()
