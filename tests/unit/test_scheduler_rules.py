"""The scheduler's transition tables, pair by pair, and rules that random lives reach too seldom."""

from __future__ import annotations

import pytest
from msgspec import structs
from scheduler_world import (
    ATTEMPTS_MAX,
    CLOSED,
    CLUSTER,
    GROUP,
    HELD,
    INPUTS,
    PROMPTS,
    SPECS,
    TRAINER,
    Cluster,
    job_spec,
)

from spot_runtime.messages import (
    GenerationRequest,
    PullWork,
    TrainerFailed,
    TrainerHeartbeat,
    TrainerHello,
)
from spot_runtime.scheduler.claim import Claim
from spot_runtime.scheduler.events import (
    JobCancelled,
    JobInputsRead,
    JobPolled,
    JobSubmitted,
    TimePassed,
)
from spot_runtime.scheduler.jobs import JobEvent, JobRecord
from spot_runtime.scheduler.pulls import PARKED_PULLS_MAX
from spot_runtime.scheduler.queue import LOSSES_PER_ATTEMPT, RequestQueue
from spot_runtime.scheduler.requests import HISTORY_ENTRIES_MAX, IllegalTransitionError, RequestEvent, RequestRecord
from spot_runtime.types import (
    JobId,
    JobPhase,
    LeaseId,
    NodeId,
    Op,
    Pool,
    RequestId,
    RequestState,
    RunId,
)

ROLLOUT = JobId("run-a-rollout-0")

# ---- every state meets every event ------------------------------------------------------------------------------------------------

REQUEST_ROWS = {
    #              leased       finished scored    returned     lost         errored      requeued   exhausted cancelled  revived
    "pending":   ("in_flight", None,    None,     None,        None,        None,        None,      None,     "aborted", None),
    "in_flight": (None,        "done",  None,     "recompute", "recompute", "recompute", None,      None,     "aborted", None),
    "recompute": (None,        None,    None,     None,        None,        None,        "pending", "failed", "aborted", None),
    "done":      (None,        None,    "scored", "recompute", "recompute", "recompute", None,      None,     "aborted", None),
    "scored":    (None,) * 4 + ("recompute",) + (None,) * 5,
    "failed":    (None,) * 9 + ("pending",),
    "aborted":   (None,) * 9 + ("pending",),
}  # fmt: skip
JOB_ROWS = {
    # expanded, encoded, input, data, samples, state lost; started, all_final, written, trained; failed, cancelled, resubmitted
    "admitting": ("encoding", None, None, None, None, None, "running", None, None, None, "failed", "cancelled", None),
    "encoding":  (None, "running", None, None, None, None, None, None, None, None, "failed", "cancelled", None),
    "running":   (None, None, "encoding", "admitting", None, None, None, "writing", None, "succeeded", "failed", "cancelled", None),
    "writing":   (None, None, None, None, None, None, None, None, "succeeded", None, "failed", "cancelled", None),
    "succeeded": (None, None, None, None, "running", "admitting") + (None,) * 6 + ("writing",),
    "failed":    (None,) * 12 + ("admitting",),
    "cancelled": (None,) * 12 + ("admitting",),
}  # fmt: skip


@pytest.mark.parametrize("state", RequestState)
@pytest.mark.parametrize("event", RequestEvent)
def test_every_request_state_meets_every_event(state, event):
    record = RequestRecord(request=some_request(), state=state, lease_id=LeaseId("x.1") if state in HELD else None)
    after = REQUEST_ROWS[state][list(RequestEvent).index(event)]
    if after is None:
        with pytest.raises(IllegalTransitionError, match=f"{event} cannot happen in state {state}"):
            record.move(event, 7.0)
        assert (record.state, record.history) == (state, [])
        return
    record.move(event, 7.0, "why")
    assert (record.state, record.history) == (after, [f"7.000 {event} why"])
    assert record.lease_id == ("x.1" if state in HELD and after in HELD else None)
    assert record.is_final == (after in CLOSED)


@pytest.mark.parametrize("phase", JobPhase)
@pytest.mark.parametrize("event", JobEvent)
def test_every_job_phase_meets_every_event(phase, event):
    record = JobRecord(job=SPECS[JobId("run-a-rollout-0")], sequence=1, phase=phase)
    after = JOB_ROWS[phase][list(JobEvent).index(event)]
    if after is None:
        with pytest.raises(IllegalTransitionError, match=f"{event} cannot happen in phase {phase}"):
            record.move(event, 7.0)
        assert record.phase is phase
        return
    record.move(event, 7.0)
    assert record.phase == after
    assert record.started_s == (7.0 if after == "running" else 0.0)
    assert record.finished_s == (7.0 if record.phase.is_final else 0.0)


