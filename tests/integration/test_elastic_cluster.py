"""A whole cluster whose spot node has groups of degree 2: a slot that goes and comes in the middle of a job changes no sample."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.local_cluster import LocalCluster
from spot_runtime.config import ClusterConfig, GrpoConfig, SamplingConfig, TrainConfig
from spot_runtime.daemons.commits import commits_prefix
from spot_runtime.errors import InputError
from spot_runtime.messages import JobStatus
from spot_runtime.types import JobPhase, Op, RunId

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = TrainConfig(
    sampling=SamplingConfig(num_steps=8, sde_window_stop=4, sde_window_size=2),
    grpo=GrpoConfig(prompts_per_iteration=3, group_size=4, optimizer_steps=1),
    cluster=ClusterConfig(
        spot_nodes=1, slots_per_spot_node=2, sequence_parallel_degree=2, group_timeout_s=5.0, max_batch=2
    ),
)


def latents(local: LocalCluster, status: JobStatus) -> dict[tuple[str, int], np.ndarray]:
    samples = local.manifest(status).samples
    return {(s.prompt_id, s.seed): local.store.get(s.sample_key).tensors["latents"] for s in samples}


def degrees(local: LocalCluster, node_id: str = "spot-0") -> tuple[int, ...]:
    return next((node.degrees for node in local.client.status().nodes if node.node_id == node_id), ())


def test_a_job_goes_on_at_the_degree_that_is_left(tmp_path_factory: pytest.TempPathFactory) -> None:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), CONFIG, iterations=1) as local:
        local.until(lambda: degrees(local) == (2,))
        rollout = local.job("storm-run", Op.ROLLOUT)
        local.client.submit(rollout)
        local.wait(rollout, lambda status: status.done >= 1)
        local.cluster.change_slots("spot-0", [1], 5.0)
        local.until(lambda: degrees(local) == (1,))
        local.cluster.change_slots("spot-0", [0, 1], 5.0)
        (stormy,) = local.finish([rollout])
        local.until(lambda: degrees(local) == (2,))
        local.cluster.change_slots("spot-0", [0], 0.0)
        local.until(lambda: degrees(local) == (1,))
        (calm,) = local.run(local.job("calm-run", Op.ROLLOUT))
        found, expected = latents(local, stormy), latents(local, calm)
        assert found.keys() == expected.keys()
        assert len(found) == 12
        assert max(np.abs(found[key] - expected[key]).max() for key in found) <= 1e-5


Leases = dict[str, dict[int, set[int]]]
"""Denoising steps that were committed, by request and by the number of its lease."""


def note_leases(local: LocalCluster, run_id: str, found: Leases) -> None:
    """Adds what is committed now; when the job has ended, control removes it."""
    for key in local.store.list(commits_prefix(RunId(run_id))):
        request_id, lease, step = key.rpartition("/")[2].rsplit(".", 2)
        found.setdefault(request_id, {}).setdefault(int(lease), set()).add(int(step))


@pytest.mark.long
def test_a_request_committed_at_degree_2_goes_on_at_degree_1_on_another_node(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The node with the group is told to go; what it had in hand goes on, at the step committed, with nodes of single slots."""
    config = CONFIG.model_copy(
        update={
            "sampling": SamplingConfig(num_steps=60, sde_window_stop=4, sde_window_size=2),
            "cluster": CONFIG.cluster.model_copy(
                update={"spot_nodes": 2, "commit_every_steps": 1, "lease_s": 120.0, "start_deadline_s": 400.0}
            ),
        }
    )
    with LocalCluster(tmp_path_factory.mktemp("migration"), config, iterations=1, deadline_s=600.0) as local:
        local.until(lambda: degrees(local, "spot-0") == degrees(local, "spot-1") == (2,))
        local.cluster.change_slots("spot-1", [0], 0.0)
        local.until(lambda: degrees(local, "spot-1") == (1,))
        rollout = local.job("storm-run", Op.ROLLOUT)
        local.client.submit(rollout)
        local.wait(rollout, lambda status: status.done >= 1)
        local.cluster.notice("spot-0", 10.0)
        committed: Leases = {}

        def has_ended(status: JobStatus) -> bool:
            note_leases(local, "storm-run", committed)
            return status.phase is JobPhase.SUCCEEDED

        stormy = local.wait(rollout, has_ended)
        samples = local.manifest(stormy).samples
        elsewhere = {s.request_id for s in samples if s.attempts > 1 and s.node_id != "spot-0"}
        steps = {request: of for request, of in committed.items() if request in elsewhere}
        resumed = [request for request, of in steps.items() if 2 in of and 1 in of and min(of[2]) > max(of[1])]
        assert resumed, steps
        (calm,) = local.run(local.job("calm-run", Op.ROLLOUT))
        found, expected = latents(local, stormy), latents(local, calm)
        assert found.keys() == expected.keys()
        assert max(np.abs(found[key] - expected[key]).max() for key in found) <= 1e-5


def test_a_degree_that_the_heads_do_not_divide_by_is_refused_before_anything_starts(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    odd = CONFIG.model_copy(
        update={"cluster": CONFIG.cluster.model_copy(update={"sequence_parallel_degree": 3, "spot_nodes": 0})}
    )
    with pytest.raises(InputError, match=r"^sequence_parallel_degree = 3: must divide the 4 attention heads"):
        LocalCluster(tmp_path_factory.mktemp("odd"), odd, iterations=1)
