"""What control makes good: lost pauses, answers to older orders, cost over a restart, jobs that wait for a training."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace
from test_cores_together import CONFIG, SETTINGS, Wired, cluster, spec, submit

from spot_runtime.messages import (
    PauseNode,
    PromptsEncoded,
    RequestCommitted,
    RequestFailed,
    ResumeNode,
    ResumePoint,
    StartTraining,
    TrainerFailed,
    TrainerHeartbeat,
    TrainingFinished,
)
from spot_runtime.scheduler import events
from spot_runtime.scheduler.commands import SendToNode, SendToTrainer
from spot_runtime.scheduler.core import ControlCore
from spot_runtime.scheduler.events import ManifestWritten
from spot_runtime.scheduler.jobs import JobRecord
from spot_runtime.scheduler.requests import RequestRecord
from spot_runtime.types import JobId, JobPhase, NodeId, Op, PolicyRef, Pool, RequestState

RESERVED, SPOT = NodeId("reserved-0"), NodeId("spot-0")


def training() -> Wired:
    """A cluster in the middle of iteration 0's training step."""
    wired = cluster()
    submit(wired, Op.ROLLOUT, 0)
    wired.run(80)
    wired.trainer_answers = False
    submit(wired, Op.TRAIN_STEP, 0, manifest_key="m")
    wired.run(2)
    assert wired.phase(Op.TRAIN_STEP, 0) is JobPhase.RUNNING
    return wired


def test_a_lost_resume_is_said_again_with_the_next_heartbeat() -> None:
    wired = training()
    wired.finish_training(wired.trainings[0])
    wired.run(3)
    beat = replace(wired.nodes[RESERVED].heartbeat(), paused=True)  # as if ResumeNode had never arrived
    commands = wired.core.handle(beat, wired.now_s)
    assert [c.message for c in commands if isinstance(c, SendToNode)] == [ResumeNode()]


def test_a_lost_pause_is_said_again_and_spot_nodes_are_left_alone() -> None:
    wired = training()
    wired.nodes[RESERVED].paused = False
    commands = wired.core.handle(wired.nodes[RESERVED].heartbeat(), wired.now_s)
    assert [c.message for c in commands if isinstance(c, SendToNode)] == [PauseNode(number=1)]
    assert wired.core.handle(wired.nodes[SPOT].heartbeat(), wired.now_s) == []


def test_answers_to_an_older_order_change_nothing() -> None:
    wired = training()
    (order,) = wired.core.trainer.orders
    job_id = wired.trainings[0].job_id
    old = TrainerFailed(trainer_id="t", job_id=job_id, error_class="TrainingError", error="old", order=order - 1)
    wired.core.handle(old, wired.now_s)
    assert wired.phase(Op.TRAIN_STEP, 0) is JobPhase.RUNNING
    done = TrainingFinished(trainer_id="t", job_id=job_id, policy=PolicyRef(2, "k", "e"), metrics={}, order=order)
    wired.core.handle(done, wired.now_s)
    assert wired.phase(Op.TRAIN_STEP, 0) is JobPhase.SUCCEEDED


def test_an_encoding_that_is_reported_twice_does_not_free_the_trainers_seat() -> None:
    wired = training()
    late = PromptsEncoded(trainer_id="t", job_id=JobId("rollout-0"), order=1)
    commands = wired.core.handle(late, wired.now_s)
    assert wired.core.trainer.job_id == wired.trainings[0].job_id
    assert not [c for c in commands if isinstance(c, SendToTrainer) and isinstance(c.message, StartTraining)]


def test_a_job_that_waits_for_a_training_that_moves_is_not_stalled() -> None:
    wired = training()
    for name in ("spot-0", "spot-1"):
        del wired.nodes[NodeId(name)]
    submit(wired, Op.EVALUATE, 0)
    wired.run(2)
    job_id = wired.trainings[0].job_id
    for step in range(60):
        wired.now_s += CONFIG.cluster.stall_deadline_s / 30
        wired.control(wired.nodes[RESERVED].hello())
        wired.control(TrainerHeartbeat(trainer_id="t", job_id=job_id, done=step, total=60))
        for op in (Op.EVALUATE, Op.TRAIN_STEP):
            wired.control(events.JobPolled(job_id=JobId(f"{op}-0")))
        wired.control(events.TimePassed())
    assert wired.phase(Op.EVALUATE, 0) is JobPhase.RUNNING


def restarted(wired: Wired, down_s: float) -> None:
    """Control is killed and comes back `down_s` later from what it journalled."""
    jobs = [msgspec.msgpack.decode(msgspec.msgpack.encode(j), type=JobRecord) for j in wired.core.jobs.values()]
    requests = {
        job.job_id: [
            msgspec.msgpack.decode(msgspec.msgpack.encode(r), type=RequestRecord)
            for r in wired.core.queue.of_job(job.job_id)
        ]
        for job in jobs
    }
    wired.now_s += down_s
    wired.core = ControlCore(CONFIG.cluster)
    for job in jobs:
        wired.core.restore(job, requests[job.job_id], wired.now_s)
    wired.core.resume(wired.now_s)
    for node in wired.nodes.values():
        wired.control(node.hello())


