"""Background commits reach control: losing a whole node costs at most the steps since the last one."""

from __future__ import annotations

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

DEADLINE_S = 120.0
NUM_STEPS = 40
CONFIG = TrainConfig(
    sampling=SamplingConfig(num_steps=NUM_STEPS, sde_window_stop=4, sde_window_size=2),
    grpo=GrpoConfig(prompts_per_iteration=2, group_size=4, optimizer_steps=1),
    evaluation=EvaluationConfig(pairs=2),
    cluster=ClusterConfig(spot_nodes=2, lease_s=4.0, heartbeat_s=0.5, max_batch=4, commit_every_steps=2),
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


def trajectories(local: LocalCluster, status: JobStatus) -> dict[tuple[str, int], dict[str, np.ndarray]]:
    """Latents, window latents and log-probs of each sample of a rollout."""
    return {
        (sample.prompt_id, sample.seed): local.store.get(sample.sample_key, digest=sample.sample_digest).tensors
        for sample in local.manifest(status).samples
    }


@pytest.mark.timeout(600)
def test_a_lost_node_costs_the_steps_since_its_last_commit_and_no_sample_changes(tmp_path: Path) -> None:
    """Control dies with the node, so what was committed is known from its journal alone."""
    with LocalCluster(tmp_path, CONFIG, iterations=1, deadline_s=DEADLINE_S) as local:
        job = local.job("commit-run", Op.ROLLOUT)
        local.client.submit(job)
        limit_s = time.monotonic() + DEADLINE_S
        known: dict[RequestId, tuple[str | None, ResumePoint]] = {}
        while not any(node == "spot-0" for node, _ in known.values()):
            assert time.monotonic() < limit_s
            known = resume_points(tmp_path / "journal.sqlite")
            time.sleep(0.01)
        local.kill("control")
        local.kill("spot-0")
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
    moved = [request_id for request_id, (node, _) in known.items() if node == "spot-0"]
    assert moved
    for request_id in moved:
        step, key = known[request_id][1].denoising_step, known[request_id][1].commit_key
        assert step % 2 == 0
        assert key.endswith(f"{request_id}.1.{step}")
        assert samples[request_id].attempts == 2
    for pair, tensors in undisturbed.items():
        assert {name: array.tolist() for name, array in disturbed[pair].items()} == {
            name: array.tolist() for name, array in tensors.items()
        }
