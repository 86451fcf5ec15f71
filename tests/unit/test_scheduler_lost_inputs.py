"""What the store has lost after it had said that it was there: the job that made it makes it again, and whoever reads it waits."""

from __future__ import annotations

import msgspec
from scheduler_world import GROUP, PROMPTS, SPECS, TRAINER, Cluster

from spot_runtime.messages import EncodePrompts, StartTraining, TrainerFailed, TrainingFinished
from spot_runtime.scheduler.commands import SendToTrainer, WriteManifest
from spot_runtime.scheduler.core import REDONE_MAX
from spot_runtime.scheduler.events import JobCancelled, JobPolled
from spot_runtime.scheduler.jobs import JobRecord, makes
from spot_runtime.types import JobId, JobPhase, JobResult, NodeId, Op, PolicyRef, RequestId, RequestState

ROLLOUT, TRAINING = JobId("run-a-rollout-0"), JobId("run-a-train_step-0")
NEXT_ROLLOUT, NEXT_TRAINING = JobId("run-a-rollout-1"), JobId("run-a-train_step-1")
MANIFEST = f"runs/run-a/manifests/{ROLLOUT}.json"
TRAINED = PolicyRef(2, "runs/run-a/policies/2", "d2")
NEXT_ROLLOUT_SPEC = msgspec.structs.replace(SPECS[ROLLOUT], job_id=NEXT_ROLLOUT, iteration=1, policy=TRAINED)
NEXT_TRAINING_SPEC = msgspec.structs.replace(
    SPECS[TRAINING],
    job_id=NEXT_TRAINING,
    iteration=1,
    policy=TRAINED,
    manifest_key=f"runs/run-a/manifests/{NEXT_ROLLOUT}.json",
)


def training() -> Cluster:
    """The trainer is at work on what was rolled out."""
    world = Cluster()
    world.roll_out_and_train()
    return world


def scored(world: Cluster) -> list[RequestId]:
    return [ask.request.request_id for ask in world.oracle.of_job(ROLLOUT) if ask.state is RequestState.SCORED]


def phases(world: Cluster, *job_ids: JobId) -> list[JobPhase]:
    return [world.core.jobs[job_id].phase for job_id in job_ids]


def fails(world: Cluster, error_class: str) -> None:
    job_id, world.trainer.order = world.trainer.job_id, None
    world.say(TrainerFailed(trainer_id=TRAINER, job_id=job_id, error_class=error_class, error="it is gone"))


def test_lost_samples_are_drawn_again_and_training_waits_for_a_manifest_that_has_them() -> None:
    world = training()
    lost = scored(world)[:2]
    world.miss_samples(lost)
    assert phases(world, ROLLOUT, TRAINING) == [JobPhase.RUNNING, JobPhase.ADMITTING]
    waiting = world.core.job_status(TRAINING, world.now)
    assert waiting.message == "waits for what the store lost of its inputs: it is made again"
    assert world.core.job_status(ROLLOUT, world.now).message == "makes again what the store lost of it"
    assert not world.nodes[NodeId("r1")].paused, "reserved slots help"
    held = {request_id: assignment for node in world.nodes.values() for request_id, assignment in node.held.items()}
    assert sorted(held) == sorted(lost)
    assert all(assignment.resume is None for assignment in held.values())
    world.tend()
    assert world.trainer.order is None, "nothing is trained meanwhile"
    world.settle()
    assert phases(world, ROLLOUT, TRAINING) == [JobPhase.SUCCEEDED] * 2
    commands = [command for _, _, commands in world.log for command in commands]
    orders = [command.message for command in commands if isinstance(command, SendToTrainer)]
    assert [order.job for order in orders if isinstance(order, StartTraining)] == [SPECS[TRAINING]] * 2
    writes = [command for command in commands if isinstance(command, WriteManifest)]
    assert [(write.key, write.replaces) for write in writes] == [(MANIFEST, False), (MANIFEST, True)]
    assert len(writes[1].counted) == PROMPTS * GROUP
    assert world.core.job_status(ROLLOUT, world.now).message == ""


def test_a_lost_manifest_is_written_again() -> None:
    world = training()
    world.miss_samples([])
    assert phases(world, ROLLOUT, TRAINING) == [JobPhase.WRITING, JobPhase.ADMITTING]
    assert [(write.key, write.replaces) for write in world.writes] == [(MANIFEST, True)]
    world.settle()
    assert phases(world, TRAINING) == [JobPhase.SUCCEEDED]


def test_control_that_dies_meanwhile_goes_on_with_it() -> None:
    world = training()
    world.miss_samples(scored(world)[:1])
    world.restart()
    assert phases(world, ROLLOUT, TRAINING) == [JobPhase.RUNNING, JobPhase.ADMITTING]
    world.settle()
    assert phases(world, ROLLOUT, TRAINING) == [JobPhase.SUCCEEDED] * 2


def test_nobody_polls_a_rollout_that_was_over_and_it_is_not_given_up_for_that() -> None:
    world = training()
    world.miss_samples(scored(world)[:1])
    world.now += 10.0
    world.send(JobPolled(job_id=TRAINING))
    assert world.core.jobs[ROLLOUT].polled_s == world.now


def test_what_is_lost_again_and_again_ends_the_training_with_that_error() -> None:
    world = training()
    for _ in range(REDONE_MAX):
        world.miss_samples([])
        while world.core.jobs[TRAINING].phase is not JobPhase.RUNNING or world.trainer.order is None:
            trainer_runs, world.trainer.runs = world.trainer.runs, False
            world.tend()
            world.trainer.runs = trainer_runs
            for node in world.nodes.values():
                world.heartbeat(node)
    world.miss_samples([])
    assert phases(world, ROLLOUT, TRAINING) == [JobPhase.SUCCEEDED, JobPhase.FAILED]
    assert world.core.jobs[TRAINING].error == "samples are gone"


