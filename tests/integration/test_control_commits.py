"""Background commits reach control: losing a whole node costs at most the steps since the last one."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.local_cluster import LocalCluster
from spot_runtime.config import ClusterConfig, EvaluationConfig, GrpoConfig, SamplingConfig, TrainConfig
from spot_runtime.messages import GenerationRequest, JobStatus, ResumePoint
from spot_runtime.scheduler.requests import RequestProgress
from spot_runtime.types import Op, RequestId

DEADLINE_S = 400.0
NUM_STEPS = 40
CONFIG = TrainConfig(
    sampling=SamplingConfig(num_steps=NUM_STEPS, sde_window_stop=4, sde_window_size=2),
    grpo=GrpoConfig(prompts_per_iteration=2, group_size=4, optimizer_steps=1),
    evaluation=EvaluationConfig(pairs=2),
    cluster=ClusterConfig(
        spot_nodes=2, lease_s=10.0, heartbeat_s=0.5, max_batch=4, commit_every_steps=2, start_deadline_s=DEADLINE_S
    ),
)


def resume_points(journal: Path) -> dict[RequestId, tuple[str | None, ResumePoint]]:
    """Node and last commit of the unfinished requests that have one."""
    with sqlite3.connect(f"file:{journal}?mode=ro", uri=True) as db:
        rows = db.execute("SELECT request, record FROM requests JOIN progress USING (number)").fetchall()
    found = {}
    for request, record in rows:
        progress = msgspec.msgpack.decode(record, type=RequestProgress)
        if progress.resume and progress.resume.denoising_step < NUM_STEPS:
            request_id = msgspec.msgpack.decode(request, type=GenerationRequest).request_id
            found[request_id] = (progress.node_id, progress.resume)
    return found


def stop_when_committed(local: LocalCluster, journal: Path, node_id: str) -> dict[RequestId, ResumePoint]:
    """Stops control at a moment at which requests on `node_id` have commits, and returns theirs: nothing is added to the journal then."""
    control, limit_s = local.cluster.pids()["control"], time.monotonic() + DEADLINE_S
    while True:
        os.kill(control, signal.SIGSTOP)
        known = {request_id: resume for request_id, (node, resume) in resume_points(journal).items() if node == node_id}
        if known:
            return known
        os.kill(control, signal.SIGCONT)
        assert time.monotonic() < limit_s, f"no commit of {node_id} reached control"
        time.sleep(0.05)


def trajectories(local: LocalCluster, status: JobStatus) -> dict[tuple[str, int], dict[str, np.ndarray]]:
    """Latents, window latents and log-probs of each sample of a rollout."""
    return {
        (sample.prompt_id, sample.seed): local.store.get(sample.sample_key, digest=sample.sample_digest).tensors
        for sample in local.manifest(status).samples
    }


@pytest.mark.timeout(900)
def test_a_lost_node_costs_the_steps_since_its_last_commit_and_no_sample_changes(tmp_path: Path) -> None:
    """Control dies with the node, so what was committed is known from its journal alone."""
    with LocalCluster(tmp_path, CONFIG, iterations=1, deadline_s=DEADLINE_S) as local:
        job = local.job("commit-run", Op.ROLLOUT)
        local.client.submit(job)
        known = stop_when_committed(local, tmp_path / "journal.sqlite", "spot-0")
        local.kill("spot-0")
        local.kill("control")
        (done,) = local.finish([job])
        samples = {sample.request_id: sample for sample in local.manifest(done).samples}
        disturbed = trajectories(local, done)
        (calm,) = local.run(local.job("calm-run", Op.ROLLOUT))
        undisturbed = trajectories(local, calm)
        limit_s = time.monotonic() + DEADLINE_S
        while left := local.store.list("runs/commit-run/commits") + local.store.list("runs/calm-run/commits"):
            assert time.monotonic() < limit_s, f"nobody collected {left}"
            time.sleep(0.1)
    assert len(samples) == 8
    for request_id, resume in known.items():
        assert resume.denoising_step % 2 == 0
        assert resume.commit_key.endswith(f"{request_id}.1.{resume.denoising_step}")
        assert samples[request_id].attempts == 2
    for pair, tensors in undisturbed.items():
        assert {name: array.tolist() for name, array in disturbed[pair].items()} == {
            name: array.tolist() for name, array in tensors.items()
        }
