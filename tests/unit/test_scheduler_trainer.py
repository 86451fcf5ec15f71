"""One trainer has the seat; it begins when the reserved nodes are parked, and is ended when it is silent for too long."""

from __future__ import annotations

from test_cores_together import CONFIG, Wired, cluster, submit

from spot_runtime.messages import (
    SEAT_TAKEN,
    EndTrainer,
    NodeHeartbeat,
    PauseNode,
    Refused,
    StartTraining,
    StopTraining,
    TrainerFailed,
    TrainerHeartbeat,
    TrainerHello,
    TrainingFinished,
)
from spot_runtime.scheduler import events
from spot_runtime.scheduler.commands import Command, SendToNode, SendToTrainer
from spot_runtime.types import JobId, JobPhase, NodeId, Op, PolicyRef, Pool

RESERVED = NodeId("reserved-0")


def rolled_out() -> Wired:
    wired = cluster()
    submit(wired, Op.ROLLOUT, 0)
    wired.run(80)
    wired.trainer_answers = False
    return wired


def training() -> Wired:
    wired = rolled_out()
    submit(wired, Op.TRAIN_STEP, 0, manifest_key="m")
    wired.run(3)
    assert [job.job_id for job in wired.trainings] == ["train_step-0"]
    return wired


def to_trainer(commands: list[Command]) -> list[tuple[str, object]]:
    return [(c.trainer_id, c.message) for c in commands if isinstance(c, SendToTrainer)]


def to_nodes(commands: list[Command], kind: type) -> list[NodeId]:
    return [c.node_id for c in commands if isinstance(c, SendToNode) and isinstance(c.message, kind)]


def beat(wired: Wired, *, paused: bool, pause: int = 1) -> list[Command]:
    message = NodeHeartbeat(node_id=RESERVED, slots=1, held=(), step_s=0.1, pause=pause, paused=paused)
    return wired.core.handle(message, wired.now_s)


def test_a_second_trainer_gets_nothing_while_the_first_is_within_its_lease() -> None:
    wired = training()
    for message in (
        TrainerHello(trainer_id="u"),
        TrainerHeartbeat(trainer_id="u"),
        TrainingFinished(trainer_id="u", job_id=JobId("train_step-0"), policy=PolicyRef(9, "k", "e"), metrics={}),
    ):
        ((trainer_id, answer),) = to_trainer(wired.core.handle(message, wired.now_s))
        assert (trainer_id, type(answer)) == ("u", Refused)
        assert isinstance(answer, Refused)
        assert answer.error_class == SEAT_TAKEN
    assert (wired.core.trainer.trainer_id, wired.core.trainer.job_id) == ("t", "train_step-0")
    assert wired.core.jobs[JobId("train_step-0")].restarts == 0


def test_a_second_trainer_takes_over_when_the_first_is_gone() -> None:
    wired = training()
    wired.has_trainer = False
    wired.run(int(CONFIG.cluster.lease_s * 10) + 5)
    commands = wired.core.handle(TrainerHello(trainer_id="u"), wired.now_s)
    assert [type(message) for _, message in to_trainer(commands)] == [StartTraining]
    assert wired.core.trainer.trainer_id == "u"
    late = TrainingFinished(trainer_id="t", job_id=JobId("train_step-0"), policy=PolicyRef(2, "k", "e"), metrics={})
    wired.core.handle(late, wired.now_s)
    assert wired.phase(Op.TRAIN_STEP, 0) is JobPhase.RUNNING


def ordered(wired: Wired) -> tuple[int, ...]:
    return wired.core.trainer.orders


def test_a_trainer_that_lost_the_seat_while_it_wrote_still_answers_its_order() -> None:
    """What it made is what the second one would make; that one is told to stop."""
    wired = training()
    (first,) = ordered(wired)
    wired.has_trainer = False
    wired.run(int(CONFIG.cluster.lease_s * 10) + 5)
    wired.core.handle(TrainerHello(trainer_id="u"), wired.now_s)
    assert (len(ordered(wired)), wired.core.trainer.trainer_id) == (2, "u")
    job_id, policy = JobId("train_step-0"), PolicyRef(2, "k", "e")
    gave_up = TrainerFailed(trainer_id="t", job_id=job_id, error_class="TrainingError", error="x", order=first)
    wired.core.handle(gave_up, wired.now_s)
    assert wired.phase(Op.TRAIN_STEP, 0) is JobPhase.RUNNING, "another is at it"
    done = TrainingFinished(trainer_id="t", job_id=job_id, policy=policy, metrics={}, order=first)
    commands = wired.core.handle(done, wired.now_s)
    assert wired.phase(Op.TRAIN_STEP, 0) is JobPhase.SUCCEEDED
    assert wired.core.jobs[job_id].result.policy == policy  # type: ignore[union-attr]
    assert to_trainer(commands) == [("", StopTraining(job_id=job_id))]
    assert wired.core.trainer.trainer_id == "u"
    assert wired.core.trainer.is_free


