"""The persistent scheduler of one machine (paper §4.4.1): its workers, the requests in flight and their denoising steps.

Owns which request steps on which worker, when to ask for more, when to commit, and the drain on a notice. Never touches latents: they lie
in the arena, so that the death of a worker costs at most the denoising step in hand. Today a group is one worker and has its id.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

from spot_runtime.messages import (
    RESIDENT_POLICIES_MAX,
    Assignment,
    AssignWork,
    DecodeSamples,
    DenoiseStep,
    DropRequests,
    HeldLease,
    NodeHeartbeat,
    NodeHello,
    NodeLeft,
    NodeNoticed,
    PauseNode,
    PolicyLoaded,
    PullWork,
    Refused,
    RequestCommitted,
    RequestFailed,
    RequestReturned,
    ResumeNode,
    SampleDone,
    SampleScored,
    SamplesDecoded,
    StepDone,
    StepItem,
    WelcomeNode,
    WorkerFailed,
    WorkerReady,
)
from spot_runtime.node.commands import (
    AdmitTo,
    BindPolicy,
    Command,
    EndNode,
    FailNode,
    FetchInputs,
    Forget,
    Judge,
    KillWorker,
    SendToControl,
    SendToWorker,
    StartWorker,
    StoreProgress,
    StoreSample,
)
from spot_runtime.node.drain import last_word_s, plan_drain
from spot_runtime.node.events import (
    AttemptFailed,
    Fact,
    InputsFetched,
    NoticeReceived,
    ProgressStored,
    SampleJudged,
    SampleStored,
    TimePassed,
    WorkerDied,
)
from spot_runtime.node.flight import Flight, FlightEvent, Stage
from spot_runtime.node.pace import Pace
from spot_runtime.types import NodeId, PolicyRef, Pool, RequestId, WorkerId

PREFETCH_STEPS = 2
"""A request with so few denoising steps left no longer counts against a batch, so its successor is fetched in time."""
INTERRUPTIONS_MAX = 3
"""A request whose worker died so often under it is reported as failed: it may be what kills them."""
PULL_AGAIN_S = 5.0
"""An unanswered pull, or a result without receipt, is said again: the other side may have restarted."""
FAILED_STARTS_MAX = 3
"""Processes of one worker that may end before they are ready; then the node ends with the last one's error."""
RESPAWN_S = 1.0
"""Wait before a worker is started again, times the starts that failed."""
COMMIT_SHARE = 0.05
"""Share of its stepping that a node may keep the store busy with commits in the background, where nobody says how often."""
PROBE_S = 60.0
"""Where nobody says how often, a commit is made after so long anyway: it shows what commits cost by now."""
DECAY = 0.98
"""Weight that older steps keep in the measured step time, one batch later."""

NodeEvent = (
    Fact
    | WelcomeNode
    | AssignWork
    | DropRequests
    | PauseNode
    | ResumeNode
    | Refused
    | WorkerReady
    | PolicyLoaded
    | StepDone
    | SamplesDecoded
    | WorkerFailed
)


class WorkerState(StrEnum):
    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"


@dataclass
class Worker:
    """One slot's process. `batch` is what its outstanding command works on, with the arena slots that it may write until it answers;
    `policies` what it keeps bound, least recently used first, `failed_starts` how often its process ended before it was ready,
    `is_cached` whether the batch has step caches: all of it or none.
    """

    worker_id: WorkerId
    state: WorkerState = WorkerState.STARTING
    policies: OrderedDict[PolicyRef, None] = field(default_factory=OrderedDict)
    batch: tuple[tuple[RequestId, int], ...] = ()
    is_cached: bool = False
    seq: int = 0
    since_s: float = 0.0
    pulled_room: int = 0
    pulled_s: float = 0.0
    failed_starts: int = 0


