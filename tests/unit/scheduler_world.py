"""A cluster in one thread for tests of the control core: nodes, trainer, client and shell, and an oracle that watches.

Every message may be late, repeated or lost, every process may die at any time. `Oracle` is written from the rules alone (paper §4.5) and
shares no code with the core: it says what state every request must be in, who may hold it, what it must resume from and what a manifest
may contain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field

import msgspec

from spot_runtime.config import ClusterConfig, RunSettings
from spot_runtime.messages import (
    Assignment,
    AssignWork,
    DropRequests,
    EncodePrompts,
    GenerationRequest,
    HeldLease,
    JobSpec,
    Message,
    NodeHeartbeat,
    NodeHello,
    NodeLeft,
    NodeNoticed,
    PauseNode,
    PromptsEncoded,
    PullWork,
    Refused,
    RequestFailed,
    RequestReturned,
    ResumeNode,
    ResumePoint,
    SampleDone,
    SampleScored,
    StartTraining,
    StopTraining,
    TrainerFailed,
    TrainerHeartbeat,
    TrainerHello,
    TrainingFinished,
    WelcomeNode,
)
from spot_runtime.scheduler.commands import Command, ReadJobInputs, SendToNode, SendToTrainer, WriteManifest
from spot_runtime.scheduler.core import ControlCore
from spot_runtime.scheduler.events import (
    ControlAwoke,
    JobInputsRead,
    JobPolled,
    JobSubmitted,
    ManifestWritten,
    TimePassed,
)
from spot_runtime.scheduler.expansion import JobInputs, PromptRow
from spot_runtime.scheduler.jobs import JobRecord
from spot_runtime.scheduler.queue import LOSSES_PER_ATTEMPT
from spot_runtime.scheduler.requests import RequestRecord
from spot_runtime.types import (
    JobId,
    JobPhase,
    LeaseId,
    Manifest,
    NodeId,
    Op,
    PolicyRef,
    Pool,
    RequestId,
    RequestState,
    RunId,
)

LEASE_S = 4.0
ATTEMPTS_MAX = 2
PROMPTS = GROUP = PAIRS = 2
STEPS = 4
CLUSTER = ClusterConfig(
    lease_s=LEASE_S, heartbeat_s=1.0, max_attempts=ATTEMPTS_MAX, poll_deadline_s=86_400, run_lease_s=40_000
)
POOL_OF = {NodeId("s1"): Pool.SPOT, NodeId("s2"): Pool.SPOT, NodeId("r1"): Pool.RESERVED}
TRAINER = "t1"
POLICY = PolicyRef(1, "policies/1", "d1")


ITERATIONS = {"run-a": 3, "run-b": 1}


def job_spec(run: str, op: Op, iteration: int = 0) -> JobSpec:
    run_settings = RunSettings.parse(
        {
            "run_id": run,
            "iterations": ITERATIONS[run],
            "resolution": 64,
            "model": "model",
            "store": "memory://x",
            "train_prompts_key": "t",
            "validation_prompts_key": "v",
            "config": {
                "sampling": {"num_steps": STEPS, "sde_window_stop": 2, "sde_window_size": 1},
                "grpo": {"prompts_per_iteration": PROMPTS, "group_size": GROUP, "optimizer_steps": 1},
                "exploration": {"max_sequences": 3, "unexplored_prompts": 1, "calibrated_train_s": 1000.0},
                "evaluation": {"pairs": PAIRS},
            },
        }
    )
    return JobSpec(
        job_id=JobId(f"{run}-{op.value}-{iteration}"),
        run_id=RunId(run),
        op=op,
        iteration=iteration,
        policy=POLICY,
        settings_json=run_settings.model_dump_json(),
        manifest_key=f"runs/{run}/manifests/{run}-rollout-{iteration}.json" if op is Op.TRAIN_STEP else "",
    )


SPECS = {
    spec.job_id: spec
    for spec in (
        job_spec("run-a", Op.ROLLOUT),
        job_spec("run-a", Op.TRAIN_STEP),
        job_spec("run-a", Op.EXPLORE),
        job_spec("run-a", Op.EVALUATE),
        job_spec("run-b", Op.ROLLOUT),
        job_spec("run-b", Op.TRAIN_STEP),
        job_spec("run-b", Op.EXPLORE),
    )
}
ROWS = tuple(PromptRow(prompt_id=f"p{i}", prompt=f"prompt {i}", row_json="{}") for i in range(6))
INPUTS = JobInputs(train_rows=ROWS, validation_rows=ROWS[:PAIRS])
CLOSED = {RequestState.SCORED, RequestState.FAILED, RequestState.ABORTED}
HELD = {RequestState.IN_FLIGHT, RequestState.DONE}


# ---- the oracle -------------------------------------------------------------------------------------------------------------------


@dataclass
class Ask:
    """One request as the rules say it must be."""

    request: GenerationRequest
    state: RequestState = RequestState.PENDING
    lease: LeaseId | None = None
    node: NodeId | None = None
    renewed: float = 0.0
    failures: int = 0
    losses: int = 0
    resume: ResumePoint | None = None
    reward: float = 0.0


@dataclass
class Seen:
    """One node as the rules say control must see it."""

    draining: bool = False
    at: float = 0.0


@dataclass
class Oracle:
    """What must hold, from the messages alone."""

    asks: dict[RequestId, Ask] = field(default_factory=dict)
    nodes: dict[NodeId, Seen] = field(default_factory=dict)
    pulls: dict[tuple[NodeId, str], tuple[int, int]] = field(default_factory=dict)
    """Room and number of what each group asks for."""
    answers: dict[tuple[NodeId, str], tuple[int, set[LeaseId]]] = field(default_factory=dict)
    """Number of each group's newest answered pull, and the leases that it got."""
    due_again: dict[tuple[NodeId, str], set[LeaseId]] = field(default_factory=dict)
    """What a group that asks again must be told again, in this event."""
    leases: set[LeaseId] = field(default_factory=set)
    released: set[JobId] = field(default_factory=set)
    training: bool = False
    training_run: RunId | None = None
    """The run whose training began last."""
    lapsed: set[RunId] = field(default_factory=set)
    """Runs that nobody polls any more."""
    gone_samples: frozenset[RequestId] = frozenset()
    """What the trainer missed, in this event."""
    now: float = 0.0

    def mine(self, request_id: RequestId, lease: LeaseId) -> Ask | None:
        ask = self.asks.get(request_id)
        return ask if ask and ask.lease == lease and ask.state in HELD else None

    def of_job(self, job_id: JobId) -> list[Ask]:
        return [ask for ask in self.asks.values() if ask.request.job_id == job_id]

    def let_go(self, ask: Ask, state: RequestState) -> None:
        ask.state, ask.lease = state, None

    def again(self, ask: Ask, *, failed: bool = False, lost: bool = False) -> None:
        ask.failures += failed
        ask.losses += lost
        hopeless = ask.failures >= ATTEMPTS_MAX or ask.losses >= LOSSES_PER_ATTEMPT * ATTEMPTS_MAX
        self.let_go(ask, RequestState.FAILED if hopeless else RequestState.PENDING)

    def drop_pulls(self, node_id: NodeId) -> None:
        self.pulls = {key: asked for key, asked in self.pulls.items() if key[0] != node_id}

    def gone(self, node_id: NodeId, keep: frozenset[LeaseId] = frozenset()) -> None:
        for ask in self.asks.values():
            if ask.node == node_id and ask.state in HELD and ask.lease not in keep:
                self.again(ask, lost=True)
        self.drop_pulls(node_id)
        if not keep:
            self.answers = {key: answer for key, answer in self.answers.items() if key[0] != node_id}

    def renew(self, node_id: NodeId, held: tuple[HeldLease, ...], now: float) -> set[tuple[NodeId, RequestId]]:
        strangers: set[tuple[NodeId, RequestId]] = set()
        for lease in held:
            ask = self.mine(lease.request_id, lease.lease_id)
            if ask and ask.node == node_id:
                ask.renewed = now
            else:
                strangers.add((node_id, lease.request_id))
        return strangers

    def take(self, event: object, now: float) -> set[tuple[NodeId, RequestId]]:
        """The event's effect; returns who must be told to drop what."""
        self.now, self.due_again, self.gone_samples = now, {}, frozenset()
        match event:
            case TrainerFailed():
                self.gone_samples = frozenset(event.lost)
            case NodeHello():
                self.nodes[event.node_id] = Seen(at=now)
                self.gone(event.node_id, frozenset(lease.lease_id for lease in event.held))
                return self.renew(event.node_id, event.held, now)
            case NodeHeartbeat() if event.node_id in self.nodes:
                self.nodes[event.node_id].at = now
                return self.renew(event.node_id, event.held, now)
            case NodeNoticed() if event.node_id in self.nodes:
                self.nodes[event.node_id] = Seen(draining=True, at=now)
                self.drop_pulls(event.node_id)
            case NodeLeft() if event.node_id in self.nodes:
                del self.nodes[event.node_id]
                self.gone(event.node_id)
            case PullWork() if event.node_id in self.nodes and not self.nodes[event.node_id].draining:
                self.asks_for(event)
            case SampleDone() | SampleScored() | RequestReturned() | RequestFailed():
                if ask := self.mine(event.request_id, event.lease_id):
                    self.report(ask, event)
            case ControlAwoke():
                for seen in self.nodes.values():
                    seen.at = now
                for ask in self.asks.values():
                    ask.renewed = now
            case TimePassed():
                self.expire(now)
        return set()

    def asks_for(self, pull: PullWork) -> None:
        """A question that was answered has its answer still, unless the node does not hold any of that."""
        key = (pull.node_id, pull.group_id)
        number, leases = self.answers.get(key, (0, set()))
        held = [ask for ask in self.asks.values() if ask.lease in leases and ask.node == pull.node_id]
        if pull.room <= 0:
            self.pulls.pop(key, None)
        elif pull.number == number and held:
            self.due_again[key] = {ask.lease for ask in held if ask.state is RequestState.IN_FLIGHT}
        elif pull.number >= number:
            self.pulls[key] = (pull.room, pull.number)

    def report(self, ask: Ask, event: SampleDone | SampleScored | RequestReturned | RequestFailed) -> None:
        match event:
            case SampleDone() if ask.state is RequestState.IN_FLIGHT:
                if event.policy != ask.request.policy:
                    self.again(ask, failed=True)
                    return
                ask.state = RequestState.DONE
                ask.resume = ResumePoint(denoising_step=STEPS, commit_key=event.sample_key)
            case SampleScored() if ask.state is RequestState.DONE:
                ask.reward = event.reward
                self.let_go(ask, RequestState.SCORED)
            case RequestReturned():
                if event.commit_key:
                    ask.resume = ResumePoint(denoising_step=event.denoising_step, commit_key=event.commit_key)
                self.again(ask)
            case RequestFailed():
                lost = event.error_class in ("LostEmbeddingError", "LostPolicyError")
                self.again(ask, failed=not lost, lost=lost)

    def expire(self, now: float) -> None:
        for node_id in [node_id for node_id, seen in self.nodes.items() if now - seen.at > LEASE_S]:
            del self.nodes[node_id]
            self.gone(node_id)
        for ask in self.asks.values():
            if ask.state in HELD and now - ask.renewed > LEASE_S:
                self.again(ask, lost=True)

    def abort(self, job_id: JobId) -> set[tuple[NodeId, RequestId]]:
        open_asks = [ask for ask in self.of_job(job_id) if ask.state not in CLOSED]
        held = {(ask.node, ask.request.request_id) for ask in open_asks if ask.state in HELD}
        for ask in open_asks:
            self.let_go(ask, RequestState.ABORTED)
        return held

    def revive(self, job_id: JobId) -> None:
        """A job that is admitted again keeps what was scored; the rest starts over."""
        for ask in self.of_job(job_id):
            if ask.state in (RequestState.FAILED, RequestState.ABORTED):
                self.asks[ask.request.request_id] = Ask(ask.request)

    def draw_again(self, job_id: JobId) -> None:
        """What the store lost of a job's samples starts over from the first step."""
        for ask in self.of_job(job_id):
            if ask.request.request_id in self.gone_samples and ask.state is RequestState.SCORED:
                ask.resume = None
                self.again(ask, lost=True)

    def may_take(self, node_id: NodeId, request: GenerationRequest) -> bool:
        """The trainer has the reserved GPUs to itself; exploration is spot's until it is done, evaluation while there is spot."""
        if POOL_OF[node_id] is Pool.SPOT:
            return True
        if self.training:
            return False
        if request.op is Op.ROLLOUT:
            return True
        if request.job_id in self.released:
            return True
        spot = any(POOL_OF[n] is Pool.SPOT for n, seen in self.nodes.items() if not seen.draining)
        return request.op is Op.EVALUATE and not spot

    def rank(self, request: GenerationRequest) -> int:
        """Rollout before leftover exploration before exploration before evaluation."""
        if request.op is Op.EXPLORE:
            return 1 if request.job_id in self.released else 2
        return {Op.ROLLOUT: 0, Op.EVALUATE: 3}[request.op]

    def assign(self, node_id: NodeId, work: AssignWork, ready: set[JobId], now: float) -> None:
        """Checks one answer to one pull, then books it."""
        seen = self.nodes.get(node_id)
        assert seen is not None, f"work for {node_id}, which is not there"
        assert not seen.draining, f"work for {node_id}, which is draining"
        again = self.due_again.pop((node_id, work.group_id), None)
        if again is not None:
            assert {assignment.lease_id for assignment in work.assignments} == again
            assert all(self.asks[a.request.request_id].lease == a.lease_id for a in work.assignments)
            return
        room, number = self.pulls.pop((node_id, work.group_id), (0, 0))
        assert 1 <= len(work.assignments) <= room
        assert work.number == number
        self.answers[node_id, work.group_id] = (number, {assignment.lease_id for assignment in work.assignments})
        first = work.assignments[0].request
        waiting = [ask.request for ask in self.asks.values() if ask.state is RequestState.PENDING]
        open_to = [r for r in waiting if r.job_id in ready and self.may_take(node_id, r)]
        assert self.rank(first) == min(self.rank(request) for request in open_to)
        for assignment in work.assignments:
            ask = self.asks[assignment.request.request_id]
            assert ask.state is RequestState.PENDING, f"{ask.request.request_id} is {ask.state}"
            assert ask.request == assignment.request
            assert ask.request.job_id in ready
            assert self.may_take(node_id, ask.request)
            assert (ask.request.params, ask.request.policy) == (first.params, first.policy)
            assert assignment.lease_id not in self.leases, f"lease {assignment.lease_id} was given before"
            assert assignment.resume == ask.resume
            self.leases.add(assignment.lease_id)
            ask.state, ask.lease, ask.node, ask.renewed = RequestState.IN_FLIGHT, assignment.lease_id, node_id, now

    def nothing_waits_beside_an_idle_group(self, ready: set[JobId]) -> None:
        waiting = [
            a.request for a in self.asks.values() if a.state is RequestState.PENDING and a.request.job_id in ready
        ]
        for node_id, group_id in self.pulls:
            idle = [r.request_id for r in waiting if self.may_take(node_id, r)]
            assert not idle, f"{node_id}/{group_id} waits while it may take {idle}"

    def check_manifest(self, manifest: Manifest) -> None:
        asks = self.of_job(manifest.job_id)
        assert all(ask.state in CLOSED for ask in asks)
        assert not any(ask.state is RequestState.ABORTED for ask in asks)
        failed = {ask.request.prompt_id for ask in asks if ask.state is RequestState.FAILED}
        assert set(manifest.failed_prompt_ids) == failed
        whole = manifest.op is Op.ROLLOUT
        expected = {
            ask.request.request_id: ask.reward
            for ask in asks
            if ask.state is RequestState.SCORED and not (whole and ask.request.prompt_id in failed)
        }
        assert {sample.request_id: sample.reward for sample in manifest.samples} == expected
        assert len(manifest.samples) == len(expected)
        groups: dict[str, int] = defaultdict(int)
        for sample in manifest.samples:
            groups[sample.prompt_id] += 1
        assert not whole or set(groups.values()) <= {GROUP}, f"half a group: {dict(groups)}"