def test_the_history_of_a_request_is_bounded():
    record = RequestRecord(request=some_request())
    for second in range(100):
        for event in (RequestEvent.LEASED, RequestEvent.LOST, RequestEvent.REQUEUED):
            record.move(event, float(second))
    assert len(record.history) == HISTORY_ENTRIES_MAX
    assert record.history[-1] == "99.000 requeued"


# ---- rules that random lives reach too seldom -------------------------------------------------------------------------------------


def some_request() -> GenerationRequest:
    world = Cluster()
    world.send(JobSubmitted(job=SPECS[JobId("run-a-rollout-0")]))
    world.send(JobInputsRead(job_id=JobId("run-a-rollout-0"), inputs=INPUTS))
    return next(iter(world.oracle.asks.values())).request


def test_a_request_that_kills_every_node_it_meets_fails_in_the_end_and_takes_its_group_along():
    world = Cluster()
    node, job_id = world.nodes[NodeId("s1")], JobId("run-a-rollout-0")
    world.trainer.runs = True
    world.say(TrainerHello(trainer_id=TRAINER))
    world.send(JobSubmitted(job=SPECS[job_id]))
    world.send(JobInputsRead(job_id=job_id, inputs=INPUTS))
    world.train()
    for _ in range(LOSSES_PER_ATTEMPT * ATTEMPTS_MAX):
        world.hello(node, fresh=True)  # each time with nothing left of what it held
        world.pull(node, "g", 1)
    world.hello(node, fresh=True)
    states = [ask.state for ask in world.oracle.asks.values()]
    assert states.count(RequestState.FAILED) == 1
    world.settle()
    assert len(world.manifests[job_id].samples) == GROUP
    assert len(world.manifests[job_id].failed_prompt_ids) == 1
    assert world.core.jobs[job_id].phase is JobPhase.SUCCEEDED
    (failed,) = world.manifests[job_id].failed
    assert failed.prompt_id == world.manifests[job_id].failed_prompt_ids[0]
    assert (failed.failures, failed.losses) == (0, LOSSES_PER_ATTEMPT * ATTEMPTS_MAX)
    assert failed.history[-1].endswith(" exhausted")
    assert failed.history[-2].endswith(" lost node restarted")


def test_a_request_that_failed_for_good_is_shown_with_its_history_in_manifest_status_and_message():
    world = Cluster()
    node, job_id = world.nodes[NodeId("s1")], JobId("run-a-rollout-0")
    world.hello(node, fresh=True)
    world.trainer.runs = True
    world.say(TrainerHello(trainer_id=TRAINER))
    world.send(JobSubmitted(job=SPECS[job_id]))
    world.send(JobInputsRead(job_id=job_id, inputs=INPUTS))
    world.train()
    for _ in range(ATTEMPTS_MAX):
        world.pull(node, "g", 1)
        (assignment,) = node.held.values()
        world.fail(node.node_id, assignment)
    (shown,) = world.core.cluster_status(world.now).failures
    assert (shown.job_id, shown.attempts, shown.failures) == (job_id, ATTEMPTS_MAX, ATTEMPTS_MAX)
    assert shown.reason == "RewardError: no answer"
    assert [entry.split()[1] for entry in shown.history] == ["leased", "errored", "requeued"] * (ATTEMPTS_MAX - 1) + [
        "leased",
        "errored",
        "exhausted",
    ]
    world.settle()
    assert world.manifests[job_id].failed == (shown,)
    message = world.core.job_status(job_id, world.now).message
    assert message.startswith("1 requests failed for good, groups left out whole: prompts ")
    assert message.endswith(f"the first after {ATTEMPTS_MAX} attempts: RewardError: no answer")


def test_a_job_that_nobody_polls_is_cancelled_and_its_nodes_are_told():
    world = Cluster()
    node, job_id = world.nodes[NodeId("s1")], JobId("run-a-rollout-0")
    world.hello(node, fresh=True)
    world.trainer.runs = True
    world.say(TrainerHello(trainer_id=TRAINER))
    world.send(JobSubmitted(job=SPECS[job_id]))
    world.send(JobInputsRead(job_id=job_id, inputs=INPUTS))
    world.train()
    world.pull(node, "g", 4)
    assert len(node.held) == PROMPTS * GROUP
    world.core.cluster = CLUSTER.model_copy(update={"poll_deadline_s": 3.0})
    world.now += 3.0
    world.heartbeat(node)
    world.send(TimePassed())
    assert world.core.jobs[job_id].phase is JobPhase.RUNNING
    world.now += 0.1
    world.send(TimePassed())
    assert world.core.jobs[job_id].phase is JobPhase.CANCELLED
    assert node.held == {}


