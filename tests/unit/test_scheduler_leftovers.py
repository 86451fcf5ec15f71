"""What is left of an exploration when training is over, and samples that a rollout takes over from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from sample_records import sample_record
from scheduler_world import CLUSTER, POLICY, ROWS, job_spec

from spot_runtime.config import RunSettings
from spot_runtime.daemons.journal import Journal
from spot_runtime.messages import (
    Assignment,
    AssignWork,
    DropRequests,
    HeldLease,
    JobSpec,
    NodeHeartbeat,
    NodeHello,
    NodeLeft,
    PullWork,
    RequestFailed,
    RequestReturned,
    SampleDone,
    SampleScored,
    TrainerHello,
    TrainingFinished,
)
from spot_runtime.scheduler.commands import Command, SendToNode, WriteManifest
from spot_runtime.scheduler.core import ControlCore
from spot_runtime.scheduler.events import JobInputsRead, JobSubmitted, ManifestWritten
from spot_runtime.scheduler.expansion import JobInputs, embedding_key
from spot_runtime.scheduler.jobs import JobRecord
from spot_runtime.scheduler.requests import RequestRecord
from spot_runtime.types import JobId, JobPhase, Manifest, NodeId, Op, PolicyRef, Pool, RequestState, SampleRecord

UPDATED = PolicyRef(2, "policies/2", "d2")
SPOT, RESERVED = NodeId("s1"), NodeId("r1")
ENCODED = frozenset(embedding_key("", row.prompt) for row in ROWS)
UNJUDGED = 1
"""An iteration without evaluation."""
INPUTS = JobInputs(train_rows=ROWS, validation_rows=ROWS[:2], encoded=ENCODED)


def spec(op: Op, iteration: int = 0, *, policy: PolicyRef = POLICY, **exploration: Any) -> JobSpec:
    made = job_spec("run-a", op, iteration)
    settings = RunSettings.parse_json(made.settings_json)
    config = settings.config.model_copy(
        update={"exploration": settings.config.exploration.model_copy(update=exploration)}
    )
    text = settings.model_copy(update={"config": config}).model_dump_json()
    return msgspec.structs.replace(made, settings_json=text, policy=policy)


class Exploring:
    """Control beside a training step, with three candidates of one prompt to explore and a node of each pool; one request is in flight."""

    def __init__(self, iteration: int = 0, **exploration: Any) -> None:
        self.core = ControlCore(CLUSTER)
        self.explore = spec(Op.EXPLORE, iteration, **exploration)
        self.train = spec(Op.TRAIN_STEP, iteration, **exploration)
        self.said: list[Command] = []
        for node_id, pool in ((SPOT, Pool.SPOT), (RESERVED, Pool.RESERVED)):
            self.tell(NodeHello(node_id=node_id, pool=pool, slots=1))
            self.tell(NodeHeartbeat(node_id=node_id, slots=1, step_s=0.01))
        self.tell(TrainerHello(trainer_id="t"))
        self.tell(JobSubmitted(job=self.train))
        self.tell(JobSubmitted(job=self.explore))
        self.tell(JobInputsRead(job_id=self.explore.job_id, inputs=INPUTS))
        (self.begun,) = self.pull(SPOT)

    def tell(self, event: Any, now_s: float = 1.0) -> list[Command]:
        said = self.core.handle(event, now_s)
        self.said += said
        return said

    def pull(self, node_id: NodeId, room: int = 1) -> tuple[Assignment, ...]:
        said = self.tell(PullWork(node_id=node_id, group_id="g", room=room))
        granted = [c.message for c in said if isinstance(c, SendToNode) and isinstance(c.message, AssignWork)]
        return granted[0].assignments if granted else ()

    def end_training(self) -> list[Command]:
        order = self.core.trainer.last_order
        return self.tell(
            TrainingFinished(trainer_id="t", job_id=self.train.job_id, policy=UPDATED, metrics={}, order=order), 5.0
        )

    def finish(self, given: Assignment, reward: float = 0.5, node_id: NodeId = SPOT) -> None:
        self.denoise(given, node_id)
        self.tell(
            SampleScored(
                node_id=node_id,
                lease_id=given.lease_id,
                request_id=given.request.request_id,
                reward=reward,
                correct=False,
            ),
            6.0,
        )

    def denoise(self, given: Assignment, node_id: NodeId = SPOT) -> None:
        done = SampleDone(
            node_id=node_id,
            lease_id=given.lease_id,
            request_id=given.request.request_id,
            sample_key="",
            sample_digest="",
            policy=given.request.policy,
            started_s=1.0,
            finished_s=4.5,
            effective_steps=3,
            busy_s=1.25,
        )
        self.tell(done, 5.5)

    def restart(self, now_s: float = 8.0) -> None:
        """Control is killed and comes back from what it journalled; its nodes still hold what they held."""
        jobs = [msgspec.msgpack.decode(msgspec.msgpack.encode(j), type=JobRecord) for j in self.core.jobs.values()]
        requests = msgspec.msgpack.encode(self.core.queue.of_job(self.explore.job_id))
        self.core = ControlCore(CLUSTER)
        for job in jobs:
            mine = msgspec.msgpack.decode(requests, type=list[RequestRecord]) if job.job.op is Op.EXPLORE else []
            self.core.restore(job, mine, now_s)
        self.core.resume(now_s)
        for node_id, pool in ((SPOT, Pool.SPOT), (RESERVED, Pool.RESERVED)):
            records = [self.core.queue.records[i] for i in self.core.queue.held.get(node_id, ())]
            leases = ((r.request_id, r.lease_id) for r in records)
            held = tuple(HeldLease(request_id=i, lease_id=lease, denoising_step=1) for i, lease in leases if lease)
            self.tell(NodeHello(node_id=node_id, pool=pool, slots=1, held=held), now_s)

    def give_back(self, given: Assignment, *, committed: bool, now_s: float = 5.5) -> None:
        self.tell(
            RequestReturned(
                node_id=SPOT,
                lease_id=given.lease_id,
                request_id=given.request.request_id,
                denoising_step=2 if committed else 0,
                commit_key="commits/x" if committed else "",
            ),
            now_s,
        )

    def journalled(self, journal: Journal) -> None:
        """As the shell does after each turn."""
        queue = self.core.queue
        journal.write(
            [self.core.jobs[job_id] for job_id in self.core.dirty_jobs],
            [queue.records[request_id] for request_id in queue.dirty],
        )
        self.core.dirty_jobs.clear()
        queue.dirty.clear()

    def manifest(self) -> Manifest:
        return next(c.manifest for c in self.said if isinstance(c, WriteManifest))

    def states(self) -> list[RequestState]:
        return [record.state for record in self.core.queue.of_job(self.explore.job_id)]


def test_beside_training_only_spot_explores_and_afterwards_all_do() -> None:
    world = Exploring()
    assert world.pull(RESERVED) == ()
    world.end_training()
    assert world.core.queue.records[world.begun.request.request_id].state is RequestState.IN_FLIGHT
    assert RESERVED in {record.node_id for record in world.core.queue.of_job(world.explore.job_id)}


def test_pinned_leftovers_keep_the_policy_that_the_exploration_began_with() -> None:
    world = Exploring()
    world.end_training()
    (left,) = world.pull(SPOT)
    assert {given.request.policy for given in (world.begun, left)} == {POLICY}


def test_latest_leftovers_take_the_new_policy_and_what_had_begun_does_not() -> None:
    world = Exploring(leftovers="latest")
    world.end_training()
    (left,) = world.pull(SPOT)
    assert left.request.policy == UPDATED
    world.finish(world.begun, 0.25)
    world.finish(left, 0.75)
    (last,) = world.pull(RESERVED)
    world.finish(last, 0.5, RESERVED)
    versions = {sample.request_id: sample.policy.version for sample in world.manifest().samples}
    assert versions[world.begun.request.request_id] == 1
    assert sorted(versions.values()) == [1, 2, 2]


def test_latest_restarts_what_came_back_without_a_step_and_goes_on_with_what_has_some() -> None:
    world = Exploring(leftovers="latest")
    world.end_training()
    world.give_back(world.begun, committed=False)
    (again,) = world.pull(SPOT)
    assert (again.request.request_id, again.request.policy) == (world.begun.request.request_id, UPDATED)
    world = Exploring(leftovers="latest")
    world.end_training()
    world.give_back(world.begun, committed=True)
    (again,) = world.pull(SPOT)
    assert (again.request.policy, again.resume.denoising_step) == (POLICY, 2)  # type: ignore[union-attr]


def test_dropped_leftovers_end_with_training_and_only_scores_are_waited_for() -> None:
    world = Exploring(leftovers="drop")
    (second,) = world.pull(SPOT)
    world.denoise(world.begun)
    said = world.end_training()
    dropped = [c.message for c in said if isinstance(c, SendToNode) and isinstance(c.message, DropRequests)]
    assert [message.request_ids for message in dropped] == [(second.request.request_id,)]
    assert sorted(world.states()) == [RequestState.ABORTED, RequestState.ABORTED, RequestState.DONE]
    world.tell(
        SampleScored(
            node_id=SPOT,
            lease_id=world.begun.lease_id,
            request_id=world.begun.request.request_id,
            reward=1.0,
            correct=True,
        ),
        6.0,
    )
    assert [sample.reward for sample in world.manifest().samples] == [1.0]
    world.tell(ManifestWritten(job_id=world.explore.job_id, key="k"), 7.0)
    result = world.core.jobs[world.explore.job_id].result
    assert result is not None
    assert (result.metrics["dropped"], result.metrics["failed"], result.metrics["samples"]) == (2.0, 0.0, 1.0)
    assert (result.plan.sequences, result.bandit.pending_sequences) == (3, 3)  # what the next iteration pays


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("how", ["error", "node left", "returned"])
def test_a_dropped_leftover_that_is_not_scored_is_not_denoised_again(how: str, restarts: bool) -> None:
    """It was kept for its score alone; the exploration is over with what is scored."""
    world = Exploring(leftovers="drop")
    world.denoise(world.begun)
    world.end_training()
    if restarts:
        world.restart()
    assert sorted(world.states()) == [RequestState.ABORTED, RequestState.ABORTED, RequestState.DONE]
    match how:
        case "error":
            given = {"node_id": SPOT, "lease_id": world.begun.lease_id, "request_id": world.begun.request.request_id}
            world.tell(RequestFailed(**given, error_class="RewardError", error="x"), 8.0)
        case "node left":
            world.tell(NodeLeft(node_id=SPOT), 8.0)
        case "returned":
            world.give_back(world.begun, committed=True, now_s=8.0)
    assert set(world.states()) == {RequestState.ABORTED}
    assert world.manifest().samples == ()
    assert world.pull(RESERVED) == ()


def test_a_dropped_exploration_that_is_submitted_again_draws_nothing_that_was_dropped() -> None:
    world = Exploring(leftovers="drop")
    world.end_training()
    world.core._fail(world.core.jobs[world.explore.job_id], "StoreError", "x", 6.0)
    world.tell(JobSubmitted(job=world.explore), 7.0)
    world.tell(JobInputsRead(job_id=world.explore.job_id, inputs=INPUTS), 7.0)
    assert set(world.states()) == {RequestState.ABORTED}
    assert world.core.jobs[world.explore.job_id].closed


def test_a_training_that_failed_has_no_new_policy_to_explore_with() -> None:
    world = Exploring(leftovers="latest")
    world.core._fail(world.core.jobs[world.train.job_id], "TrainingError", "x", 5.0)
    assert world.core.queue.claims[world.explore.job_id].policy is None
    assert world.core.queue.claims[world.explore.job_id].everywhere


def test_the_rule_survives_a_restart_of_control() -> None:
    world = Exploring(leftovers="latest")
    world.end_training()
    world.restart()
    assert world.core.queue.claims[world.explore.job_id].policy == UPDATED


def test_what_a_leftover_was_drawn_with_survives_a_kill_of_control(tmp_path: Path) -> None:
    """One sample began before the update, one after it, one waits: each is what it was, and results of both policies are taken."""
    world = Exploring(leftovers="latest")
    journal = Journal(tmp_path / "journal.sqlite")
    world.journalled(journal)
    world.end_training()
    (left,) = world.pull(SPOT)
    world.journalled(journal)
    journal.close()
    world.core = ControlCore(CLUSTER)
    for job, requests in Journal(tmp_path / "journal.sqlite").load():
        world.core.restore(job, requests, 8.0)
    world.core.resume(8.0)
    for node_id, pool in ((SPOT, Pool.SPOT), (RESERVED, Pool.RESERVED)):
        held = tuple(
            HeldLease(request_id=g.request.request_id, lease_id=g.lease_id, denoising_step=1)
            for g in ((world.begun, left) if pool is Pool.SPOT else ())
        )
        world.tell(NodeHello(node_id=node_id, pool=pool, slots=1, held=held), 8.0)
    world.finish(world.begun)
    world.finish(left)
    (last,) = world.pull(RESERVED)
    world.finish(last, 0.5, RESERVED)
    policies = {sample.request_id: sample.policy for sample in world.manifest().samples}
    assert policies == {
        world.begun.request.request_id: POLICY,
        left.request.request_id: UPDATED,
        last.request.request_id: UPDATED,
    }


# ---- what fills the window -------------------------------------------------------------------------------------------------------------


def test_slots_that_are_through_with_the_plan_go_on_until_training_ends() -> None:
    world = Exploring(UNJUDGED, fill_sequences=5)
    planned = [world.begun, *world.pull(SPOT), *world.pull(SPOT)]
    filling = world.pull(SPOT)
    assert [given.request.fills_window for given in (*planned, *filling)] == [False] * 3 + [True]
    for given in (*planned, *filling):
        world.finish(given)
    assert not [c for c in world.said if isinstance(c, WriteManifest)]  # one more candidate may be drawn
    (unfinished,) = world.pull(SPOT)
    said = world.end_training()
    dropped = [c.message for c in said if isinstance(c, SendToNode) and isinstance(c.message, DropRequests)]
    assert [message.request_ids for message in dropped] == [(unfinished.request.request_id,)]
    assert len(world.manifest().samples) == 4
    world.tell(ManifestWritten(job_id=world.explore.job_id, key="k"), 7.0)
    result = world.core.jobs[world.explore.job_id].result
    assert result is not None
    assert (result.metrics["filled"], result.metrics["dropped"], result.metrics["failed"]) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("leftovers", ["pinned", "latest"])
def test_what_fills_the_window_is_no_leftover(leftovers: str) -> None:
    """Training ends with all of it to do: the plan is, the rest never is."""
    world = Exploring(UNJUDGED, leftovers=leftovers, fill_sequences=9)
    world.end_training()
    left = [record for record in world.core.queue.of_job(world.explore.job_id) if not record.is_final]
    assert len(left) == 3
    assert not any(record.request.fills_window for record in left)


def test_an_exploration_that_comes_after_training_fills_nothing() -> None:
    """As when a task is tried again."""
    world = Exploring(UNJUDGED)
    world.end_training()
    late = spec(Op.EXPLORE, UNJUDGED, fill_sequences=9)
    late = msgspec.structs.replace(late, job_id=JobId("explore-again"))
    world.tell(JobSubmitted(job=late), 5.0)
    world.tell(JobInputsRead(job_id=late.job_id, inputs=INPUTS), 5.0)
    records = world.core.queue.of_job(late.job_id)
    assert {record.state for record in records if record.request.fills_window} == {RequestState.ABORTED}
    assert {record.state for record in records if not record.request.fills_window} <= {
        RequestState.PENDING,
        RequestState.IN_FLIGHT,
    }


@pytest.mark.parametrize("leftovers", ["pinned", "latest", "drop"])
def test_an_exploration_after_training_leaves_nothing_over(leftovers: str) -> None:
    world = Exploring(leftovers=leftovers)
    world.end_training()
    after = spec(Op.EXPLORE, 1, policy=UPDATED, mode="best_of_n", leftovers=leftovers)
    train = spec(Op.TRAIN_STEP, 1, mode="best_of_n", leftovers=leftovers)
    world.tell(JobSubmitted(job=train), 9.0)
    order = world.core.trainer.last_order
    world.tell(TrainingFinished(trainer_id="t", job_id=train.job_id, policy=UPDATED, metrics={}, order=order), 9.0)
    world.tell(JobSubmitted(job=after), 9.0)
    world.tell(JobInputsRead(job_id=after.job_id, inputs=INPUTS), 9.0)
    records = world.core.queue.of_job(after.job_id)
    assert len(records) == 2 * 3  # all prompts, max_sequences each
    assert RequestState.ABORTED not in {record.state for record in records}
    assert {record.request.policy for record in records} == {UPDATED}
    assert all(record.request.keep_trajectory for record in records)


# ---- what a sample took, and how long its score ----------------------------------------------------------------------------------------


def test_effective_steps_and_busy_seconds_of_each_sample_reach_the_manifest_and_the_usage() -> None:
    world = Exploring(leftovers="drop")
    world.finish(world.begun)
    world.end_training()
    (sample,) = world.manifest().samples
    assert (sample.effective_steps, sample.busy_s) == (3, 1.25)
    world.tell(ManifestWritten(job_id=world.explore.job_id, key="k"), 7.0)
    result = world.core.jobs[world.explore.job_id].result
    assert result is not None
    assert result.usage.spot_busy_s == 1.25
    assert result.metrics["effective_steps"] == 3.0


def test_a_sample_is_as_busy_as_the_stay_that_it_names_and_the_job_as_all_of_them() -> None:
    """What a node took that gave the request back lies before the stay that the sample names."""
    world = Exploring(leftovers="drop")
    lost = {"node_id": SPOT, "lease_id": world.begun.lease_id, "request_id": world.begun.request.request_id}
    world.tell(RequestReturned(**lost, denoising_step=0, commit_key="", busy_s=3.0), 1.0)
    (again,) = world.pull(SPOT)
    assert again.request.request_id == world.begun.request.request_id
    world.finish(again)
    world.end_training()
    (sample,) = world.manifest().samples
    assert sample.busy_s == 1.25 <= sample.finished_s - sample.started_s
    world.tell(ManifestWritten(job_id=world.explore.job_id, key="k"), 7.0)
    result = world.core.jobs[world.explore.job_id].result
    assert result is not None
    assert result.usage.spot_busy_s == 3.0 + 1.25


def test_the_tail_of_scores_comes_off_the_next_training_window() -> None:
    """The last sample was denoised at 4.5 s and the job was over at 6.0 s; training takes 4 s."""
    world = Exploring()
    for _ in range(3):
        records = {r.request_id: r for r in world.core.queue.of_job(world.explore.job_id)}
        begun = [r for r in records.values() if r.state is RequestState.IN_FLIGHT]
        given = Assignment(lease_id=begun[0].lease_id, request=begun[0].request)  # type: ignore[arg-type]
        world.finish(given)
        world.pull(SPOT)
    world.tell(ManifestWritten(job_id=world.explore.job_id, key="k"), 6.5)
    result = world.core.jobs[world.explore.job_id].result
    assert result is not None
    assert result.metrics["reward_tail_s"] == 1.5
    order = world.core.trainer.last_order
    finished = TrainingFinished(trainer_id="t", job_id=world.train.job_id, policy=UPDATED, metrics={}, order=order)
    started_s = world.core.jobs[world.train.job_id].started_s
    world.core.jobs[world.train.job_id].submitted_s -= 5.0  # waiting for the trainer is no training
    world.tell(finished, started_s + 10.0)
    assert world.core.train_times[world.explore.run_id].observed_s == (8.5,)
    world.restart(started_s + 11.0)
    assert world.core.train_times[world.explore.run_id].observed_s == (8.5,)


def test_after_a_restart_of_control_training_takes_as_long_as_before_it() -> None:
    """Training ended first, when nobody knew how long scores take; what the exploration took since is for the next one."""
    world = Exploring()
    world.end_training()
    before = world.core.train_times[world.explore.run_id]
    for given in (world.begun, *world.pull(SPOT), *world.pull(SPOT)):
        world.finish(given)
    while left := [r for r in world.core.queue.of_job(world.explore.job_id) if r.state is RequestState.IN_FLIGHT]:
        assert left[0].lease_id is not None
        assert left[0].node_id is not None
        world.finish(Assignment(lease_id=left[0].lease_id, request=left[0].request), node_id=left[0].node_id)
        world.pull(SPOT)
    world.tell(ManifestWritten(job_id=world.explore.job_id, key="k"), 7.0)
    result = world.core.jobs[world.explore.job_id].result
    assert result is not None
    assert result.metrics["reward_tail_s"] > 0
    world.restart()
    assert world.core.train_times == {world.explore.run_id: before}


# ---- samples that a rollout takes over -------------------------------------------------------------------------------------------------


def made(request: Any, *, sample_key: str = "samples/x", policy: PolicyRef = POLICY) -> SampleRecord:
    return sample_record(
        request.prompt_id,
        request.seed,
        0.75,
        request_id=request.request_id,
        prompt=request.prompt,
        correct=True,
        sample_key=sample_key,
        sample_digest="d",
        embedding_key=request.embedding_key,
        sde_window=request.sde_window,
        policy=policy,
        node_id=SPOT,
        effective_steps=4,
        busy_s=9.0,
    )


def rolled_out(samples: tuple[SampleRecord, ...]) -> ControlCore:
    core, rollout = ControlCore(CLUSTER), spec(Op.ROLLOUT)
    core.handle(JobSubmitted(job=rollout), 0.0)
    core.handle(JobInputsRead(job_id=rollout.job_id, inputs=msgspec.structs.replace(INPUTS, samples=samples)), 0.0)
    return core


def test_a_rollout_draws_only_what_its_exploration_did_not() -> None:
    rollout = spec(Op.ROLLOUT)
    asked = [record.request for record in rolled_out(()).queue.of_job(rollout.job_id)]
    core = rolled_out(tuple(made(request) for request in asked[:3]))
    records = core.queue.of_job(rollout.job_id)
    assert [record.state for record in records] == [*[RequestState.SCORED] * 3, RequestState.PENDING]
    assert [record.reward for record in records[:3]] == [0.75] * 3
    assert [record.busy_s for record in records] == [0.0] * 4  # who made them has paid for them
    status = core.job_status(rollout.job_id, 1.0)
    assert (status.total, status.scored, status.reward_mean) == (4, 3, 0.75)


def test_a_rollout_that_was_explored_whole_is_over_at_once_with_the_samples_of_the_exploration() -> None:
    rollout = spec(Op.ROLLOUT)
    asked = [record.request for record in rolled_out(()).queue.of_job(rollout.job_id)]
    core, said = ControlCore(CLUSTER), list[Command]()
    core.handle(JobSubmitted(job=rollout), 0.0)
    inputs = msgspec.structs.replace(INPUTS, samples=tuple(made(request) for request in asked))
    said += core.handle(JobInputsRead(job_id=rollout.job_id, inputs=inputs), 0.0)
    (written,) = [command.manifest for command in said if isinstance(command, WriteManifest)]
    assert core.jobs[rollout.job_id].phase is JobPhase.WRITING
    assert {(s.sample_key, s.sample_digest, s.policy) for s in written.samples} == {("samples/x", "d", POLICY)}
    assert [s.request_id for s in written.samples] == [request.request_id for request in asked]


@pytest.mark.parametrize("change", [{"policy": UPDATED}, {"sample_key": ""}])
def test_a_sample_of_other_weights_or_without_its_trajectory_is_drawn_again(change: dict[str, Any]) -> None:
    rollout = spec(Op.ROLLOUT)
    asked = [record.request for record in rolled_out(()).queue.of_job(rollout.job_id)]
    core = rolled_out(tuple(made(request, **change) for request in asked))
    assert {record.state for record in core.queue.of_job(rollout.job_id)} == {RequestState.PENDING}
