"""The persistent scheduler of one machine (paper §4.4.1): its groups, the requests in flight and their denoising steps.

Owns which request steps on which sequence-parallel group, when groups are reshaped, when to ask for more, when to commit, and the drain on
a notice. Never touches latents: they lie in the arena, so that the death of a worker costs at most the denoising step in hand. Processes
and slots are the roster's; a group of degree 1 is formed like any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spot_runtime.errors import GroupError
from spot_runtime.messages import (
    RESIDENT_POLICIES_MAX,
    Assignment,
    AssignWork,
    DecodeSamples,
    DenoiseStep,
    DropRequests,
    GroupJoined,
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
    SleepWorker,
    StepDone,
    StepItem,
    WakeWorker,
    WelcomeNode,
    WorkerFailed,
    WorkerReady,
    WorkerSeeded,
    WorkerSlept,
    WorkerWoke,
)
from spot_runtime.node.commands import (
    AdmitTo,
    BindPolicy,
    Command,
    DismissFrom,
    EndNode,
    FailNode,
    FetchInputs,
    Forget,
    FormGroup,
    Judge,
    SendToControl,
    SendToWorker,
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
    SlotsChanged,
    TimePassed,
    WorkerDied,
)
from spot_runtime.node.flight import Flight, FlightEvent, Stage
from spot_runtime.node.group import Group, GroupEvent, GroupState, group_id
from spot_runtime.node.pace import Pace
from spot_runtime.node.plan import SlotGroup, plan_groups
from spot_runtime.node.roster import Roster, Worker, WorkerState
from spot_runtime.types import GroupId, NodeId, PolicyRef, Pool, RequestId, WorkerId

PREFETCH_STEPS = 2
"""A request with so few denoising steps left no longer counts against a batch, so its successor is fetched in time."""
INTERRUPTIONS_MAX = 3
"""A request under which commands failed so often in a row is reported as failed: it may be what kills workers."""
HELLO_AGAIN_S = 1.0
"""One hello answers all refusals that come within this: a control that was away refuses whatever waited for it, one by one."""
PULL_AGAIN_S = 5.0
"""An unanswered pull, or a result without receipt, is said again: the other side may have restarted."""
COMMIT_SHARE = 0.05
"""Share of its stepping that a node may keep the store busy with commits in the background, where nobody says how often."""
PROBE_S = 60.0
"""Where nobody says how often, a commit is made after so long anyway: it shows what commits cost by now."""
HANG_S = 2.0
"""A rank that has not answered so long after another one failed is killed; a denoising step that takes longer is waited for."""
FAILED_JOINS_MAX = 5
"""Generations in a row that may fail to form though all of their ranks live; then the node ends with the last error."""
HOLD_S = 10.0
"""A machine without any slot keeps its requests so long; then it commits and returns them, for they could go on elsewhere."""
DECAY = 0.98
"""Weight that older steps keep in the measured step time, one batch later."""

Answer = GroupJoined | StepDone | SamplesDecoded | WorkerSlept | WorkerWoke | WorkerFailed
WorkerEvent = WorkerReady | WorkerSeeded | WorkerDied | PolicyLoaded | Answer
NodeEvent = Fact | WelcomeNode | AssignWork | DropRequests | PauseNode | ResumeNode | Refused | WorkerEvent


@dataclass
class Question:
    """A group's pull until it is answered; it keeps its number, however often it is said, and whatever room it has by then."""

    number: int
    room: int = 0
    said_s: float = -math.inf