def test_a_job_that_nobody_polls_is_paused_and_goes_on_when_it_is_polled_again():
    world = Cluster()
    world.core.cluster = CLUSTER.model_copy(update={"run_lease_s": 3.0})
    node = world.nodes[NodeId("s1")]
    world.hello(node, fresh=True)
    world.trainer.runs = True
    world.say(TrainerHello(trainer_id=TRAINER))
    world.send(JobSubmitted(job=SPECS[ROLLOUT]))
    world.send(JobInputsRead(job_id=ROLLOUT, inputs=INPUTS))
    world.train()
    world.pull(node, "g", 1)
    core, queue = world.core, world.core.queue
    (begun,) = (record for record in queue.records.values() if record.lease_id)
    world.now += 3.5
    world.heartbeat(node)
    world.send(TimePassed())
    core.handle(PullWork(node_id=node.node_id, group_id="g", room=1, number=9), world.now)
    assert begun.state is RequestState.IN_FLIGHT, "what is under way goes on"
    assert [record for record in queue.records.values() if record.lease_id] == [begun]
    (shown,) = core.cluster_status(world.now).jobs
    assert shown.message == "paused: nobody polled for 4 s"
    core.handle(JobSubmitted(job=SPECS[JobId("run-b-rollout-0")]), world.now)
    assert [record for record in queue.records.values() if record.lease_id] == [begun], "another run's lease is its own"
    core.handle(JobSubmitted(job=SPECS[JobId("run-a-evaluate-0")]), world.now)
    core.handle(JobPolled(job_id=JobId("run-a-evaluate-0")), world.now)
    assert len([record for record in queue.records.values() if record.lease_id]) == 2
    assert core.job_status(ROLLOUT, world.now).message == ""


FIRST, SECOND = JobId("run-a-train_step-0"), JobId("run-b-train_step-0")


def two_runs(**cluster: float) -> Cluster:
    """The first of three iterations of run-a is trained, and run-b's only one waits."""
    world = Cluster()
    world.core.cluster = CLUSTER.model_copy(update=cluster)
    world.trainer.runs = True
    world.say(TrainerHello(trainer_id=TRAINER))
    world.send(JobSubmitted(job=SPECS[FIRST]))
    world.send(JobSubmitted(job=SPECS[SECOND]))
    assert phases(world) == (JobPhase.RUNNING, JobPhase.ADMITTING)
    waits = world.core.job_status(SECOND, world.now)
    assert waits.message == "waits for the trainer, which is at run-a-train_step-0 of run run-a"
    world.train()
    assert phases(world) == (JobPhase.SUCCEEDED, JobPhase.ADMITTING)
    return world


def phases(world: Cluster) -> tuple[JobPhase, JobPhase]:
    return world.core.jobs[FIRST].phase, world.core.jobs[SECOND].phase


def polled(world: Cluster, *job_ids: JobId, seconds: int) -> None:
    for _ in range(seconds):
        world.now += 1.0
        for job_id in job_ids:
            world.send(JobPolled(job_id=job_id))
        world.say(TrainerHeartbeat(trainer_id=TRAINER, job_id=world.trainer.job_id))


def test_a_second_run_waits_until_the_first_has_trained_its_last_iteration_and_says_for_whom():
    world = two_runs()
    waits = world.core.job_status(SECOND, world.now)
    assert waits.message == "waits for run run-a, which has the trainer until its last iteration is trained"
    for iteration in (1, 2):
        assert phases(world)[1] is JobPhase.ADMITTING
        following = job_spec("run-a", Op.TRAIN_STEP, iteration)
        world.send(JobSubmitted(job=following))
        assert world.trainer.job_id == following.job_id
        world.train()
    assert world.trainer.job_id == SECOND
    assert world.core.job_status(SECOND, world.now).message == ""


def test_the_run_that_has_the_trainer_keeps_it_over_a_restart_of_control():
    world = two_runs()
    world.restart()
    polled(world, FIRST, SECOND, seconds=2)
    assert (phases(world)[1], world.trainer.job_id) == (JobPhase.ADMITTING, None)
    following = job_spec("run-a", Op.TRAIN_STEP, 1)
    world.send(JobSubmitted(job=following))
    assert world.trainer.job_id == following.job_id


