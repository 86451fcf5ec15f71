"""The embedded cluster under kill -9: a run that lost one of every process ends in the same samples and the bit-equal policy.

The trainer and the reserved worker sleep in turns, as on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.local_cluster import LocalCluster
from spot_runtime.config import ClusterConfig, EvaluationConfig, GrpoConfig, SamplingConfig, TrainConfig
from spot_runtime.errors import InputError
from spot_runtime.messages import JobStatus
from spot_runtime.store.checkpoints import trainer_key
from spot_runtime.types import JobPhase, Manifest, Op

DEADLINE_S = 120.0
CONFIG = TrainConfig(
    sampling=SamplingConfig(num_steps=6, sde_window_stop=4, sde_window_size=2),
    grpo=GrpoConfig(prompts_per_iteration=4, group_size=6, optimizer_steps=1, micro_batch=2),
    evaluation=EvaluationConfig(pairs=4),
    cluster=ClusterConfig(lease_s=6.0, heartbeat_s=0.5, max_batch=4, sleep="always"),
    deterministic=True,
)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), CONFIG, iterations=1, deadline_s=DEADLINE_S) as local:
        yield local


def samples(manifest: Manifest) -> dict[tuple[str, int], float]:
    return {(sample.prompt_id, sample.seed): sample.reward for sample in manifest.samples}


@pytest.fixture(scope="module")
def calm(local: LocalCluster) -> tuple[Manifest, JobStatus]:
    """A rollout and a training step that nothing disturbed."""
    (done,) = local.run(local.job("calm-run", Op.ROLLOUT))
    assert done.result is not None
    (trained,) = local.run(local.job("calm-run", Op.TRAIN_STEP, manifest_key=done.result.manifest_key))
    return local.manifest(done), trained


def test_killing_every_kind_of_process_changes_neither_samples_nor_policy(
    local: LocalCluster, calm: tuple[Manifest, JobStatus]
) -> None:
    rollout = local.job("storm-run", Op.ROLLOUT)
    local.client.submit(rollout)
    local.wait(rollout, lambda status: status.done >= 1)
    local.kill_child("spot-0", "spot_runtime.daemons.worker")
    local.wait(rollout, lambda status: status.done >= 3)
    local.kill("control")
    local.wait(rollout, lambda status: status.done >= 6)
    local.kill("spot-1")
    local.kill("reward")
    (done,) = local.finish([rollout])
    assert done.result is not None
    training = local.job("storm-run", Op.TRAIN_STEP, manifest_key=done.result.manifest_key)
    local.client.submit(training)
    local.wait(training, lambda status: status.done >= 2)
    local.kill_child("reserved-0", "spot_runtime.daemons.trainer")
    (trained,) = local.finish([training])

    manifest, calm_training = calm
    stormy = local.manifest(done)
    assert samples(stormy) == samples(manifest)
    assert len(stormy.samples) == len({sample.request_id for sample in stormy.samples}) == 24
    assert trained.result is not None
    assert calm_training.result is not None
    assert trained.result.policy.version == 1
    assert trained.result.policy.digest == calm_training.result.policy.digest


def test_a_notice_moves_work_to_other_nodes_and_the_node_leaves(
    local: LocalCluster, calm: tuple[Manifest, JobStatus]
) -> None:
    rollout = local.job("notice-run", Op.ROLLOUT)
    local.client.submit(rollout)
    local.wait(rollout, lambda status: status.done >= 1)
    before = local.cluster.pids()["spot-0"]
    local.cluster.notice("spot-0", 5.0)
    (done,) = local.finish([rollout])
    assert samples(local.manifest(done)) == samples(calm[0])
    limit_s = time.monotonic() + 10.0
    while psutil.pid_exists(before) and time.monotonic() < limit_s:
        time.sleep(0.05)
    assert not psutil.pid_exists(before)


def test_a_cancelled_job_ends_and_starts_over_when_it_is_submitted_again(local: LocalCluster) -> None:
    rollout = local.job("cancel-run", Op.ROLLOUT)
    local.client.submit(rollout)
    local.wait(rollout, lambda status: status.done >= 1)
    assert local.client.cancel(rollout.job_id, "changed my mind").phase is JobPhase.CANCELLED
    (again,) = local.run(rollout)
    assert len(local.manifest(again).samples) == 24


def test_embeddings_that_the_store_lost_are_made_again(local: LocalCluster, calm: tuple[Manifest, JobStatus]) -> None:
    """Control knows that they were there, and nobody asked for them since."""
    keys = local.store.list("embeddings")
    assert keys
    for key in keys:
        local.store.delete(key)
    (done,) = local.run(local.job("forgetful-run", Op.ROLLOUT))
    assert samples(local.manifest(done)) == samples(calm[0])
    needed = {sample.embedding_key for sample in local.manifest(done).samples}
    assert needed <= set(local.store.list("embeddings"))


def test_whatever_the_store_lost_between_two_jobs_is_made_again(
    local: LocalCluster, calm: tuple[Manifest, JobStatus]
) -> None:
    """Samples and embeddings before a training; its policy, its state and the manifest that it read before the next jobs."""
    run, store = "lossy-run", local.store
    (rolled,) = local.run(local.job(run, Op.ROLLOUT))
    lost = [sample.sample_key for sample in local.manifest(rolled).samples[::5]]
    for key in [*lost, *store.list("embeddings")]:
        store.delete(key)
    assert rolled.result is not None
    (trained,) = local.run(local.job(run, Op.TRAIN_STEP, manifest_key=rolled.result.manifest_key))
    assert trained.result is not None
    assert calm[1].result is not None
    policy = trained.result.policy
    assert policy.digest == calm[1].result.policy.digest
    assert set(lost) <= set(store.list(f"runs/{run}/samples"))

    for key in [policy.key, trainer_key(policy), *store.list(f"runs/{run}/manifests")]:
        store.delete(key)
    (rolled,) = local.run(local.job(run, Op.ROLLOUT, iteration=1, policy=policy))
    assert {sample.policy for sample in local.manifest(rolled).samples} == {policy}
    assert rolled.result is not None
    store.delete(trainer_key(policy))
    following = local.job(run, Op.TRAIN_STEP, iteration=1, policy=policy, manifest_key=rolled.result.manifest_key)
    (trained,) = local.run(following)
    assert trained.result is not None
    assert trained.result.policy.version == 2
    store.verify(trainer_key(policy))


@pytest.mark.parametrize(("field", "value"), [("model_digest", "f" * 64), ("resolution", 128)])
def test_a_job_for_another_model_or_resolution_is_refused_with_one_line(
    local: LocalCluster, field: str, value: object
) -> None:
    with pytest.raises(InputError, match=r"this cluster has"):
        local.client.submit(local.job("other-run", Op.ROLLOUT, **{field: value}))