# ---- the processes around control -------------------------------------------------------------------------------------------------


@dataclass
class Node:
    """A node process: what it holds, and whether it runs and hears."""

    node_id: NodeId
    runs: bool = False
    deaf: bool = False
    held: dict[RequestId, Assignment] = field(default_factory=dict)
    finished: set[LeaseId] = field(default_factory=set)
    asked: int = 0
    paused: bool = False
    pause: int = 0

    def hear(self, message: Message) -> None:
        match message:
            case AssignWork():
                self.held |= {assignment.request.request_id: assignment for assignment in message.assignments}
            case DropRequests():
                for request_id in message.request_ids:
                    self.held.pop(request_id, None)
            case WelcomeNode():
                self.paused = message.paused
                self.pause = message.pause if message.paused else self.pause
            case PauseNode():
                self.paused, self.pause = True, message.number
            case ResumeNode():
                self.paused = False
            case Refused():
                self.runs = True
            case _:
                raise AssertionError(f"a node got {message}")

    @property
    def leases(self) -> tuple[HeldLease, ...]:
        return tuple(HeldLease(request_id=rid, lease_id=a.lease_id) for rid, a in self.held.items())


@dataclass
class Trainer:
    """The trainer process: whether it runs, and the order it is at work on."""

    runs: bool = False
    order: EncodePrompts | StartTraining | None = None

    @property
    def job_id(self) -> JobId | None:
        match self.order:
            case EncodePrompts():
                return self.order.job_id
            case StartTraining():
                return self.order.job.job_id
        return None