def test_a_run_that_ends_early_leaves_the_trainer_when_its_lease_lapses_and_one_that_waits_keeps_its_own():
    world = two_runs(run_lease_s=5.0, stall_deadline_s=10.0)
    polled(world, FIRST, SECOND, seconds=20)  # polls of its finished jobs keep a run's lease; who waits is not stalled
    assert phases(world)[1] is JobPhase.ADMITTING
    world.oracle.lapsed.add(RunId("run-a"))
    polled(world, SECOND, seconds=5)
    world.send(TimePassed())
    assert phases(world)[1] is JobPhase.ADMITTING
    polled(world, SECOND, seconds=1)
    world.send(TimePassed())
    assert world.trainer.job_id == SECOND


def test_a_run_that_comes_back_after_its_lease_waits_for_the_one_that_has_the_trainer_now():
    world = two_runs(run_lease_s=5.0)
    world.oracle.lapsed.add(RunId("run-a"))
    polled(world, SECOND, seconds=6)
    world.send(TimePassed())
    following = job_spec("run-a", Op.TRAIN_STEP, 1)
    world.send(JobSubmitted(job=following))
    assert world.trainer.job_id == SECOND
    assert world.core.jobs[following.job_id].phase is JobPhase.ADMITTING
    world.train()
    assert world.trainer.job_id == following.job_id, "the other one's only iteration is trained"


@pytest.mark.parametrize("job_id", [FIRST, JobId("run-a-evaluate-0")])
def test_a_run_of_which_a_job_is_cancelled_leaves_the_trainer(job_id):
    world = Cluster()
    world.trainer.runs = True
    world.say(TrainerHello(trainer_id=TRAINER))
    for submitted in (FIRST, SECOND, JobId("run-a-evaluate-0")):
        world.send(JobSubmitted(job=SPECS[submitted]))
    if job_id != FIRST:
        world.train()
    assert phases(world)[1] is JobPhase.ADMITTING
    world.send(JobCancelled(job_id=job_id, reason="asked to"))
    assert world.trainer.job_id == SECOND


def test_a_training_that_failed_may_be_tried_again_before_another_run_trains():
    world = two_runs()
    following = job_spec("run-a", Op.TRAIN_STEP, 1)
    for _ in range(2):
        world.send(JobSubmitted(job=following))
        assert world.trainer.job_id == following.job_id
        world.trainer.order = None
        world.say(
            TrainerFailed(trainer_id=TRAINER, job_id=following.job_id, error_class="StoreError", error="disk full")
        )
        assert phases(world)[1] is JobPhase.ADMITTING


def test_encoding_of_another_run_goes_in_between():
    world = two_runs()
    other = JobId("run-b-rollout-0")
    world.send(JobSubmitted(job=SPECS[other]))
    world.send(JobInputsRead(job_id=other, inputs=INPUTS))
    assert world.trainer.job_id == other
    world.train()
    assert world.core.jobs[other].phase is JobPhase.RUNNING


def encoding(node_id: NodeId) -> Cluster:
    """A node, and a rollout whose prompts the trainer encodes."""
    world = Cluster()
    world.hello(world.nodes[node_id], fresh=True)
    world.trainer.runs = True
    world.say(TrainerHello(trainer_id=TRAINER))
    world.send(JobSubmitted(job=SPECS[ROLLOUT]))
    world.send(JobInputsRead(job_id=ROLLOUT, inputs=INPUTS))
    return world


def test_an_embedding_that_the_store_lost_is_made_again_at_no_cost_of_attempts():
    world = encoding(NodeId("s1"))
    node = world.nodes[NodeId("s1")]
    world.train()
    for _ in range(ATTEMPTS_MAX + 1):
        world.pull(node, "g", 2)
        first, second = list(node.held.values())
        world.fail(node.node_id, first, "LostEmbeddingError")
        assert world.core.jobs[ROLLOUT].phase is JobPhase.ENCODING
        request = first.request
        assert world.trainer.order is not None
        assert world.trainer.order.prompts == ((request.embedding_key, request.prompt),)
        world.pull(node, "h", 1)
        assert list(node.held.values()) == [second], "nothing more begins meanwhile, and what is under way goes on"
        world.restart()
        world.say(TrainerHello(trainer_id=TRAINER, job_id=ROLLOUT))
        world.hello(node, fresh=False)
        world.train()
        assert world.core.jobs[ROLLOUT].phase is JobPhase.RUNNING
        world.give_back(node.node_id, second, 1)
    world.settle()
    assert len(world.manifests[ROLLOUT].samples) == PROMPTS * GROUP