def test_a_rollout_that_cannot_draw_again_ends_the_training_that_waits() -> None:
    world = training()
    world.miss_samples(scored(world)[:1])
    world.send(JobCancelled(job_id=ROLLOUT, reason="asked to"))
    assert phases(world, ROLLOUT, TRAINING) == [JobPhase.CANCELLED, JobPhase.FAILED]
    error = f"{ROLLOUT}, which should make again what the store lost: asked to"
    assert world.core.jobs[TRAINING].error == error


def test_samples_of_a_rollout_that_control_forgot_are_an_error() -> None:
    world = training()
    spec = msgspec.structs.replace(world.core.jobs[TRAINING].job, manifest_key="runs/run-a/manifests/another.json")
    world.core.jobs[TRAINING].job = spec
    world.miss_samples(scored(world)[:1])
    assert phases(world, ROLLOUT, TRAINING) == [JobPhase.SUCCEEDED, JobPhase.FAILED]


def second_iteration() -> Cluster:
    """One iteration is trained; the next rolls out with what came of it."""
    world = training()
    world.trainer.order = None
    world.say(TrainingFinished(trainer_id=TRAINER, job_id=TRAINING, policy=TRAINED, metrics={}))
    return world


def test_a_job_reads_a_policy_or_its_average_and_a_run_that_begins_reads_none() -> None:
    average = PolicyRef(2, "runs/run-a/policies/2-average", "a2")
    for given, trained, reads in (
        (TRAINED, TRAINED, True),
        (average, TRAINED, True),
        (PolicyRef(), PolicyRef(), False),
        (PolicyRef(2, TRAINED.key, "other"), TRAINED, False),
    ):
        result = JobResult(op=Op.TRAIN_STEP, policy=trained, average=average)
        maker = JobRecord(job=SPECS[TRAINING], sequence=1, result=result)
        job = JobRecord(job=msgspec.structs.replace(SPECS[ROLLOUT], policy=given), sequence=2)
        assert makes(maker, job) == reads


def test_a_policy_that_leftovers_were_changed_to_is_made_by_the_training_that_made_it() -> None:
    """Not by the one that made the policy which the job began with."""
    later = PolicyRef(3, "runs/run-a/policies/3", "d3")
    job = JobRecord(job=msgspec.structs.replace(SPECS[ROLLOUT], policy=TRAINED), sequence=3, to_publish=later)
    for made, reads in ((TRAINED, False), (later, True)):
        maker = JobRecord(job=SPECS[TRAINING], sequence=1, result=JobResult(op=Op.TRAIN_STEP, policy=made))
        assert makes(maker, job) == reads


def test_a_job_that_has_succeeded_and_is_submitted_again_sees_to_its_manifest() -> None:
    """A task that is retried, or a run that is resumed, after the store lost it."""
    world = training()
    before = world.core.jobs[ROLLOUT].result
    world.now += 100.0
    world.submit(SPECS[ROLLOUT])
    assert phases(world, ROLLOUT, TRAINING) == [JobPhase.WRITING, JobPhase.RUNNING]
    assert [(write.key, write.replaces) for write in world.writes] == [(MANIFEST, False)]
    world.settle()
    assert phases(world, ROLLOUT, TRAINING) == [JobPhase.SUCCEEDED] * 2
    assert world.core.jobs[ROLLOUT].result == before, "nothing was paid for twice"


def test_a_lost_trainer_state_is_made_by_the_training_before_and_this_one_waits() -> None:
    world = second_iteration()
    world.submit(NEXT_TRAINING_SPEC)
    for node in world.nodes.values():
        world.heartbeat(node)
    assert world.trainer.job_id == NEXT_TRAINING
    fails(world, "LostStateError")
    assert phases(world, TRAINING, NEXT_TRAINING) == [JobPhase.RUNNING, JobPhase.ADMITTING]
    for node in world.nodes.values():
        world.heartbeat(node)
    assert world.trainer.job_id == TRAINING
    world.trainer.order = None
    world.say(TrainingFinished(trainer_id=TRAINER, job_id=TRAINING, policy=TRAINED, metrics={}))
    for node in world.nodes.values():
        world.heartbeat(node)
    assert world.trainer.job_id == NEXT_TRAINING


def test_a_lost_policy_is_stored_again_and_where_its_state_is_gone_too_trained_again() -> None:
    world = second_iteration()
    world.submit(NEXT_ROLLOUT_SPEC)
    node = world.nodes[NodeId("s1")]
    world.train()
    world.pull(node, "g", 1)
    assignment = next(iter(node.held.values()))
    world.fail(node.node_id, assignment, "LostPolicyError")
    order = world.trainer.order
    assert isinstance(order, EncodePrompts)
    assert (order.job_id, order.prompts, order.policy) == (NEXT_ROLLOUT, (), TRAINED)
    fails(world, "LostStateError")
    assert phases(world, TRAINING, NEXT_ROLLOUT) == [JobPhase.RUNNING, JobPhase.ENCODING]
    for each in world.nodes.values():
        world.heartbeat(each)
    assert world.trainer.job_id == TRAINING
    world.trainer.order = None
    world.say(TrainingFinished(trainer_id=TRAINER, job_id=TRAINING, policy=TRAINED, metrics={}))
    assert world.trainer.job_id == NEXT_ROLLOUT
    world.train()
    assert phases(world, NEXT_ROLLOUT) == [JobPhase.RUNNING]
    assert world.core.jobs[NEXT_ROLLOUT].to_publish == PolicyRef()