class NodeCore:
    """State of one machine. `free_slots`, the slots of `flights` and those that a batch may still write partition the arena.

    A worker is in one group at most, a request in one batch at most, and `generation` only rises. `lost_steps` counts sample-steps that
    were taken again because a command ended without a result.

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
        degrees: tuple[int, ...] = (1,),
        standbys: int = 0,
        group_timeout_s: float = 10.0,
        sample_size: tuple[int, int] = (0, 0),
        sleeps: bool = False,
    ) -> None:
        """
        Args:
            workers: slots at the start; `SlotsChanged` tells of others.
            degrees: sequence-parallel degrees that groups may have; the highest where there are slots for it.
            standbys: processes kept in reserve.
            group_timeout_s: bound of joining and of each collective of a group.
            sample_size: (height, width) in pixels of what the arena is made for; 0: any.
            sleeps: weights leave the device while the node is paused.
        """
        self.node_id, self.pool = node_id, pool
        self.max_batch = max_batch
        self.commit_every_steps, self.live_migration = commit_every_steps, live_migration
        self.latent_bytes = latent_bytes
        self.step_deadline_s, self.join_deadline_s = step_deadline_s, 2 * group_timeout_s + HANG_S
        self.degrees, self.sample_size, self.sleeps = degrees, sample_size, sleeps
        self.roster = Roster(node_id, range(workers), standbys=standbys, start_deadline_s=start_deadline_s, now_s=now_s)
        self.groups: dict[GroupId, Group] = {}
        self.generation = 0
        self.lost_steps = 0
        self.flights: dict[RequestId, Flight] = {}
        self.free_slots = list(range(arena_slots))
        self.paused = False
        self.pause = 0
        self.leave_by_s: float | None = None
        self.ended = False
        self.pace = Pace.for_latents(latent_bytes)
        self._commit_ordered_s = -math.inf
        self.welcomed = False
        self._decayed_busy_s = self._decayed_steps = 0.0
        self._finishing: frozenset[RequestId] = frozenset()
        self._questions: dict[GroupId, Question] = {}
        self._questions_asked = int(now_s * 1000)  # an earlier process of this name asked fewer than one a millisecond
        self._hello_s = -math.inf
        self._seq = self._failed_joins = 0
        self._out: list[Command] = []

    @property
    def draining(self) -> bool:
        return self.leave_by_s is not None

    @property
    def step_s(self) -> float:
        """Slot-seconds a full sample-step, decoding included; 0 while unknown."""
        return self._decayed_busy_s / self._decayed_steps if self._decayed_steps else 0.0

    def start(self, now_s: float) -> list[Command]:
        """First commands: the workers."""
        return self.roster.staff((), now_s)

    @property
    def is_ready(self) -> bool:
        """Whether every slot serves."""
        serving = [slot for group in self.groups.values() if group.takes_work for slot in group.slots]
        return len(serving) == len(self.roster.present)

    def group_of(self, worker_id: WorkerId) -> Group | None:
        return next((group for group in self.groups.values() if worker_id in group.ranks), None)

    def handle(self, event: NodeEvent, now_s: float) -> list[Command]:
        """Takes one fact in; returns what is to be done about it."""
        self._out = []
        before = (self._is_parked, self.pause)
        self.pace.store.advance(now_s, sum(flight.committing_step is not None for flight in self.flights.values()))
        if not self.ended:
            self._take(event, now_s)
            self._advance(now_s)
        if self._is_parked and before != (True, self.pause):
            self._out.append(SendToControl(self.heartbeat()))  # the trainer waits for this
        return self._out

    @property
    def _is_parked(self) -> bool:
        """Paused, no worker computes, joins, loads or is yet to leave, and all sleep that are to: the trainer may have the devices."""
        rest = GroupState.ASLEEP if self.sleeps else GroupState.IDLE
        if not self.paused or any(group.state is not rest for group in self.groups.values()):
            return False
        moving = (WorkerState.LOADING, WorkerState.ENDING)
        return not any(worker.state in moving for worker in self.roster.workers.values())

    def heartbeat(self) -> NodeHeartbeat:
        return NodeHeartbeat(
            node_id=self.node_id,
            slots=len(self.roster.present),
            held=self._held(),
            step_s=self.step_s,
            pause=self.pause,
            paused=self._is_parked,
            lost_steps=self.lost_steps,
            degrees=tuple(group.degree for group in self.groups.values() if group.takes_work),
            standbys=self.roster.waiting,
        )

    def hello(self) -> NodeHello:
        return NodeHello(node_id=self.node_id, pool=self.pool, slots=len(self.roster.present), held=self._held())

    def _held(self) -> tuple[HeldLease, ...]:
        return tuple(
            HeldLease(request_id=f.request_id, lease_id=f.assignment.lease_id, denoising_step=f.denoising_step)
            for f in self.flights.values()
        )

    def _take(self, event: NodeEvent, now_s: float) -> None:
        match event:
            case WorkerReady() | WorkerSeeded() | WorkerDied() | PolicyLoaded():
                self._process_event(event, now_s)
            case GroupJoined() | StepDone() | SamplesDecoded() | WorkerSlept() | WorkerWoke() | WorkerFailed():
                self._answered(event, now_s)
            case WelcomeNode():
                self.welcomed, self.paused = True, event.paused
                self.pause = event.pause if event.paused else self.pause
                self._say_again(now_s)
            case Refused() if now_s - self._hello_s >= HELLO_AGAIN_S:
                self._hello_s = now_s
                self._out.append(SendToControl(self.hello()))
                if self.leave_by_s is not None:
                    self._out.append(SendToControl(self._noticed(self.leave_by_s - now_s)))
            case Refused():
                pass
            case AssignWork():
                self._answered_pull(event)
                for assignment in event.assignments:
                    self._assigned(assignment, GroupId(event.group_id), now_s)
            case DropRequests():
                for request_id in event.request_ids:
                    self._forget(request_id)
            case PauseNode() | ResumeNode():
                self.paused = isinstance(event, PauseNode)
                self.pause = event.number if isinstance(event, PauseNode) else self.pause
            case NoticeReceived():
                by_s = last_word_s(now_s, event.grace_period_s)
                self.leave_by_s = by_s if self.leave_by_s is None else min(self.leave_by_s, by_s)
                self._out.append(SendToControl(self._noticed(event.grace_period_s)))
            case SlotsChanged():
                self.roster.change_slots(event.slots, now_s + event.grace_period_s, now_s)
                self._out.append(SendToControl(self.heartbeat()))
            case TimePassed():
                self._time_passed(now_s)
            case _:
                self._request_event(event, now_s)

    def _noticed(self, grace_period_s: float) -> NodeNoticed:
        return NodeNoticed(node_id=self.node_id, grace_period_s=max(0.0, grace_period_s))

    # ---- workers ----

    def _process_event(self, event: WorkerReady | WorkerSeeded | WorkerDied | PolicyLoaded, now_s: float) -> None:
        worker = self.roster.workers.get(event.worker_id)
        if worker is None:
            return
        match event:
            case WorkerReady():
                self.roster.imported(worker, now_s)
            case WorkerSeeded():
                self._obey_roster(self.roster.got_weights(worker, event, now_s))
            case WorkerDied():
                self._worker_died(worker, now_s)
            case _:
                pass

    def _obey_roster(self, commands: list[Command]) -> None:
        self._out += commands
        self.ended = self.ended or any(isinstance(command, FailNode) for command in commands)

    def _worker_died(self, worker: Worker, now_s: float) -> None:
        """Its group's generation is over; what the lead had in hand is taken again, by whoever has it next."""
        for flight in self.flights.values():
            flight.holders.discard(worker.worker_id)
            flight.memories.pop(worker.worker_id, None)
        group = self.group_of(worker.worker_id)
        if group is not None:
            if worker.worker_id == group.lead:
                self._interrupt(group, "ClusterError", f"its worker died {INTERRUPTIONS_MAX} times")
            group.move(GroupEvent.FAILED, now_s)
            group.has_dead = True
            group.answer(worker.worker_id, now_s)
        self._obey_roster(self.roster.died(worker))

    def _answered(self, event: Answer, now_s: float) -> None:
        """One rank's answer. Only the lead's says what became of the batch."""
        worker = self.roster.workers.get(event.worker_id)
        if worker is None:
            return
        if isinstance(event, WorkerFailed):
            self._worker_failed(worker, event, now_s)
            return
        group = self.group_of(event.worker_id)
        if group is None or event.seq != group.seq:
            if isinstance(event, StepDone):
                self._forget_memories(event.worker_id)  # it may be a denoising step ahead of what counts
            return
        if isinstance(event, StepDone):
            for flight, step in group.remembered:
                flight.memories[event.worker_id] = step
        if isinstance(event, GroupJoined):
            self._failed_joins = 0
        elif isinstance(event, WorkerWoke):
            worker.is_asleep = False
        elif isinstance(event, StepDone | SamplesDecoded) and event.worker_id == group.lead:
            self._command_done(group, event, now_s)
        group.answer(event.worker_id, now_s)

    def _command_done(self, group: Group, event: StepDone | SamplesDecoded, now_s: float) -> None:
        if isinstance(event, SamplesDecoded):
            self._measure(group, event.elapsed_s, sample_steps=0)
            self.pace.decode.observe(now_s - group.since_s)
            self._decoded(self._unbatch(group), now_s)
            return
        self._measure(group, event.elapsed_s, sample_steps=len(group.batch))
        self.pace.step.observe(now_s - group.since_s)
        self._book_forwards(group, event)
        for flight in self._unbatch(group):
            flight.denoising_step += 1
            flight.interruptions = 0
            flight.move(FlightEvent.STEPPED)
            self._commit_if_due(flight, now_s)

    def _worker_failed(self, worker: Worker, event: WorkerFailed, now_s: float) -> None:
        """A refused request is given up. Any other command that a rank could not carry out ends its generation."""
        if event.slot >= 0:
            self._not_admitted(worker, event)
            return
        if event.error_class != GroupError.__name__:  # else it is sound
            self._doubt(worker)
        self._obey_roster(self.roster.failed(worker, event, now_s))
        group = self.group_of(worker.worker_id)
        if group is None or event.seq != group.seq:
            return
        if group.state is GroupState.FORMING:
            group.join_error = event
        if worker.worker_id == group.lead:
            self._interrupt(group, event.error_class, event.error)
        group.move(GroupEvent.FAILED, now_s)
        group.answer(worker.worker_id, now_s)

    def _doubt(self, worker: Worker) -> None:
        """Whatever it was given before is given to it again."""
        worker.policies.clear()
        self._forget_memories(worker.worker_id)
        for flight in self.flights.values():
            if worker.worker_id in flight.holders:
                flight.holders.remove(worker.worker_id)
                self._out.append(DismissFrom(worker.worker_id, flight.slot))

    def _forget_memories(self, worker_id: WorkerId) -> None:
        for flight in self.flights.values():
            flight.memories.pop(worker_id, None)

    def _not_admitted(self, worker: Worker, event: WorkerFailed) -> None:
        """The worker refused a request: it is given up; the command that was sent behind it fails too and interrupts its mates."""
        for flight in list(self.flights.values()):
            if flight.slot == event.slot and worker.worker_id in flight.holders:
                self._give_up(flight, event.error_class, event.error)

    def _interrupt(self, group: Group, error_class: str, error: str) -> None:
        """A command ended without a result: its flights start their denoising step again, a bounded number of times in a row."""
        for flight in self._unbatch(group):
            flight.move(FlightEvent.INTERRUPTED)
            flight.interruptions += 1
            self.lost_steps += not group.is_decoding
            if flight.interruptions >= INTERRUPTIONS_MAX:
                self._give_up(flight, error_class, error)

    def _start_over_without_memory(self) -> None:
        """A step cache that no worker has any more cannot be made again, and without it the steps would be others: from the beginning."""
        serving = {worker.worker_id for worker in self.roster.serving().values()}
        for flight in self.flights.values():
            if flight.stage is not Stage.WAITING or not flight.needs_memory:
                continue
            if serving.isdisjoint(flight.keepers | self._late_keepers(flight)):
                self.lost_steps += flight.denoising_step
                flight.denoising_step = flight.forwards = 0
                flight.memories.clear()

    def _late_keepers(self, flight: Flight) -> set[WorkerId]:
        """Ranks that have yet to answer the denoising step that their lead has ended."""
        found: set[WorkerId] = set()
        for group in self.groups.values():
            if any(f is flight and step == flight.denoising_step for f, step in group.remembered):
                found |= group.awaited
        return found

    def _dismiss(self, flight: Flight) -> None:
        """Nobody needs to hold it any more."""
        for worker_id in sorted(flight.holders):
            if self.roster.workers[worker_id].state is WorkerState.SEEDED:
                self._out.append(DismissFrom(worker_id, flight.slot))
        flight.holders.clear()
        flight.memories.clear()

    def _unbatch(self, group: Group) -> list[Flight]:
        """Ends the group's outstanding command; returns the flights of it that are still this node's and frees the slots of the others."""
        flights = []
        for request_id, slot in group.batch:
            flight = self.flights.get(request_id)
            if flight is not None and flight.slot == slot:
                flights.append(flight)
            else:
                self.free_slots.append(slot)
        group.batch = ()
        return flights

    def _batched(self, group: Group) -> list[Flight | None]:
        """The flights of the group's outstanding command in its order, None for those that are no longer this node's."""
        found = [(self.flights.get(request_id), slot) for request_id, slot in group.batch]
        return [flight if flight is not None and flight.slot == slot else None for flight, slot in found]

    def _measure(self, group: Group, elapsed_s: float, *, sample_steps: int) -> None:
        """Books a command's time on all of its slots. Only whole samples say what a step costs: with a step cache some steps are missing,
        decoding is not.
        """
        slot_s = elapsed_s * group.degree
        for flight in self._batched(group):
            if flight is not None:
                flight.busy_s += slot_s / len(group.batch)
        if group.is_cached:
            return
        self._decayed_busy_s = self._decayed_busy_s * DECAY + slot_s
        self._decayed_steps = self._decayed_steps * DECAY + sample_steps

    def _book_forwards(self, group: Group, done: StepDone) -> None:
        forwards = done.forwards or (True,) * len(group.batch)
        for flight, took_forward in zip(self._batched(group), forwards, strict=True):
            if flight is not None:
                flight.forwards += took_forward

    # ---- groups ----

    def _regroup(self, now_s: float) -> None:
        """Leaves generations behind that have ended or are not wanted any more, and forms those that are, where their slots are free.

        A group that is at work is not disturbed: it is reshaped between two denoising steps.
        """
        for group in list(self.groups.values()):
            if group.has_ended:
                self._count_join(group)
                self._dissolve(group)
        if self.ended:
            return
        serving = self.roster.serving()
        whole = [group.slots for group in self.groups.values() if group.state is not GroupState.BROKEN]
        plan = plan_groups(serving, whole, self.degrees)
        for group in list(self.groups.values()):
            if group.slots not in plan and group.state in (GroupState.IDLE, GroupState.ASLEEP, GroupState.FORMING):
                self._dissolve(group)
        taken = {slot for group in self.groups.values() for slot in group.slots}
        for slots in plan:
            if taken.isdisjoint(slots):
                self._form(slots, tuple(serving[slot].worker_id for slot in slots), now_s)
        for gone in [name for name in self._questions if name not in self.groups]:
            del self._questions[gone]
            self._out.append(SendToControl(PullWork(node_id=self.node_id, group_id=gone, room=0)))

    def _form(self, slots: SlotGroup, ranks: tuple[WorkerId, ...], now_s: float) -> None:
        self.generation += 1
        self._seq += 1
        name = group_id(self.node_id, slots)
        self.groups[name] = Group(name, self.generation, slots, ranks, self._seq, now_s, awaited=set(ranks))
        self._out.append(FormGroup(self._seq, self.generation, ranks))

    def _dissolve(self, group: Group) -> None:
        """Its requests wait for another group, at the denoising step that they have reached."""
        assert not group.batch, f"{group.group_id} is dissolved at work"
        del self.groups[group.group_id]

    def _count_join(self, ended: Group) -> None:
        """Where all ranks live and yet cannot meet, again and again, it is the machine. A death is met by the plan without that rank."""
        if ended.has_dead or ended.join_error is None:
            return
        self._failed_joins += 1
        if self._failed_joins >= FAILED_JOINS_MAX:
            failed = ended.join_error
            self._obey_roster([FailNode(failed.worker_id, failed.error_class, failed.error)])

    # ---- requests ----

    def _answered_pull(self, work: AssignWork) -> None:
        """An older answer that is said again settles nothing."""
        question = self._questions.get(GroupId(work.group_id))
        if question is not None and work.number in (0, question.number):
            del self._questions[GroupId(work.group_id)]

    def _assigned(self, assignment: Assignment, group_id: GroupId, now_s: float) -> None:
        request = assignment.request
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
            self._dismiss(flight)
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
        flight.committing_shared_s = self.pace.store.shared_s
        self._commit_ordered_s = now_s
        self._out.append(StoreProgress(flight.request_id, flight.slot, flight.denoising_step))

    def _committed(self, flight: Flight, event: ProgressStored, now_s: float) -> None:
        """A commit ended, without a key where it failed. Control hears of it at once, or with the request that goes back."""
        flight.committing_step = None
        if event.commit_key and event.denoising_step > flight.committed_step:
            elapsed_s = now_s - flight.committing_since_s
            self.pace.commit.observe(elapsed_s)
            size_bytes = flight.committing_latents * self.latent_bytes
            self.pace.store.observe(size_bytes, flight.committing_shared_s)
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
        self._say_returned(flight.assignment, flight.committed_step if key else 0, key, "notice", flight.untold_busy_s)
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
            busy_s=flight.untold_busy_s,
        )
        self._out.append(SendToControl(failed))
        self._forget(flight.request_id)

    def _say_returned(
        self,
        assignment: Assignment,
        denoising_step: int = 0,
        commit_key: str = "",
        reason: str = "",
        busy_s: float = 0.0,
    ) -> None:
        returned = RequestReturned(
            node_id=self.node_id,
            lease_id=assignment.lease_id,
            request_id=assignment.request.request_id,
            denoising_step=denoising_step,
            commit_key=commit_key,
            reason=reason,
            busy_s=busy_s,
        )
        self._out.append(SendToControl(returned))

    def _forget(self, request_id: RequestId) -> None:
        """Lets go of a request. A slot that a worker may write stays taken until its command ends."""
        flight = self.flights.pop(request_id, None)
        if flight is None:
            return
        if flight.stage is not Stage.WORKING:
            self.free_slots.append(flight.slot)
        self._dismiss(flight)
        self._out.append(Forget(request_id))

    # ---- what holds now ----

    def _advance(self, now_s: float) -> None:
        if self.leave_by_s is not None:
            self._drain(self.leave_by_s - now_s, now_s)
        if self.ended:
            return
        self._regroup(now_s)
        if self.ended:
            return
        self._start_over_without_memory()
        if not self.draining:
            busy = {worker_id for group in self.groups.values() for worker_id in group.ranks}
            lent = (
                self.paused and self.sleeps
            )  # the devices are the trainer's: who died meanwhile is replaced afterwards
            self._out += self.roster.staff(busy, now_s, seeds=not lent)
        for group in self.groups.values():
            self._direct(group, now_s)
        if self.welcomed and not self.draining and not self.paused:
            for group in self.groups.values():
                self._pull(group, now_s)

    def _direct(self, group: Group, now_s: float) -> None:
        """What a group that is at nothing does next: it sleeps while the node is paused, wakes up, and works once all of it is awake."""
        if self.paused:
            if self.sleeps and group.state is GroupState.IDLE:
                self._tell_ranks(group, GroupEvent.TOLD_TO_SLEEP, SleepWorker, now_s)
                for worker_id in group.ranks:
                    self.roster.workers[worker_id].is_asleep = True
        elif group.state in (GroupState.IDLE, GroupState.ASLEEP):
            if any(self.roster.workers[worker_id].is_asleep for worker_id in group.ranks):
                self._tell_ranks(group, GroupEvent.TOLD_TO_WAKE, WakeWorker, now_s)
            else:
                self._employ(group, now_s)

    def _tell_ranks(
        self, group: Group, event: GroupEvent, message: type[SleepWorker | WakeWorker], now_s: float
    ) -> None:
        self._seq += 1
        group.seq = self._seq
        group.remembered = ()
        group.move(event, now_s)
        group.awaited = set(group.ranks)
        self._out += [SendToWorker(worker_id, message(seq=group.seq)) for worker_id in group.ranks]

    def _employ(self, group: Group, now_s: float) -> None:
        """Gives an idle group its next command: decode what is denoised, else one denoising step for the oldest and their like."""
        mine = [f for f in self.flights.values() if f.stage is Stage.WAITING and self._may_take(group, f)]
        if self.draining:
            mine = [flight for flight in mine if flight.request_id in self._finishing]
        denoised = [flight for flight in mine if flight.is_denoised]
        stepping = [flight for flight in mine if not flight.is_denoised]
        batch = (denoised or stepping or self._surplus())[: self.max_batch]
        if not batch:
            return
        policy = batch[0].assignment.request.policy
        cached = batch[0].is_cached
        batch = [f for f in batch if f.assignment.request.policy == policy and f.is_cached == cached]
        for flight in batch:
            flight.started_s = flight.started_s if flight.busy_s else now_s
        self._order(group, batch, policy, now_s)

    def _may_take(self, group: Group, flight: Flight) -> bool:
        """Its own, or those of a group that is not there: the latents are in the arena, whoever wrote them. A step cache is with ranks."""
        if flight.needs_memory:
            return not flight.keepers.isdisjoint(group.ranks)
        if flight.group_id == group.group_id:
            return True
        owner = self.groups.get(flight.group_id)
        return owner is None or not owner.takes_work

    def _surplus(self) -> list[Flight]:
        """What waits beside a full batch of another group. A step cache that was begun stays where it is."""
        if self.draining:
            return []
        waiting = [f for f in self.flights.values() if f.stage is Stage.WAITING and not f.is_denoised]
        surplus: list[Flight] = []
        for owner in self.groups.values():
            beside = [f for f in waiting if f.group_id == owner.group_id]
            surplus += [f for f in beside[max(0, self.max_batch - len(owner.batch)) :] if not f.needs_memory]
        return surplus

    def _order(self, group: Group, batch: list[Flight], policy: PolicyRef, now_s: float) -> None:
        """All ranks take a denoising step together; decoding is the lead's alone."""
        self._seq += 1
        group.seq, group.is_cached, group.is_decoding = self._seq, batch[0].is_cached, batch[0].is_denoised
        group.move(GroupEvent.ORDERED, now_s)
        group.batch = tuple((flight.request_id, flight.slot) for flight in batch)
        cached = batch if group.is_cached and not group.is_decoding else []
        group.remembered = tuple((flight, flight.denoising_step + 1) for flight in cached)
        ranks = (group.lead,) if group.is_decoding else group.ranks
        group.awaited = set(ranks)
        for worker_id in ranks:
            self._prepare(self.roster.workers[worker_id], batch, policy)
            self._out.append(SendToWorker(worker_id, self._command(group, batch)))
        for flight in batch:
            flight.group_id = group.group_id
            flight.move(FlightEvent.BATCHED)

    def _prepare(self, worker: Worker, batch: list[Flight], policy: PolicyRef) -> None:
        if policy not in worker.policies:
            self._out.append(BindPolicy(worker.worker_id, policy))
        worker.policies[policy] = None
        worker.policies.move_to_end(policy)
        while len(worker.policies) > RESIDENT_POLICIES_MAX:
            worker.policies.popitem(last=False)
        for flight in batch:
            if worker.worker_id not in flight.holders:
                self._out.append(AdmitTo(worker.worker_id, flight.slot, flight.request_id, flight.denoising_step))
                flight.holders.add(worker.worker_id)
                flight.memories.pop(worker.worker_id, None)

    @staticmethod
    def _command(group: Group, batch: list[Flight]) -> DenoiseStep | DecodeSamples:
        if group.is_decoding:
            return DecodeSamples(seq=group.seq, slots=tuple(flight.slot for flight in batch))
        items = tuple(StepItem(slot=flight.slot, denoising_step=flight.denoising_step) for flight in batch)
        return DenoiseStep(seq=group.seq, items=items)

    def _pull(self, group: Group, now_s: float) -> None:
        """Asks for as much as fits the next batch, and again where that grew or nobody answered."""
        if not group.takes_work:
            return
        load = sum(f.group_id == group.group_id and self._counts(f) for f in self.flights.values())
        room = min(self.max_batch - load, len(self.free_slots) // len(self.groups))
        question = self._questions.get(group.group_id)
        if room <= 0 or (question and room == question.room and now_s - question.said_s <= PULL_AGAIN_S):
            return
        if question is None:
            self._questions_asked += 1
            question = self._questions[group.group_id] = Question(self._questions_asked)
        question.room, question.said_s = room, now_s
        self._out.append(SendToControl(self._pull_work(group, question)))

    def _pull_work(self, group: Group, question: Question) -> PullWork:
        height, width = self.sample_size
        return PullWork(
            node_id=self.node_id,
            group_id=group.group_id,
            room=question.room,
            sequence_parallel_degree=group.degree,
            number=question.number,
            height=height,
            width=width,
            policies=tuple(self.roster.workers[group.lead].policies),
        )

    @staticmethod
    def _counts(flight: Flight) -> bool:
        underway = flight.stage in (Stage.FETCHING, Stage.WAITING, Stage.WORKING)
        return underway and flight.num_steps - flight.denoising_step > PREFETCH_STEPS

    def _drain(self, left_s: float, now_s: float) -> None:
        """Finishes, commits and lets go as planned anew with every event; ends when nothing is left to say."""
        able = {
            group.group_id: now_s - group.since_s if group.state is GroupState.BUSY else 0.0
            for group in self.groups.values()
            if group.is_awake and not self.paused
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
            self._hand_back(flight, now_s)
        if all(flight.stage is Stage.REPORTED for flight in self.flights.values()):
            self.ended = True
            self._out += [SendToControl(NodeLeft(node_id=self.node_id)), EndNode()]

    def _hand_back(self, flight: Flight, now_s: float) -> None:
        """Returns a waiting request, once its latents are committed."""
        if flight.is_cached or not self.live_migration:  # a step cache cannot go along, so it starts over elsewhere
            self._return(flight)
            return
        flight.move(FlightEvent.GIVEN_UP)
        if flight.committing_step is None:
            self._commit(flight, now_s)

    def _time_passed(self, now_s: float) -> None:
        self._obey_roster(self.roster.kill_late(now_s))
        for group in self.groups.values():
            if group.state is not GroupState.IDLE and now_s - group.since_s > self._limit_s(group):
                group.since_s = now_s
                for worker_id in sorted(group.awaited):
                    self._out += self.roster.kill(worker_id, now_s)
        empty_since_s = self.roster.empty_since_s
        if empty_since_s is not None and now_s - empty_since_s > HOLD_S and not self.draining:
            self._empty(now_s)
        if any(now_s - f.reported_s > PULL_AGAIN_S for f in self.flights.values() if f.stage is Stage.REPORTED):
            self._say_again(now_s)

    def _limit_s(self, group: Group) -> float:
        """How long the ranks may take over what the group is at."""
        if group.state is GroupState.FORMING:
            return self.join_deadline_s
        if group.state in (GroupState.BUSY, GroupState.DOZING, GroupState.WAKING):
            return self.step_deadline_s
        return min(self.step_deadline_s, max(HANG_S, self.pace.step.value_s))

    def _empty(self, now_s: float) -> None:
        """No slot came back: what could go on elsewhere does."""
        for flight in list(self.flights.values()):
            if flight.stage is Stage.FETCHING:
                self._return(flight)
            elif flight.stage is Stage.WAITING:
                self._hand_back(flight, now_s)

    def _say_again(self, now_s: float) -> None:
        """Repeats results without a receipt and forgets pulls: the other side may never have heard them."""
        for flight in self.flights.values():
            if flight.done_told:
                self._out.append(SendToControl(self._sample_done(flight)))
            if flight.stage is Stage.REPORTED:
                flight.reported_s = now_s
                self._out.append(SendToControl(self._sample_scored(flight)))
        for question in self._questions.values():
            question.said_s = -math.inf