def test_a_request_whose_embedding_is_lost_again_and_again_fails_in_the_end():
    world = encoding(NodeId("s1"))
    node = world.nodes[NodeId("s1")]
    for _ in range(LOSSES_PER_ATTEMPT * ATTEMPTS_MAX):
        world.train()
        world.pull(node, "g", 1)
        (assignment,) = node.held.values()
        world.fail(node.node_id, assignment, "LostEmbeddingError")
    (failed,) = world.core.cluster_status(world.now).failures
    assert failed.reason == "LostEmbeddingError: no answer"
    world.settle()
    assert world.core.jobs[ROLLOUT].phase is JobPhase.SUCCEEDED


def test_parked_pulls_are_bounded_and_the_oldest_is_forgotten():
    queue = RequestQueue(lease_s=4.0, failures_max=2)
    for group in range(PARKED_PULLS_MAX + 2):
        queue.pull(PullWork(node_id=NodeId("s1"), group_id=f"g{group}", room=1))
    groups = [group for _, group in queue.pulls.parked]
    assert (len(groups), groups[0], groups[-1]) == (PARKED_PULLS_MAX, "g2", f"g{PARKED_PULLS_MAX + 1}")


def test_what_is_left_goes_everywhere_when_training_is_cancelled_before_it_began():
    world = Cluster()
    world.hello(world.nodes[NodeId("s1")], fresh=True)
    train, evaluate = JobId("run-a-train_step-0"), JobId("run-a-evaluate-0")
    world.send(JobSubmitted(job=SPECS[train]))
    world.send(JobSubmitted(job=SPECS[evaluate]))
    world.send(JobInputsRead(job_id=evaluate, inputs=INPUTS))
    assert not world.core.queue.claims[evaluate].everywhere
    world.send(JobCancelled(job_id=train))
    assert world.core.queue.claims[evaluate].everywhere


def test_reserved_nodes_work_again_when_training_ends_while_the_trainer_is_away():
    world = Cluster()
    node, train = world.nodes[NodeId("r1")], JobId("run-a-train_step-0")
    world.trainer.runs = True
    world.hello(node, fresh=True)
    world.say(TrainerHello(trainer_id=TRAINER))
    world.send(JobSubmitted(job=SPECS[train]))
    assert node.paused
    world.restart()
    world.hello(node, fresh=False)
    assert node.paused
    world.send(JobCancelled(job_id=train))
    assert not node.paused


def test_a_long_job_that_moves_outlives_a_restart_of_control():
    world = Cluster()
    node, job_id = world.nodes[NodeId("s1")], JobId("run-a-rollout-0")
    world.trainer.runs = True
    world.say(TrainerHello(trainer_id=TRAINER))
    world.send(JobSubmitted(job=SPECS[job_id]))
    world.send(JobInputsRead(job_id=job_id, inputs=INPUTS))
    world.train()
    for _ in range(3):  # something happens more often than the stall deadline asks for, over more than that deadline
        world.now += CLUSTER.stall_deadline_s / 2
        world.hello(node, fresh=True)
        world.pull(node, "g", 1)
    world.restart()
    world.send(TimePassed())
    assert world.core.jobs[job_id].phase is JobPhase.RUNNING


def test_a_group_gets_the_share_that_its_slots_are():
    """Eight requests for three slots: a group of two takes ceil(8 * 2 / 3) = 6, whoever has one slot what is left."""
    queue = RequestQueue(lease_s=4.0, failures_max=2)
    requests = [structs.replace(some_request(), request_id=RequestId(f"r{number}")) for number in range(8)]
    queue.add(Claim(requests[0].job_id, 1, Op.ROLLOUT, ready=True, everywhere=True), requests, 0.0)
    wide = PullWork(node_id=NodeId("spot-0"), group_id="0-1", room=8, sequence_parallel_degree=2)
    queue.pull(wide)
    queue.pull(PullWork(node_id=NodeId("spot-1"), group_id="0", room=8))
    pools = {NodeId("spot-0"): Pool.SPOT, NodeId("spot-1"): Pool.SPOT}
    grants = queue.grants(pools, slots=3, spot_slots=3, now_s=1.0)
    assert [(grant.node_id, len(grant.assignments)) for grant in grants] == [("spot-0", 6), ("spot-1", 1)]
