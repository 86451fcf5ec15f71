"""Random lives of a cluster: the control core must agree with the oracle after every event, and all jobs must end once all is well."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scheduler_world import (
    CLUSTER,
    GROUP,
    INPUTS,
    PAIRS,
    POOL_OF,
    PROMPTS,
    SPECS,
    STEPS,
    TRAINER,
    Cluster,
    Trainer,
    reward_of,
)

from spot_runtime.messages import (
    Assignment,
    HeldLease,
    NodeHeartbeat,
    NodeLeft,
    NodeNoticed,
    StartTraining,
    TrainerFailed,
    TrainerHeartbeat,
    TrainerHello,
)
from spot_runtime.scheduler.core import REDONE_MAX, TRAINER_RESTARTS_MAX, ControlCore
from spot_runtime.scheduler.events import (
    ControlAwoke,
    JobCancelled,
    JobInputsRead,
    JobPolled,
    JobStepFailed,
    JobSubmitted,
    ManifestWritten,
    TimePassed,
)
from spot_runtime.types import (
    JobId,
    JobPhase,
    NodeId,
    PolicyRef,
    RequestId,
    RequestState,
)

# ---- the machine ------------------------------------------------------------------------------------------------------------------

node_ids = st.sampled_from(sorted(POOL_OF))
job_ids = st.sampled_from(sorted(SPECS))
often = st.sampled_from([True, True, True, False])


class ClusterMachine(RuleBasedStateMachine):
    @initialize(
        names=st.sampled_from([("s1", "r1"), ("s1", "s2"), ("s1", "s2", "r1"), ("r1",), ()]),
        jobs=st.lists(job_ids, unique=True, max_size=4),
        trainer=often,
        pulled=st.booleans(),
        trains=st.booleans(),
    )
    def start(self, names: tuple[str, ...], jobs: list[JobId], trainer: bool, pulled: bool, trains: bool) -> None:
        self.world = Cluster()
        if trains:
            self.world.roll_out_and_train()
            return
        for name in names:
            self.world.hello(self.world.nodes[NodeId(name)], fresh=True)
            self.world.heartbeat(self.world.nodes[NodeId(name)])
        if trainer:
            self.trainer_lives("starts")
        for job_id in jobs:
            self.client_asks(job_id, "submit and wait")
            self.world.train()
        if pulled:
            self.all_pull()

    # ---- time, control, client ----

    @rule(seconds=st.sampled_from([0.1, 2.0, 5.0]))
    def time_passes_in_silence(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.send(TimePassed())

    @rule(seconds=st.sampled_from([1.0, 3.0]))
    def time_passes_with_heartbeats(self, seconds: float) -> None:
        self.world.now += seconds
        for node in self.world.nodes.values():
            self.world.heartbeat(node)
        if self.world.trainer.runs:
            self.world.say(TrainerHeartbeat(trainer_id=TRAINER, job_id=self.world.trainer.job_id))
        self.world.send(TimePassed())

    @rule(seconds=st.sampled_from([3.0, 10.0]))
    def control_stands_still(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.send(ControlAwoke())
        self.world.send(TimePassed())

    @rule()
    def control_is_killed_and_restarts(self) -> None:
        self.world.restart()

    @rule(job_id=job_ids, what=st.sampled_from(["submit", "submit and wait", "submit and wait", "poll"]))
    def client_asks(self, job_id: JobId, what: str) -> None:
        match what:
            case "poll":
                self.world.send(JobPolled(job_id=job_id))
            case _:
                self.world.send(JobSubmitted(job=SPECS[job_id]))
        while what == "submit and wait" and self.world.reads:
            self.shell_answers(works=True)

    @precondition(lambda self: self.world.core.jobs)
    @rule(data=st.data(), again=st.booleans())
    def client_cancels(self, data: st.DataObject, again: bool) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.world.core.jobs)))
        self.world.send(JobCancelled(job_id=job_id, reason="asked to"))
        if again:
            self.client_asks(job_id, "submit and wait")

    @precondition(lambda self: self.world.reads or self.world.writes)
    @rule(works=often)
    def shell_answers(self, works: bool) -> None:
        if self.world.reads:
            job_id = self.world.reads.pop(0).job_id
            answer: object = JobInputsRead(job_id=job_id, inputs=INPUTS)
        else:
            write = self.world.writes.pop(0)
            job_id, answer = write.job_id, ManifestWritten(job_id=write.job_id, key=write.key)
        failure = JobStepFailed(job_id=job_id, error_class="StoreError", error="disk full")
        self.world.send(answer if works else failure)

    # ---- nodes ----

    @rule(
        node_id=node_ids,
        what=st.sampled_from(["starts", "reconnects", "is noticed", "leaves", "is killed", "goes deaf"]),
    )
    def node_lives(self, node_id: NodeId, what: str) -> None:
        node = self.world.nodes[node_id]
        match what:
            case "starts":
                self.world.hello(node, fresh=True)
            case "reconnects":
                self.world.hello(node, fresh=not node.runs)
            case "is noticed":
                self.world.say(NodeNoticed(node_id=node_id, grace_period_s=2.0))
            case "leaves":
                node.runs = False
                self.world.say(NodeLeft(node_id=node_id))
            case "is killed":
                node.runs = False
            case "goes deaf":
                node.deaf = True

    @rule(node_id=node_ids, group=st.sampled_from(["g0", "g1"]), room=st.integers(0, 4), again=st.booleans())
    def pull(self, node_id: NodeId, group: str, room: int, again: bool) -> None:
        self.world.pull(self.world.nodes[node_id], group, room, again=again)

    @rule()
    def all_pull(self) -> None:
        for node in self.world.nodes.values():
            self.world.pull(node, "g0", 2)

    # ---- requests ----

    def held(self) -> list[tuple[NodeId, Assignment]]:
        return [(n.node_id, a) for n in self.world.nodes.values() if n.runs for a in n.held.values()]

    @precondition(lambda self: self.held())
    @rule(data=st.data(), reward=st.floats(0, 1), how=st.sampled_from(["done", "done and scored", "other policy"]))
    def sample_is_made(self, data: st.DataObject, reward: float, how: str) -> None:
        node_id, assignment = data.draw(st.sampled_from(self.held()))
        finished = assignment.lease_id in self.world.nodes[node_id].finished
        if how == "other policy":
            self.world.finish(node_id, assignment, PolicyRef(9, "other", "d9"))
            return
        if not finished:
            self.world.finish(node_id, assignment)
        if how == "done and scored" or finished:
            self.world.score(node_id, assignment, reward)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), denoising_step=st.integers(0, STEPS))
    def request_is_returned(self, data: st.DataObject, denoising_step: int) -> None:
        self.world.give_back(*data.draw(st.sampled_from(self.held())), denoising_step)

    @precondition(lambda self: self.held())
    @rule(
        data=st.data(),
        all_of_them=st.booleans(),
        error=st.sampled_from(["RewardError", "LostEmbeddingError", "LostPolicyError"]),
    )
    def request_fails(self, data: st.DataObject, all_of_them: bool, error: str) -> None:
        chosen = self.held() if all_of_them else [data.draw(st.sampled_from(self.held()))]
        for node_id, assignment in chosen:
            self.world.fail(node_id, assignment, error)

    def old_leases(self) -> list[tuple[NodeId, Assignment]]:
        """Leases that ended while the request is somebody else's now: what is said of them is the most dangerous."""
        asks = self.world.oracle.asks
        return [
            (node_id, assignment)
            for node_id, assignment in self.world.given
            if asks[assignment.request.request_id].lease not in (None, assignment.lease_id)
        ]

    @precondition(lambda self: self.world.given)
    @rule(data=st.data(), what=st.sampled_from(["done", "scored", "returned", "failed", "claimed by another"]))
    def somebody_speaks_of_an_old_lease(self, data: st.DataObject, what: str) -> None:
        node_id, assignment = data.draw(st.sampled_from(self.old_leases() or self.world.given[-12:]))
        match what:
            case "done":
                self.world.finish(node_id, assignment)
            case "scored":
                self.world.score(node_id, assignment, 0.25)
            case "returned":
                self.world.give_back(node_id, assignment, 1)
            case "failed":
                self.world.fail(node_id, assignment)
            case _:
                claimed = HeldLease(request_id=assignment.request.request_id, lease_id=assignment.lease_id)
                other = data.draw(node_ids)
                self.world.say(NodeHeartbeat(node_id=other, slots=1, held=(claimed,), step_s=0.01))

    @precondition(lambda self: self.world.said)
    @rule(data=st.data())
    def an_old_message_comes_again(self, data: st.DataObject) -> None:
        self.world.send(data.draw(st.sampled_from(self.world.said[-40:])))

    # ---- trainer ----

    @precondition(lambda self: isinstance(self.world.trainer.order, StartTraining))
    @rule(data=st.data())
    def the_store_has_lost_samples(self, data: st.DataObject) -> None:
        rollout = JobId(str(self.world.trainer.job_id).replace("train_step", "rollout"))
        asks = self.world.oracle.of_job(rollout)
        scored = sorted(ask.request.request_id for ask in asks if ask.state is RequestState.SCORED)
        lost = data.draw(st.lists(st.sampled_from(scored), unique=True)) if scored else []
        self.world.miss_samples(lost)

    @rule(what=st.sampled_from(["starts", "reconnects", "completes", "completes", "fails", "is killed"]))
    def trainer_lives(self, what: str) -> None:
        trainer = self.world.trainer
        match what:
            case "starts" | "reconnects":
                trainer.order = trainer.order if trainer.runs and what == "reconnects" else None
                trainer.runs = True
                self.world.say(TrainerHello(trainer_id=TRAINER, job_id=trainer.job_id))
            case "completes":
                self.world.train()
            case "fails" if trainer.job_id is not None:
                job_id, trainer.order = trainer.job_id, None
                self.world.say(
                    TrainerFailed(trainer_id=TRAINER, job_id=job_id, error_class="TrainingError", error="NaN")
                )
            case "is killed":
                self.world.trainer = Trainer()

    # ---- the end ----

    def teardown(self) -> None:
        """Unless a check failed: all is well from now on, so all jobs must end; and the same events must give the same commands."""
        if not hasattr(self, "world") or not self.world.sound:
            return
        self.world.settle()
        if not self.world.restarts:
            again = ControlCore(CLUSTER)
            for event, now, commands in self.world.log:
                assert again.handle(event, now) == commands


ClusterMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_cluster_does_what_the_oracle_says = ClusterMachine.TestCase


# ---- one run, undisturbed and disturbed -------------------------------------------------------------------------------------------

KILLS = [
    "control",
    "trainer",
    "samples are lost",
    "manifest is lost",
    "s1",
    "s2",
    "r1",
    "s1 is noticed",
    "s2 goes deaf",
    "s1 reconnects",
]


def one_iteration(kills: list[tuple[int, str]]) -> dict[JobId, dict[RequestId, tuple[int, float]]]:
    """Rollout, then training beside exploration and evaluation, with `kills` as (second, what); seed and reward of all samples by job."""
    world = Cluster()
    for node in world.nodes.values():
        world.hello(node, fresh=True)
        world.heartbeat(node)
    world.trainer.runs = True
    world.say(TrainerHello(trainer_id=TRAINER))
    first, *rest = [JobId(f"run-a-{op}-0") for op in ("rollout", "train_step", "explore", "evaluate")]
    world.submit(SPECS[first])
    for second in range(25):
        for _, what in [kill for kill in kills if kill[0] == second]:
            disturb(world, what)
        work_slowly(world)
        if world.core.jobs[first].phase is JobPhase.SUCCEEDED and rest:
            if not world.core.instances.spot_slots:  # without a spot slot nothing would be explored
                world.hello(world.nodes[NodeId("s1")], fresh=True)
                world.heartbeat(world.nodes[NodeId("s1")])
            while rest:  # the plan is fixed here
                world.submit(SPECS[rest.pop(0)])
    world.settle()
    for job_id in rest:
        world.submit(SPECS[job_id])
    world.settle()
    return {
        job_id: {sample.request_id: (sample.seed, sample.reward) for sample in manifest.samples}
        for job_id, manifest in world.manifests.items()
    }