def test_an_order_of_an_earlier_life_of_the_job_is_answered_by_nobody() -> None:
    wired = training()
    (first,) = ordered(wired)
    job = wired.trainings[0]
    wired.core.handle(events.JobCancelled(job_id=job.job_id), wired.now_s)
    wired.core.handle(events.JobSubmitted(job=job), wired.now_s)
    wired.run(3)
    assert wired.phase(Op.TRAIN_STEP, 0) is JobPhase.RUNNING
    assert first not in ordered(wired)
    late = TrainingFinished(trainer_id="u", job_id=job.job_id, policy=PolicyRef(2, "k", "e"), metrics={}, order=first)
    ((_, answer),) = to_trainer(wired.core.handle(late, wired.now_s))
    assert isinstance(answer, Refused)
    assert wired.phase(Op.TRAIN_STEP, 0) is JobPhase.RUNNING


def test_training_begins_when_the_reserved_workers_have_put_down_their_work() -> None:
    wired = rolled_out()
    commands = wired.core.handle(events.JobSubmitted(job=training().trainings[0]), wired.now_s)
    assert to_nodes(commands, PauseNode) == [RESERVED]
    assert to_trainer(commands) == []
    assert to_trainer(beat(wired, paused=False)) == []
    assert (
        to_trainer(beat(wired, paused=True, pause=0)) == []
    )  # said of an earlier training, whose workers were woken since
    assert [type(message) for _, message in to_trainer(beat(wired, paused=True))] == [StartTraining]


def test_a_reserved_node_that_never_parks_holds_training_up_no_longer_than_its_workers_may_hang() -> None:
    wired = rolled_out()
    wired.core.handle(events.JobSubmitted(job=training().trainings[0]), wired.now_s)
    limit_s = CONFIG.cluster.step_deadline_s + CONFIG.cluster.lease_s
    ordered: list[float] = []
    began_s = wired.now_s
    while wired.now_s < began_s + limit_s + 5 and not ordered:
        wired.now_s += 1.0
        commands = beat(wired, paused=False)
        commands += wired.core.handle(TrainerHeartbeat(trainer_id="t"), wired.now_s)
        ordered += [wired.now_s - began_s for _, message in to_trainer(commands) if isinstance(message, StartTraining)]
    assert [round(seconds) for seconds in ordered] == [round(limit_s) + 1]


def test_a_lost_reserved_node_does_not_hold_training_up() -> None:
    wired = rolled_out()
    wired.core.handle(events.JobSubmitted(job=training().trainings[0]), wired.now_s)
    del wired.nodes[RESERVED]
    wired.run(int(CONFIG.cluster.lease_s * 10) + 5)
    assert [job.job_id for job in wired.trainings] == ["train_step-0"]


def silent_for(wired: Wired, seconds: float) -> list[NodeId]:
    """Who is told to end its trainer while it says nothing; everything else goes on."""
    told: list[NodeId] = []
    end_s = wired.now_s + seconds
    while wired.now_s < end_s:
        wired.now_s += 1.0
        for node in list(wired.nodes.values()):
            wired.core.handle(node.heartbeat(), wired.now_s)
        wired.core.handle(events.JobPolled(job_id=JobId("train_step-0")), wired.now_s)
        told += to_nodes(wired.core.handle(events.TimePassed(), wired.now_s), EndTrainer)
    return told


def test_a_trainer_that_hangs_at_its_work_is_ended_and_ordered_again() -> None:
    wired = training()
    deadline_s = CONFIG.cluster.trainer_deadline_s
    assert silent_for(wired, deadline_s - 5) == []
    assert silent_for(wired, 10) == [RESERVED]
    assert silent_for(wired, deadline_s - 20) == [], "it has as long to come back"
    commands = wired.core.handle(TrainerHello(trainer_id="t"), wired.now_s)
    assert [type(message) for _, message in to_trainer(commands)] == [StartTraining]


def test_a_trainer_that_nobody_needs_may_be_silent() -> None:
    wired = rolled_out()
    assert silent_for(wired, CONFIG.cluster.trainer_deadline_s + 50) == []
    assert wired.nodes[RESERVED].pool is Pool.RESERVED