def test_cost_counts_on_over_a_restart_of_control() -> None:
    wired = training()
    wired.run(300)
    restarted(wired, down_s=2.0)
    wired.run(300)
    wired.finish_training(wired.trainings[0])
    wired.run(3)
    result = wired.core.jobs[wired.trainings[0].job_id].result
    assert result is not None
    lasted_s = result.usage.finished_s - result.usage.started_s
    assert lasted_s > 60
    assert result.usage.reserved_gpu_s == pytest.approx(lasted_s, abs=2.0)
    assert result.usage.spot_gpu_s == pytest.approx(2 * lasted_s, abs=4.0)
    assert result.usage.spot_total_s > result.usage.spot_gpu_s


def test_a_sample_keeps_the_pool_that_made_it_when_its_node_is_away() -> None:
    wired = cluster()
    submit(wired, Op.ROLLOUT)
    wired.run(80)
    records = wired.core.queue.of_job(JobId("rollout-1"))
    assert {(r.node_id == RESERVED) == (r.pool is Pool.RESERVED) for r in records} == {True}


def test_only_the_part_of_an_evaluation_that_is_still_to_come_is_kept_out_of_the_window() -> None:
    wired = training()
    explore = spec(Op.EXPLORE, 0, manifest_key="m")
    assert wired.core._evaluation_left(explore, SETTINGS) == CONFIG.evaluation.pairs
    submit(wired, Op.EVALUATE, 0)
    wired.run(2)
    assert wired.core._evaluation_left(explore, SETTINGS) == CONFIG.evaluation.pairs
    wired.run(80)
    assert wired.phase(Op.EVALUATE, 0) is JobPhase.SUCCEEDED
    assert wired.core._evaluation_left(explore, SETTINGS) == 0
    assert wired.core._evaluation_left(spec(Op.EXPLORE, 1, manifest_key="m"), SETTINGS) == 0


@pytest.mark.parametrize(
    ("error_class", "goes_on_from"),
    [("MissingObjectError", None), ("CorruptObjectError", None), ("PolicyMismatchError", None), ("RewardError", 4)],
)
def test_a_request_whose_commit_is_gone_or_foreign_starts_over(error_class: str, goes_on_from: int | None) -> None:
    """A store may lose what it acknowledged: the sample is made again, not failed."""
    wired = cluster()
    submit(wired, Op.ROLLOUT)
    wired.run(9)
    record = next(r for r in wired.core.queue.records.values() if r.lease_id and r.node_id == SPOT)
    assert record.node_id is not None
    lease = {"node_id": record.node_id, "lease_id": record.lease_id, "request_id": record.request_id}
    wired.control(RequestCommitted(**lease, denoising_step=4, commit_key="c"))  # type: ignore[arg-type]
    assert record.resume == ResumePoint(denoising_step=4, commit_key="c")
    wired.control(RequestFailed(**lease, error_class=error_class, error="why"))  # type: ignore[arg-type]
    assert record.resume == (ResumePoint(denoising_step=goes_on_from, commit_key="c") if goes_on_from else None)
    assert record.state in (RequestState.PENDING, RequestState.IN_FLIGHT)
    assert record.reason == f"{error_class}: why"
    assert (record.failures, record.losses) == ((1, 0) if goes_on_from else (0, 1))


@pytest.mark.parametrize("error_class", ["MissingObjectError", "PolicyMismatchError"])
def test_the_same_errors_of_a_request_that_went_on_from_nothing_are_failures(error_class: str) -> None:
    wired = cluster()
    submit(wired, Op.ROLLOUT)
    wired.run(9)
    record = next(r for r in wired.core.queue.records.values() if r.lease_id and r.node_id == SPOT)
    assert (record.node_id, record.resume) == (SPOT, None)
    lease = {"node_id": SPOT, "lease_id": record.lease_id, "request_id": record.request_id}
    wired.control(RequestFailed(**lease, error_class=error_class, error="why"))  # type: ignore[arg-type]
    assert (record.failures, record.losses) == (1, 0)


def test_the_tail_of_scores_leaves_out_the_time_that_control_was_away() -> None:
    """The job's samples are all scored, its manifest is being written: control is killed and comes back 100 s later."""
    wired = cluster()
    submit(wired, Op.ROLLOUT)
    while wired.phase(Op.ROLLOUT) is not JobPhase.WRITING:
        wired.run(1)
    job = wired.core.jobs[JobId("rollout-1")]
    requests = wired.core.queue.of_job(job.job_id)
    ended_s = wired.now_s
    after = ControlCore(CONFIG.cluster)
    after.restore(job, requests, ended_s + 100.0)
    after.resume(ended_s + 100.0)
    after.handle(ManifestWritten(job_id=job.job_id, key="k"), ended_s + 101.0)
    assert job.result is not None
    assert job.result.metrics["reward_tail_s"] == ended_s - max(record.finished_s for record in requests)