def disturb(world: Cluster, what: str) -> None:
    name, _, how = what.partition(" ")
    match name, how:
        case "control", _:
            world.restart()
        case "trainer", _:
            world.trainer = Trainer(runs=True)
            world.say(TrainerHello(trainer_id=TRAINER))
        case "samples" | "manifest", _:
            asks = world.oracle.of_job(JobId("run-a-rollout-0"))
            world.lost.append([ask.request.request_id for ask in asks][1:] if name == "samples" else [])
        case _, "is noticed":
            world.say(NodeNoticed(node_id=NodeId(name), grace_period_s=2.0))
            for assignment in list(world.nodes[NodeId(name)].held.values()):
                world.give_back(NodeId(name), assignment, 2)
            world.say(NodeLeft(node_id=NodeId(name)))
            world.nodes[NodeId(name)].runs = False
        case _, "goes deaf":
            world.nodes[NodeId(name)].deaf = True
        case _, "reconnects":
            world.hello(world.nodes[NodeId(name)], fresh=not world.nodes[NodeId(name)].runs)
        case _:
            world.nodes[NodeId(name)].runs = False


def work_slowly(world: Cluster) -> None:
    """Every node takes one thing a second one stage further, so that a kill finds work in every stage."""
    world.tend()
    for node in world.nodes.values():
        world.heartbeat(node)
        if node.paused or not node.runs:
            continue
        for assignment in list(node.held.values())[:1]:
            if assignment.lease_id in node.finished:
                world.score(node.node_id, assignment, reward_of(assignment.request))
                world.heartbeat(node)
            else:
                world.finish(node.node_id, assignment)
        world.pull(node, "g", 2)


@pytest.fixture(scope="module")
def undisturbed() -> dict[JobId, dict[RequestId, tuple[int, float]]]:
    return one_iteration([])


def test_an_undisturbed_run_makes_every_sample(undisturbed):
    assert {job_id: len(samples) for job_id, samples in undisturbed.items()} == {
        "run-a-rollout-0": PROMPTS * GROUP,
        "run-a-explore-0": 3,  # one explored prompt of two, d = 3
        "run-a-evaluate-0": PAIRS,
    }


@settings(max_examples=60, deadline=None)
@example(kills=[(0, "s1"), (0, "s2")])
@given(
    kills=st.lists(st.tuples(st.integers(0, 20), st.sampled_from(KILLS)), max_size=8).filter(
        lambda kills: (
            [what for _, what in kills].count("trainer") <= TRAINER_RESTARTS_MAX
            and sum("lost" in what for _, what in kills) <= REDONE_MAX
        )
    )
)
def test_a_disturbed_run_ends_in_the_same_samples_as_an_undisturbed_one(undisturbed, kills):
    assert one_iteration(kills) == undisturbed
