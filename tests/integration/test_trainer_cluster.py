"""A trainer of two ranks in a real cluster: one of them is killed, and the job is trained all the same."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from benchmarks.local_cluster import LocalCluster
from spot_runtime.config import ClusterConfig, EvaluationConfig, GrpoConfig, SamplingConfig, TrainConfig
from spot_runtime.types import Op

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

CONFIG = TrainConfig(
    sampling=SamplingConfig(num_steps=5, sde_window_stop=4, sde_window_size=2),
    grpo=GrpoConfig(prompts_per_iteration=4, group_size=4, optimizer_steps=1, micro_batch=1),
    evaluation=EvaluationConfig(pairs=4),
    cluster=ClusterConfig(spot_nodes=1, lease_s=20.0, heartbeat_s=0.5, trainer_ranks=2, start_deadline_s=400.0),
)


@pytest.fixture
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("ranks"), CONFIG, iterations=1, deadline_s=500.0) as local:
        yield local


def rank_processes(local: LocalCluster) -> list[psutil.Process]:
    reserved = psutil.Process(local.cluster.pids()["reserved-0"])
    return [each for each in reserved.children(recursive=True) if "spot_runtime.daemons.trainer_rank" in each.cmdline()]


def test_a_rank_that_is_killed_while_training_costs_no_job(local: LocalCluster) -> None:
    (done,) = local.run(local.job("ranks-run", Op.ROLLOUT))
    assert done.result is not None
    (rank,) = rank_processes(local)
    training = local.job("ranks-run", Op.TRAIN_STEP, manifest_key=done.result.manifest_key)
    local.client.submit(training)
    local.wait(training, lambda status: status.done >= 2)
    rank.kill()
    (trained,) = local.finish([training])
    assert trained.result is not None
    assert trained.result.policy.version == 1
    assert trained.result.metrics["trained_rows"] > 0
    assert trained.result.metrics["dlogp_first_max"] <= 1e-6
    (other,) = rank_processes(local)
    assert other.pid != rank.pid