class NodeCore:
    """State of one machine. `free_slots`, the slots of `flights` and those that a batch may still write partition the arena.

    Every request that was assigned is reported, returned or failed exactly once, unless control drops it first. On a notice all of that is
    said, and NodeLeft, before the grace period ends; then `ended` is set and nothing more is done.
    """

    def __init__(
        self,
        node_id: NodeId,
        pool: Pool,
        *,
        workers: int,
        max_batch: int,
        arena_slots: int,
        step_deadline_s: float,
        start_deadline_s: float,
        now_s: float,
        commit_every_steps: int | None = 0,
        live_migration: bool = True,
        latent_bytes: int = 1,
    ) -> None:
        self.node_id, self.pool = node_id, pool
        self.max_batch = max_batch
        self.commit_every_steps, self.live_migration = commit_every_steps, live_migration
        self.latent_bytes = latent_bytes
        self.step_deadline_s, self.start_deadline_s = step_deadline_s, start_deadline_s
        ids = [WorkerId(f"{node_id}-w{index}") for index in range(workers)]
        self.workers = {worker_id: Worker(worker_id, since_s=now_s) for worker_id in ids}
        self.flights: dict[RequestId, Flight] = {}
        self.free_slots = list(range(arena_slots))
        self.paused = False
        self.leave_by_s: float | None = None
        self.ended = False
        self.pace = Pace.for_latents(latent_bytes)
        self._commit_ordered_s = -math.inf
        self.welcomed = False
        self.busy_s = 0.0
        self._decayed_busy_s = self._decayed_steps = 0.0
        self._finishing: frozenset[RequestId] = frozenset()
        self._out: list[Command] = []

    @property
    def draining(self) -> bool:
        return self.leave_by_s is not None

    @property
    def step_s(self) -> float:
        """Slot-seconds a full sample-step, decoding included; 0 while unknown."""
        return self._decayed_busy_s / self._decayed_steps if self._decayed_steps else 0.0

    def start(self) -> list[Command]:
        """First commands: the workers."""
        return [StartWorker(worker_id) for worker_id in self.workers]

    @property
    def is_ready(self) -> bool:
        """Whether every worker has loaded."""
        return all(worker.state is not WorkerState.STARTING for worker in self.workers.values())

    def handle(self, event: NodeEvent, now_s: float) -> list[Command]:
        """Takes one fact in; returns what is to be done about it."""
        self._out = []
        if not self.ended:
            self._take(event, now_s)
            self._advance(now_s)
        return self._out

    def heartbeat(self) -> NodeHeartbeat:
        return NodeHeartbeat(
            node_id=self.node_id,
            slots=len(self.workers),
            held=self._held(),
            busy_s=self.busy_s,
            step_s=self.step_s,
            paused=self.paused,
        )

    def hello(self) -> NodeHello:
        return NodeHello(node_id=self.node_id, pool=self.pool, slots=len(self.workers), held=self._held())

    def _held(self) -> tuple[HeldLease, ...]:
        return tuple(
            HeldLease(request_id=f.request_id, lease_id=f.assignment.lease_id, denoising_step=f.denoising_step)
            for f in self.flights.values()
        )

    def _take(self, event: NodeEvent, now_s: float) -> None:
        match event:
            case WorkerReady() | WorkerDied() | StepDone() | SamplesDecoded() | WorkerFailed() | PolicyLoaded():
                self._worker_event(event, now_s)
            case WelcomeNode():
                self.welcomed, self.paused = True, event.paused
                self._say_again(now_s)
            case Refused():
                self._out.append(SendToControl(self.hello()))
                if self.leave_by_s is not None:
                    self._out.append(SendToControl(self._noticed(self.leave_by_s - now_s)))
            case AssignWork():
                for assignment in event.assignments:
                    self._assigned(assignment, WorkerId(event.group_id), now_s)
            case DropRequests():
                for request_id in event.request_ids:
                    self._forget(request_id)
            case PauseNode() | ResumeNode():
                self.paused = isinstance(event, PauseNode)
            case NoticeReceived():
                by_s = last_word_s(now_s, event.grace_period_s)
                self.leave_by_s = by_s if self.leave_by_s is None else min(self.leave_by_s, by_s)
                self._out.append(SendToControl(self._noticed(event.grace_period_s)))
            case TimePassed():
                self._time_passed(now_s)
            case _:
                self._request_event(event, now_s)

    def _noticed(self, grace_period_s: float) -> NodeNoticed:
        return NodeNoticed(node_id=self.node_id, grace_period_s=max(0.0, grace_period_s))

    # ---- workers ----

    def _worker_event(
        self,
        event: WorkerReady | WorkerDied | StepDone | SamplesDecoded | WorkerFailed | PolicyLoaded,
        now_s: float,
    ) -> None:
        worker = self.workers.get(event.worker_id)
        if worker is None:
            return
        match event:
            case WorkerReady():
                worker.state, worker.since_s, worker.failed_starts = WorkerState.IDLE, now_s, 0
                self._out.append(SendToControl(self.heartbeat()))
            case WorkerDied():
                self._worker_died(worker, now_s)
            case StepDone() if event.seq == worker.seq:
                self._measure(worker, event.elapsed_s, sample_steps=len(worker.batch))
                self.pace.step.observe(now_s - worker.since_s)
                self._book_forwards(worker, event)
                for flight in self._unbatch(worker):
                    flight.denoising_step += 1
                    flight.move(FlightEvent.STEPPED)
                    self._commit_if_due(flight, now_s)
            case SamplesDecoded() if event.seq == worker.seq:
                self._measure(worker, event.elapsed_s, sample_steps=0)
                self.pace.decode.observe(now_s - worker.since_s)
                self._decoded(self._unbatch(worker), now_s)
            case WorkerFailed() if event.slot >= 0:
                self._not_admitted(worker, event)
            case WorkerFailed() if event.seq in (-1, worker.seq):
                worker.policies.clear()
                if event.seq == worker.seq:
                    self._interrupt(worker, event.error_class, event.error)
            case _:
                pass

    def _not_admitted(self, worker: Worker, event: WorkerFailed) -> None:
        """The worker refused a request: it is given up; the command that was sent behind it fails too and interrupts its mates."""
        for flight in list(self.flights.values()):
            if flight.slot == event.slot and flight.worker_id == worker.worker_id:
                self._give_up(flight, event.error_class, event.error)

    def _interrupt(self, worker: Worker, error_class: str, error: str) -> None:
        """A command ended without a result: its flights start their denoising step again, a bounded number of times."""
        for flight in self._unbatch(worker):
            flight.move(FlightEvent.INTERRUPTED)
            flight.interruptions += 1
            if flight.interruptions >= INTERRUPTIONS_MAX:
                self._give_up(flight, error_class, error)
        for flight in self.flights.values():
            if flight.worker_id == worker.worker_id:
                flight.worker_id = None
                if flight.is_cached and not flight.is_denoised:
                    flight.denoising_step = flight.forwards = (
                        0  # the step cache is gone with the worker, and another would take other steps
                    )

    def _worker_died(self, worker: Worker, now_s: float) -> None:
        self._interrupt(worker, "ClusterError", f"its worker died {INTERRUPTIONS_MAX} times")
        failed_starts = worker.failed_starts + (worker.state is WorkerState.STARTING)
        self.workers[worker.worker_id] = Worker(worker.worker_id, since_s=now_s, failed_starts=failed_starts)
        if failed_starts >= FAILED_STARTS_MAX:
            self.ended = True
            self._out.append(FailNode(worker.worker_id))
        elif not self.draining:
            self._out.append(StartWorker(worker.worker_id, delay_s=RESPAWN_S * failed_starts))

    def _unbatch(self, worker: Worker) -> list[Flight]:
        """Ends the worker's outstanding command; returns the flights of it that are still this node's and frees the slots of the others."""
        flights = []
        for request_id, slot in worker.batch:
            flight = self.flights.get(request_id)
            if flight is not None and flight.slot == slot:
                flights.append(flight)
            else:
                self.free_slots.append(slot)
        worker.batch = ()
        if worker.state is WorkerState.BUSY:
            worker.state = WorkerState.IDLE
        return flights

    def _batched(self, worker: Worker) -> list[Flight | None]:
        """The flights of the worker's outstanding command in its order, None for those that are no longer this node's."""
        found = [(self.flights.get(request_id), slot) for request_id, slot in worker.batch]
        return [flight if flight is not None and flight.slot == slot else None for flight, slot in found]

    def _measure(self, worker: Worker, elapsed_s: float, *, sample_steps: int) -> None:
        """Books a command's time. Only whole samples say what a step costs: with a step cache some steps are missing, decoding is not."""
        self.busy_s += elapsed_s
        for flight in self._batched(worker):
            if flight is not None:
                flight.busy_s += elapsed_s / len(worker.batch)
        if worker.is_cached:
            return
        self._decayed_busy_s = self._decayed_busy_s * DECAY + elapsed_s
        self._decayed_steps = self._decayed_steps * DECAY + sample_steps

    def _book_forwards(self, worker: Worker, done: StepDone) -> None:
        forwards = done.forwards or (True,) * len(worker.batch)
        for flight, took_forward in zip(self._batched(worker), forwards, strict=True):
            if flight is not None:
                flight.forwards += took_forward

    # ---- requests ----

    def _assigned(self, assignment: Assignment, group_id: WorkerId, now_s: float) -> None:
        request = assignment.request
        if worker := self.workers.get(group_id):
            worker.pulled_room = 0
        held = self.flights.get(request.request_id)
        if held is not None and held.assignment.lease_id == assignment.lease_id:
            return
        if held is not None:
            self._forget(request.request_id)
        if self.draining or not self.free_slots:
            reason = "draining" if self.draining else "no arena slot is free"
            self._say_returned(assignment, reason=reason)
            return
        step = assignment.resume.denoising_step if assignment.resume else 0
        flight = Flight(assignment, group_id, self.free_slots.pop(), now_s, denoising_step=step, committed_step=step)
        self.flights[request.request_id] = flight
        self._out.append(FetchInputs(flight.slot, assignment))

    def _request_event(
        self, event: InputsFetched | SampleStored | SampleJudged | ProgressStored | AttemptFailed, now_s: float
    ) -> None:
        flight = self.flights.get(event.request_id)
        if flight is None:
            return
        match event:
            case InputsFetched() if flight.stage is Stage.FETCHING:
                flight.move(FlightEvent.FETCHED)
            case SampleStored() if flight.stage is Stage.FINISHING:
                flight.stored = event
                self._report(flight, now_s)
            case SampleJudged() if flight.stage is Stage.FINISHING:
                flight.judged = event
                self._report(flight, now_s)
            case ProgressStored() if flight.committing_step is not None:
                self._committed(flight, event, now_s)
            case AttemptFailed() if flight.stage in (Stage.FETCHING, Stage.FINISHING):
                self._give_up(flight, event.error_class, event.error)
            case _:
                pass

    def _decoded(self, flights: list[Flight], now_s: float) -> None:
        for flight in flights:
            flight.finished_s = now_s
            flight.move(FlightEvent.DECODED)
            self._out.append(StoreSample(flight.request_id, flight.slot))
        if flights:
            self._out.append(Judge(tuple(flight.request_id for flight in flights)))

    def _report(self, flight: Flight, now_s: float) -> None:
        """DONE once it is stored, SCORED once it is also judged, in this order."""
        if flight.stored and not flight.done_told:
            flight.done_told = True
            self._out.append(SendToControl(self._sample_done(flight)))
        if flight.stored and flight.judged:
            flight.move(FlightEvent.JUDGED)
            flight.reported_s = now_s
            self.pace.finish.observe(now_s - flight.finished_s)
            self._out.append(SendToControl(self._sample_scored(flight)))

    # ---- commits ----

    def _commit_if_due(self, flight: Flight, now_s: float) -> None:
        """In the background, one at a time: the newest step is what counts, so a step that comes while a commit runs waits for the next."""
        may = self.live_migration and not flight.is_denoised and not flight.is_cached
        if may and flight.committing_step is None and flight.uncommitted_steps >= self._commit_interval(now_s):
            self._commit(flight, now_s)

    def _commit_interval(self, now_s: float) -> float:
        """Denoising steps between commits of a request: as asked, else as few as keep the store busy for COMMIT_SHARE of the stepping."""
        if self.commit_every_steps is not None:
            return self.commit_every_steps or math.inf
        if now_s - self._commit_ordered_s >= PROBE_S:
            return 1
        if self.pace.store.measured_bytes_s is None or not self.pace.step.measured_s:
            return math.inf
        commits_s = self.pace.store.seconds(len(self.flights) * self.latent_bytes)
        return max(1, math.ceil(commits_s / (COMMIT_SHARE * self.pace.step.measured_s)))

    def _commit(self, flight: Flight, now_s: float) -> None:
        flight.committing_step, flight.committing_since_s = flight.denoising_step, now_s
        flight.committing_latents = flight.commit_latents()
        flight.committing_beside = sum(f.committing_step is not None for f in self.flights.values())
        self._commit_ordered_s = now_s
        self._out.append(StoreProgress(flight.request_id, flight.slot, flight.denoising_step))

    def _committed(self, flight: Flight, event: ProgressStored, now_s: float) -> None:
        """A commit ended, without a key where it failed. Control hears of it at once, or with the request that goes back."""
        flight.committing_step = None
        if event.commit_key and event.denoising_step > flight.committed_step:
            elapsed_s = now_s - flight.committing_since_s
            self.pace.commit.observe(elapsed_s)
            size_bytes = flight.committing_latents * self.latent_bytes
            self.pace.store.observe(size_bytes, elapsed_s, flight.committing_beside)
            flight.committed_step, flight.commit_key = event.denoising_step, event.commit_key
        if flight.stage is not Stage.RETURNING:
            if flight.commit_key:
                self._out.append(SendToControl(self._request_committed(flight)))
        elif event.commit_key and flight.uncommitted_steps > 0:
            self._commit(flight, now_s)
        else:
            self._return(flight)

    def _request_committed(self, flight: Flight) -> RequestCommitted:
        return RequestCommitted(
            node_id=self.node_id,
            lease_id=flight.assignment.lease_id,
            request_id=flight.request_id,
            denoising_step=flight.committed_step,
            commit_key=flight.commit_key,
        )

    def _return(self, flight: Flight) -> None:
        """Hands a request back as it was last committed; without a key control keeps what it knows, such as the sample itself."""
        key = "" if flight.stored else flight.commit_key
        self._say_returned(flight.assignment, flight.committed_step if key else 0, key, "notice")
        self._forget(flight.request_id)

    # ---- reports ----

    def _sample_done(self, flight: Flight) -> SampleDone:
        assert flight.stored is not None
        return SampleDone(
            node_id=self.node_id,
            lease_id=flight.assignment.lease_id,
            request_id=flight.request_id,
            sample_key=flight.stored.sample_key,
            sample_digest=flight.stored.sample_digest,
            policy=flight.assignment.request.policy,
            started_s=flight.started_s,
            finished_s=flight.finished_s,
            image_key=flight.stored.image_key,
            effective_steps=flight.effective_steps,
            busy_s=flight.busy_s,
        )

    def _sample_scored(self, flight: Flight) -> SampleScored:
        assert flight.judged is not None
        return SampleScored(
            node_id=self.node_id,
            lease_id=flight.assignment.lease_id,
            request_id=flight.request_id,
            reward=flight.judged.reward,
            correct=flight.judged.correct,
            reason=flight.judged.reason,
        )

    def _give_up(self, flight: Flight, error_class: str, error: str) -> None:
        failed = RequestFailed(
            node_id=self.node_id,
            lease_id=flight.assignment.lease_id,
            request_id=flight.request_id,
            error_class=error_class,
            error=error,
        )
        self._out.append(SendToControl(failed))
        self._forget(flight.request_id)

    def _say_returned(
        self, assignment: Assignment, denoising_step: int = 0, commit_key: str = "", reason: str = ""
    ) -> None:
        returned = RequestReturned(
            node_id=self.node_id,
            lease_id=assignment.lease_id,
            request_id=assignment.request.request_id,
            denoising_step=denoising_step,
            commit_key=commit_key,
            reason=reason,
        )
        self._out.append(SendToControl(returned))

    def _forget(self, request_id: RequestId) -> None:
        """Lets go of a request. A slot that a worker may write stays taken until its command ends."""
        flight = self.flights.pop(request_id, None)
        if flight is None:
            return
        if flight.stage is not Stage.WORKING:
            self.free_slots.append(flight.slot)
        self._out.append(Forget(request_id))

    # ---- what holds now ----

    def _advance(self, now_s: float) -> None:
        if self.leave_by_s is not None:
            self._drain(self.leave_by_s - now_s, now_s)
        if self.ended:
            return
        if not self.paused:
            for worker in self.workers.values():
                if worker.state is WorkerState.IDLE:
                    self._employ(worker, now_s)
        if self.welcomed and not self.draining and not self.paused:
            for worker in self.workers.values():
                self._pull(worker, now_s)

    def _employ(self, worker: Worker, now_s: float) -> None:
        """Gives an idle worker its next command: decode what is denoised, else one denoising step for the oldest and their like."""
        mine = [f for f in self.flights.values() if f.stage is Stage.WAITING and self._may_take(worker, f)]
        if self.draining:
            mine = [flight for flight in mine if flight.request_id in self._finishing]
        denoised = [flight for flight in mine if flight.is_denoised]
        stepping = [flight for flight in mine if not flight.is_denoised]
        batch = (denoised or stepping)[: self.max_batch]
        if not batch:
            return
        policy = batch[0].assignment.request.policy
        cached = batch[0].is_cached
        batch = [f for f in batch if f.assignment.request.policy == policy and f.is_cached == cached]
        self._prepare(worker, batch, policy)
        worker.seq += 1
        worker.state, worker.since_s = WorkerState.BUSY, now_s
        worker.batch = tuple((flight.request_id, flight.slot) for flight in batch)
        worker.is_cached = cached
        self._out.append(SendToWorker(worker.worker_id, self._order(worker, batch)))

    def _may_take(self, worker: Worker, flight: Flight) -> bool:
        """Its own, or those of a worker that is away: the latents are in the arena, whoever wrote them."""
        if flight.group_id == worker.worker_id:
            return True
        owner = self.workers.get(flight.group_id)
        return owner is None or owner.state is WorkerState.STARTING

    def _prepare(self, worker: Worker, batch: list[Flight], policy: PolicyRef) -> None:
        if policy not in worker.policies:
            self._out.append(BindPolicy(worker.worker_id, policy))
        worker.policies[policy] = None
        worker.policies.move_to_end(policy)
        while len(worker.policies) > RESIDENT_POLICIES_MAX:
            worker.policies.popitem(last=False)
        for flight in batch:
            if flight.worker_id != worker.worker_id:
                self._out.append(AdmitTo(worker.worker_id, flight.slot, flight.request_id, flight.denoising_step))
                flight.group_id = flight.worker_id = worker.worker_id
            flight.move(FlightEvent.BATCHED)

    @staticmethod
    def _order(worker: Worker, batch: list[Flight]) -> DenoiseStep | DecodeSamples:
        if batch[0].is_denoised:
            return DecodeSamples(seq=worker.seq, slots=tuple(flight.slot for flight in batch))
        items = tuple(StepItem(slot=flight.slot, denoising_step=flight.denoising_step) for flight in batch)
        return DenoiseStep(seq=worker.seq, items=items)

    def _pull(self, worker: Worker, now_s: float) -> None:
        """Asks for as much as fits the next batch, and again where that grew or nobody answered."""
        if worker.state is WorkerState.STARTING:
            return
        load = sum(f.group_id == worker.worker_id and self._counts(f) for f in self.flights.values())
        room = min(self.max_batch - load, len(self.free_slots) // len(self.workers))
        due = worker.pulled_room == 0 or room != worker.pulled_room or now_s - worker.pulled_s > PULL_AGAIN_S
        if room > 0 and due:
            worker.pulled_room, worker.pulled_s = room, now_s
            self._out.append(SendToControl(PullWork(node_id=self.node_id, group_id=worker.worker_id, room=room)))

    @staticmethod
    def _counts(flight: Flight) -> bool:
        underway = flight.stage in (Stage.FETCHING, Stage.WAITING, Stage.WORKING)
        return underway and flight.num_steps - flight.denoising_step > PREFETCH_STEPS

    def _drain(self, left_s: float, now_s: float) -> None:
        """Finishes, commits and lets go as planned anew with every event; ends when nothing is left to say."""
        able = {
            worker.worker_id: now_s - worker.since_s if worker.state is WorkerState.BUSY else 0.0
            for worker in self.workers.values()
            if worker.state is not WorkerState.STARTING and not self.paused
        }
        plan = plan_drain(
            list(self.flights.values()),
            able,
            self.pace,
            max_batch=self.max_batch,
            left_s=left_s,
            latent_bytes=self.latent_bytes,
        )
        self._finishing = plan.finish
        for flight in plan.let_go:
            self._return(flight)
        for flight in plan.commit:
            if flight.is_cached or not self.live_migration:  # a step cache cannot go along, so it starts over elsewhere
                self._return(flight)
                continue
            flight.move(FlightEvent.GIVEN_UP)
            if flight.committing_step is None:
                self._commit(flight, now_s)
        if all(flight.stage is Stage.REPORTED for flight in self.flights.values()):
            self.ended = True
            self._out += [SendToControl(NodeLeft(node_id=self.node_id)), EndNode()]

    def _time_passed(self, now_s: float) -> None:
        for worker in self.workers.values():
            limit_s = self.start_deadline_s if worker.state is WorkerState.STARTING else self.step_deadline_s
            if worker.state is not WorkerState.IDLE and now_s - worker.since_s > limit_s:
                worker.since_s = now_s
                self._out.append(KillWorker(worker.worker_id))
        if any(now_s - f.reported_s > PULL_AGAIN_S for f in self.flights.values() if f.stage is Stage.REPORTED):
            self._say_again(now_s)

    def _say_again(self, now_s: float) -> None:
        """Repeats results without a receipt and forgets pulls: the other side may never have heard them."""
        for flight in self.flights.values():
            if flight.done_told:
                self._out.append(SendToControl(self._sample_done(flight)))
            if flight.stage is Stage.REPORTED:
                flight.reported_s = now_s
                self._out.append(SendToControl(self._sample_scored(flight)))
        for worker in self.workers.values():
            worker.pulled_room = 0
