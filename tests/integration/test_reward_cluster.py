"""Rewards in a running cluster: prompts of several rewards in one batch, scorers that fail, are slow or say nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from benchmarks.local_cluster import LocalCluster
from spot_runtime.config import ClusterConfig, EvaluationConfig, GrpoConfig, SamplingConfig, TrainConfig
from spot_runtime.messages import JobStatus
from spot_runtime.rewards.prompts import GenevalRow, prompt_id, row_json, shapes_rows, text_rows
from spot_runtime.types import JobPhase, Op, SampleRecord

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

DEADLINE_S = 170.0
PLUG_INS = """
import threading, time

failed, lock = set(), threading.Lock()

def second_time(row, image):
    with lock:
        if (row.prompt, image.tobytes()) not in failed:
            failed.add((row.prompt, image.tobytes()))
            raise RuntimeError("still warming up")
    return 0.25

def never(row, image):
    raise ConnectionError("nobody judges this")

def slow(row, image):
    time.sleep(2.0)
    return 1.0
"""
CONFIG = TrainConfig(
    sampling=SamplingConfig(num_steps=3, sde_window_stop=2, sde_window_size=1),
    grpo=GrpoConfig(prompts_per_iteration=4, group_size=2, optimizer_steps=1),
    evaluation=EvaluationConfig(pairs=4),
    cluster=ClusterConfig(spot_nodes=1, max_attempts=2, reward_deadline_s=20.0),
)
OBJECTS, (WARM, DEAD, *SLOW) = shapes_rows(0, 1, "train")[0], shapes_rows(1, 6, "train")
TEXTS = text_rows(0, 1, "train")[0]
MIXED = (OBJECTS, TEXTS, replace(WARM, reward="judges:second_time"), replace(DEAD, reward="judges:never"))
SLOW_ROWS = tuple(replace(row, reward="judges:slow") for row in SLOW)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    plug_ins, folder = tmp_path_factory.mktemp("plug_ins"), tmp_path_factory.mktemp("cluster")
    (plug_ins / "judges.py").write_text(PLUG_INS)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(plug_ins), prepend=os.pathsep)
        rows = {"train": MIXED, "validation": SLOW_ROWS}
        with LocalCluster(folder, CONFIG, iterations=1, deadline_s=DEADLINE_S, rows=rows) as local:
            yield local


def rollout(local: LocalCluster, name: str, rows: tuple[GenevalRow, ...]) -> JobStatus:
    """A rollout of other prompts than the cluster began with, once it has ended, however it ended."""
    local.store.put_bytes(f"prompts/{name}.jsonl", "\n".join(map(row_json, rows)).encode())
    job = local.job(name, Op.ROLLOUT, train_prompts_key=f"prompts/{name}.jsonl")
    local.client.submit(job)
    return local.ended(job)


def by_prompt(samples: tuple[SampleRecord, ...]) -> dict[str, list[SampleRecord]]:
    found: dict[str, list[SampleRecord]] = {}
    for sample in samples:
        found.setdefault(sample.prompt_id, []).append(sample)
    return found


def test_each_prompt_of_a_batch_is_judged_by_its_own_reward_and_a_group_that_cannot_be_is_left_out(
    local: LocalCluster,
) -> None:
    done = rollout(local, "mixed-run", MIXED)
    assert done.phase is JobPhase.SUCCEEDED, done.error
    manifest = local.manifest(done)
    groups = by_prompt(manifest.samples)
    objects, texts, warm, dead = map(prompt_id, MIXED)
    assert manifest.failed_prompt_ids == (dead,)
    assert {name: len(group) for name, group in groups.items()} == {objects: 2, texts: 2, warm: 2}
    assert [(sample.reward, sample.attempts) for sample in groups[warm]] == [(0.25, 1)] * 2
    assert all("expected" in sample.reason or sample.correct for sample in groups[objects] + groups[texts])
    assert all("read" in sample.reason or sample.correct for sample in groups[texts])
    assert done.result is not None
    assert done.result.metrics["failed"] == 2
    (trained,) = local.run(local.job("mixed-run", Op.TRAIN_STEP, manifest_key=done.result.manifest_key))
    assert trained.done == 6


def test_a_batch_that_nobody_can_judge_ends_with_what_the_scorer_said(local: LocalCluster) -> None:
    failed = rollout(local, "dead-run", tuple(replace(row, reward="judges:never") for row in SLOW))
    assert failed.phase is JobPhase.FAILED
    assert "each group lost a sample" in failed.error
    assert "nobody judges this" in failed.error


def test_two_seconds_an_image_cost_time_and_no_attempt(local: LocalCluster) -> None:
    done = rollout(local, "slow-run", SLOW_ROWS)
    assert done.phase is JobPhase.SUCCEEDED, done.error
    assert [(sample.reward, sample.attempts) for sample in local.manifest(done).samples] == [(1.0, 1)] * 8


def test_a_service_that_says_nothing_is_left_and_one_that_comes_back_is_asked_again(local: LocalCluster) -> None:
    reward = local.cluster.pids()["reward"]
    os.kill(reward, signal.SIGSTOP)
    try:
        failed = rollout(local, "silent-run", SLOW_ROWS)
    finally:
        os.kill(reward, signal.SIGCONT)
    assert failed.phase is JobPhase.FAILED
    assert "no scores within 20" in failed.error
    again = rollout(local, "silent-run", SLOW_ROWS)
    assert again.phase is JobPhase.SUCCEEDED, again.error
    assert len(local.manifest(again).samples) == 8