class Cluster:
    """Control's core, its shell with a journal, and all its peers. Every event goes through `send`, which consults the oracle."""

    def __init__(self) -> None:
        self.now = 100.0
        self.oracle = Oracle()
        self.core = ControlCore(CLUSTER)
        self.nodes = {node_id: Node(node_id) for node_id in POOL_OF}
        self.trainer = Trainer()
        self.reads: list[JobSpec] = []
        self.writes: list[WriteManifest] = []
        self.said: list[Message] = []
        self.given: list[tuple[NodeId, Assignment]] = []
        self.manifests: dict[JobId, Manifest] = {}
        self.journal_jobs: dict[JobId, bytes] = {}
        self.journal_requests: dict[RequestId, bytes] = {}
        self.log: list[tuple[object, float, list[Command]]] = []
        self.restarts = 0
        self.lost: list[list[RequestId]] = []
        """Samples that the next trainings will miss."""
        self.sound = True

    # ---- one event ----

    def send(self, event: object) -> None:
        self.sound = False
        before = {job_id: job.phase for job_id, job in self.core.jobs.items()}
        owed = self.oracle.take(event, self.now)
        commands = self.core.handle(event, self.now)
        self.log.append((event, self.now, [deepcopy(c) if isinstance(c, WriteManifest) else c for c in commands]))
        owed |= self._follow_jobs(before)
        told = self._carry_out(commands)
        assert owed <= told, f"nobody told {owed - told}"
        assert not any(self.oracle.due_again.values()), "a question that was asked again has no answer"
        self.check()

    def _follow_jobs(self, before: dict[JobId, JobPhase]) -> set[tuple[NodeId, RequestId]]:
        """What the phases of jobs mean for their requests; returns what nodes must be told to drop."""
        owed: set[tuple[NodeId, RequestId]] = set()
        for job_id, job in self.core.jobs.items():
            was = before.get(job_id)
            if job.phase in (JobPhase.FAILED, JobPhase.CANCELLED) and was is not job.phase:
                owed |= self.oracle.abort(job_id)
            if job.job.op is Op.TRAIN_STEP and job.phase.is_final and was is not job.phase:
                self.oracle.released |= {
                    other.job_id for other in self._beside(job) if other.phase is not JobPhase.ADMITTING
                }
            if was is JobPhase.SUCCEEDED and not job.phase.is_final:
                self.oracle.draw_again(job_id)
            if was is JobPhase.ADMITTING and job.job.op is not Op.TRAIN_STEP:
                self._meet_requests(job)
            if job.job.op is Op.TRAIN_STEP and job.phase is JobPhase.RUNNING and was is not JobPhase.RUNNING:
                self._begins_to_train(job.job.run_id)

        trains = {job_id for job_id, job in self.core.jobs.items() if job.job.op is Op.TRAIN_STEP}
        self.oracle.training = any(self.core.jobs[job_id].phase is JobPhase.RUNNING for job_id in trains)
        return owed

    def _begins_to_train(self, run_id: RunId) -> None:
        """One run after another: the last one has all its iterations, was cancelled or is not polled any more."""
        last, self.oracle.training_run = self.oracle.training_run, run_id
        if last in (None, run_id):
            return
        jobs = [job for job in self.core.jobs.values() if job.job.run_id == last]
        ended = [job.job.iteration + 1 for job in jobs if job.job.op is Op.TRAIN_STEP and job.phase.is_final]
        is_over = ITERATIONS[last] in ended or any(job.phase is JobPhase.CANCELLED for job in jobs)
        assert is_over or last in self.oracle.lapsed, f"{run_id} trains while {last} has the trainer"

    def _beside(self, job: JobRecord) -> list[JobRecord]:
        """Jobs of the same iteration of the same run."""
        key = (job.job.run_id, job.job.iteration)
        return [other for other in self.core.jobs.values() if (other.job.run_id, other.job.iteration) == key]

    def _meet_requests(self, job: JobRecord) -> None:
        """Requests are made when a job is admitted: so many, in whole groups, and those that were scored before stay scored."""
        if job.phase in (JobPhase.ADMITTING, JobPhase.FAILED, JobPhase.CANCELLED):
            return
        self.oracle.revive(job.job_id)
        self.oracle.released.discard(job.job_id)
        if any(other.job.op is Op.TRAIN_STEP and other.phase.is_final for other in self._beside(job)):
            self.oracle.released.add(job.job_id)
        groups: dict[str, int] = defaultdict(int)
        for record in self.core.queue.of_job(job.job_id):
            self.oracle.asks.setdefault(record.request_id, Ask(record.request))
            groups[record.request.prompt_id] += 1
        plan = job.plan
        if job.job.op is Op.ROLLOUT:
            assert sorted(groups.values()) == [GROUP] * PROMPTS
        elif job.job.op is Op.EVALUATE:
            assert sum(groups.values()) == PAIRS
        else:
            assert groups == dict.fromkeys(plan.explored_prompt_ids, plan.sequences)

    def _carry_out(self, commands: list[Command]) -> set[tuple[NodeId, RequestId]]:
        """Does what control orders; returns who was told to drop what."""
        dropped: set[tuple[NodeId, RequestId]] = set()
        ready = {job_id for job_id, job in self.core.jobs.items() if job.phase is JobPhase.RUNNING}
        for command in commands:
            match command:
                case SendToNode():
                    if isinstance(command.message, AssignWork):
                        self.oracle.assign(command.node_id, command.message, ready, self.now)
                        self.given += [(command.node_id, assignment) for assignment in command.message.assignments]
                    if isinstance(command.message, DropRequests):
                        dropped |= {(command.node_id, request_id) for request_id in command.message.request_ids}
                    node = self.nodes[command.node_id]
                    if node.runs and not node.deaf:
                        node.hear(command.message)
                case SendToTrainer():
                    self._order(command)
                case ReadJobInputs():
                    self.reads.append(command.job)
                case WriteManifest():
                    self.oracle.check_manifest(command.manifest)
                    self.manifests[command.job_id] = command.manifest
                    self.writes.append(command)
        return dropped

    def _order(self, command: SendToTrainer) -> None:
        if not self.trainer.runs:
            return
        match command.message:
            case StopTraining():
                if self.trainer.job_id == command.message.job_id:
                    self.trainer.order = None
            case EncodePrompts() | StartTraining():
                self.trainer.order = command.message

    # ---- what must hold ----

    def check(self) -> None:
        queue = self.core.queue
        assert {rid: ask.state for rid, ask in self.oracle.asks.items()} == {
            rid: record.state for rid, record in queue.records.items()
        }
        held: dict[NodeId, set[RequestId]] = defaultdict(set)
        for request_id, ask in self.oracle.asks.items():
            record = queue.records[request_id]
            assert record.lease_id == ask.lease, request_id
            assert record.resume == ask.resume, request_id
            assert (record.failures, record.losses) == (ask.failures, ask.losses), request_id
            if ask.state in HELD:
                assert record.node_id == ask.node, request_id
                held[ask.node].add(request_id)
            if ask.state is RequestState.SCORED:
                assert record.reward == ask.reward, request_id
        assert queue.held == held
        for job_id, claim in queue.claims.items():
            states = [ask.state for ask in self.oracle.of_job(job_id)]
            assert claim.pending == states.count(RequestState.PENDING), job_id
            assert claim.unfinished == sum(state not in CLOSED for state in states), job_id
        assert set(self.core.instances.pools()) == set(self.oracle.nodes)
        ready = {job_id for job_id, job in self.core.jobs.items() if job.phase is JobPhase.RUNNING}
        self.oracle.nothing_waits_beside_an_idle_group(ready)
        for node in self.nodes.values():
            if (
                POOL_OF[node.node_id] is Pool.RESERVED
                and node.runs
                and not node.deaf
                and node.node_id in self.oracle.nodes
            ):
                assert node.paused == self.oracle.training, f"{node.node_id} is {'' if node.paused else 'not '}paused"
        self._persist()
        self.sound = True

    def _persist(self) -> None:
        """What the shell does after every turn; only what the core calls changed is written."""
        for job_id in self.core.dirty_jobs & self.core.jobs.keys():
            self.journal_jobs[job_id] = msgspec.msgpack.encode(self.core.jobs[job_id])
        for request_id in self.core.queue.dirty & self.core.queue.records.keys():
            self.journal_requests[request_id] = msgspec.msgpack.encode(self.core.queue.records[request_id])
        self.core.dirty_jobs.clear()
        self.core.queue.dirty.clear()

    # ---- control dies and comes back ----

    def restart(self) -> None:
        self.sound = False
        self.restarts += 1
        self.reads, self.writes = [], []
        self.core = ControlCore(CLUSTER)
        self.oracle.nodes, self.oracle.pulls, self.oracle.now = {}, {}, self.now
        requests: dict[JobId, list[RequestRecord]] = defaultdict(list)
        for blob in self.journal_requests.values():
            record = msgspec.msgpack.decode(blob, type=RequestRecord)
            requests[record.request.job_id].append(record)
        jobs = [msgspec.msgpack.decode(blob, type=JobRecord) for blob in self.journal_jobs.values()]
        for job in sorted(jobs, key=lambda job: job.sequence):
            self.core.restore(job, requests[job.job_id], self.now)
        for ask in self.oracle.asks.values():
            ask.renewed = self.now
        self._carry_out(self.core.resume(self.now))
        self.check()

    # ---- what peers say ----

    def say(self, message: Message) -> None:
        self.said.append(message)
        self.send(message)

    def hello(self, node: Node, fresh: bool) -> None:
        node.runs, node.deaf = True, False
        if fresh:
            node.held, node.finished, node.asked = {}, set(), 0
        self.say(NodeHello(node_id=node.node_id, pool=POOL_OF[node.node_id], slots=1, held=node.leases))

    def heartbeat(self, node: Node) -> None:
        if node.runs:
            beat = NodeHeartbeat(
                node_id=node.node_id, slots=1, held=node.leases, step_s=0.01, pause=node.pause, paused=node.paused
            )
            self.say(beat)

    def pull(self, node: Node, group: str, room: int, *, again: bool = False) -> None:
        """A new question, or the last one once more, if there was one: questions are numbered from 1."""
        if node.runs:
            node.asked += not again or not node.asked
            self.say(PullWork(node_id=node.node_id, group_id=group, room=room, number=node.asked))

    def finish(self, node_id: NodeId, assignment: Assignment, policy: PolicyRef = POLICY) -> None:
        self.nodes[node_id].finished.add(assignment.lease_id)
        self.say(
            SampleDone(
                node_id=node_id,
                lease_id=assignment.lease_id,
                request_id=assignment.request.request_id,
                sample_key=f"samples/{assignment.lease_id}",
                sample_digest="d",
                policy=policy,
                started_s=self.now - 1,
                finished_s=self.now,
            )
        )

    def score(self, node_id: NodeId, assignment: Assignment, reward: float) -> None:
        request_id, lease_id = assignment.request.request_id, assignment.lease_id
        self.say(
            SampleScored(node_id=node_id, lease_id=lease_id, request_id=request_id, reward=reward, correct=reward > 0.5)
        )

    def give_back(self, node_id: NodeId, assignment: Assignment, denoising_step: int) -> None:
        request_id, lease_id = assignment.request.request_id, assignment.lease_id
        self.nodes[node_id].held.pop(request_id, None)
        self.say(
            RequestReturned(
                node_id=node_id,
                lease_id=lease_id,
                request_id=request_id,
                denoising_step=denoising_step,
                commit_key=f"commits/{lease_id}" if denoising_step else "",
            )
        )

    def fail(self, node_id: NodeId, assignment: Assignment, error_class: str = "RewardError") -> None:
        request_id, lease_id = assignment.request.request_id, assignment.lease_id
        self.nodes[node_id].held.pop(request_id, None)
        self.say(
            RequestFailed(
                node_id=node_id, lease_id=lease_id, request_id=request_id, error_class=error_class, error="no answer"
            )
        )

    def train(self) -> None:
        """The trainer completes its order."""
        job_id = self.trainer.job_id
        if isinstance(self.trainer.order, EncodePrompts):
            self.trainer.order = None
            self.say(PromptsEncoded(trainer_id=TRAINER, job_id=job_id))
        elif job_id is not None and self.lost:
            self.miss_samples(self.lost.pop())
        elif job_id is not None:
            self.trainer.order = None
            self.say(TrainingFinished(trainer_id=TRAINER, job_id=job_id, policy=POLICY, metrics={}))

    def miss_samples(self, request_ids: Iterable[RequestId]) -> None:
        """The trainer cannot read these samples of the rollouts that it should train on."""
        job_id, self.trainer.order = self.trainer.job_id, None
        failed = TrainerFailed(
            trainer_id=TRAINER,
            job_id=job_id,
            error_class="LostSamplesError",
            error="samples are gone",
            lost=tuple(request_ids),
        )
        self.say(failed)

    # ---- a cluster that works ----

    def submit(self, job: JobSpec) -> None:
        self.send(JobSubmitted(job=job))
        while self.reads:
            self.send(JobInputsRead(job_id=self.reads.pop(0).job_id, inputs=INPUTS))

    def roll_out_and_train(self) -> None:
        """Up to where the trainer is at work on what was rolled out."""
        self.submit(SPECS[JobId("run-a-rollout-0")])
        self.settle()
        self.submit(SPECS[JobId("run-a-train_step-0")])
        for node in self.nodes.values():
            self.heartbeat(node)
        assert isinstance(self.trainer.order, StartTraining)

    def settle(self, rounds: int = 80) -> None:
        """All processes run and hear: every job that is open must come to an end."""
        for node in self.nodes.values():
            self.hello(node, fresh=False)
        self.trainer.runs = True
        self.say(TrainerHello(trainer_id=TRAINER, job_id=self.trainer.job_id))
        for _ in range(rounds):
            if all(job.phase.is_final for job in self.core.jobs.values()):
                break
            self._work_for_a_second()
        self._let_lapse()
        stuck = {job_id: job.phase for job_id, job in self.core.jobs.items() if not job.phase.is_final}
        assert not stuck
        assert all(ask.state in CLOSED for ask in self.oracle.asks.values())

    def _let_lapse(self) -> None:
        """A run that has nothing to do any more is not polled: whoever waits for it goes on once its lease has lapsed."""
        waiting = {job.job.run_id for job in self.core.jobs.values() if not job.phase.is_final}
        if not waiting or self.oracle.training_run in waiting:
            return
        self.oracle.lapsed.add(self.oracle.training_run)
        for _ in range(int(CLUSTER.run_lease_s / 1000) + 5):
            self.now += 1000.0
            for job_id in [job_id for job_id, job in self.core.jobs.items() if job.job.run_id in waiting]:
                self.send(JobPolled(job_id=job_id))
            self._work_for_a_second()

    def _work_for_a_second(self) -> None:
        self.tend()
        for node in self.nodes.values():
            self.heartbeat(node)
            for assignment in [] if node.paused else list(node.held.values()):
                self.finish(node.node_id, assignment)
                self.score(node.node_id, assignment, reward_of(assignment.request))
            if not node.paused:
                self.pull(node, "g", 2)

    def tend(self) -> None:
        """A second passes; shell and trainer do their work, and nodes that control lost say hello."""
        self.now += 1.0
        self.send(TimePassed())
        while self.reads:
            self.send(JobInputsRead(job_id=self.reads[0].job_id, inputs=INPUTS))
            self.reads.pop(0)
        while self.writes:
            self.send(ManifestWritten(job_id=self.writes[0].job_id, key=self.writes[0].key))
            self.writes.pop(0)
        if self.trainer.runs:
            self.say(TrainerHeartbeat(trainer_id=TRAINER, job_id=self.trainer.job_id))
            self.train()
        for node in self.nodes.values():
            if node.runs and node.node_id not in self.core.instances.pools():
                self.hello(node, fresh=False)


def reward_of(request: GenerationRequest) -> float:
    """A sample is a function of its seed, and so is its reward."""
    return request.seed % 97 / 97
