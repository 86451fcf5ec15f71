"""Random lives of one machine whose slots come and go and whose workers die, fail or stay silent at any moment.

Whatever happens in whatever order: each request is answered for once, none is in two groups, no two leads write to one arena slot,
generations only rise, nobody is sent anything after its death, only seeded workers serve and only awake ones, no step cache is
gone on with where nobody has it, and a drain ends in time.
"""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spot_runtime.messages import (
    Assignment,
    AssignWork,
    DecodeSamples,
    DenoiseStep,
    DropRequests,
    GenerationRequest,
    GroupJoined,
    NodeLeft,
    PauseNode,
    RequestCommitted,
    RequestFailed,
    RequestReturned,
    ResumeNode,
    ResumePoint,
    SampleDone,
    SampleScored,
    SamplesDecoded,
    SamplingParams,
    SleepWorker,
    StepDone,
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
    Command,
    DismissFrom,
    EndNode,
    FetchInputs,
    FormGroup,
    Judge,
    KillWorker,
    ReleaseWorker,
    SeedWorker,
    SendToControl,
    SendToWorker,
    StartWorker,
    StoreProgress,
    StoreSample,
)
from spot_runtime.node.core import FAILED_JOINS_MAX, NodeCore, NodeEvent
from spot_runtime.node.drain import MARGIN_S_MAX, MARGIN_SHARE
from spot_runtime.node.events import (
    AttemptFailed,
    InputsFetched,
    NoticeReceived,
    ProgressStored,
    SampleJudged,
    SampleStored,
    SlotsChanged,
    TimePassed,
    WorkerDied,
)
from spot_runtime.node.flight import Stage
from spot_runtime.node.group import GroupState
from spot_runtime.node.plan import plan_groups
from spot_runtime.node.roster import FAILED_STARTS_MAX, WorkerState
from spot_runtime.types import JobId, LeaseId, NodeId, Op, PolicyRef, Pool, RequestId, RunId, WorkerId

NUM_STEPS = 4
SLOTS = 9
TICK_S = 0.1
DIGEST = "weights"


def request(name: str, version: int = 1, threshold: float = 0.0) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(name),
        job_id=JobId("j"),
        run_id=RunId("r"),
        op=Op.EXPLORE if threshold else Op.ROLLOUT,
        prompt_id="p",
        prompt="a cube",
        row_json="{}",
        seed=1,
        sde_window=(0, 2),
        params=SamplingParams(height=64, width=64, num_steps=NUM_STEPS, noise_level=0.7, cache_threshold=threshold),
        policy=PolicyRef(version, "k", "d"),
        embedding_key="e",
    )


class NodeMachine(RuleBasedStateMachine):
    """Commands of the core wait in `todo` until a rule carries one out, in any order. What a worker is sent waits in its inbox, in order;
    `writing` are the arena slots that the lead of a command may write until it answers or dies, `memory` the denoising step that a worker's
    step cache of what it holds in a slot goes on with, `asleep` the workers whose weights are off the device.
    """

    @initialize(
        workers=st.integers(1, 4),
        every=st.sampled_from([None, 0, 1, 2]),
        degrees=st.sampled_from([(1,), (1, 2), (1, 2, 4), (1, 2, 3, 4)]),
        standbys=st.integers(0, 1),
        sleeps=st.booleans(),
    )
    def start(self, workers: int, every: int | None, degrees: tuple[int, ...], standbys: int, sleeps: bool) -> None:
        self.now_s = 100.0
        self.core = NodeCore(
            NodeId("n"),
            Pool.SPOT,
            workers=workers,
            max_batch=2,
            arena_slots=SLOTS,
            step_deadline_s=5.0,
            start_deadline_s=1000.0,
            now_s=self.now_s,
            commit_every_steps=every,
            degrees=degrees,
            standbys=standbys,
            group_timeout_s=1.0,
            sleeps=sleeps,
        )
        self.asleep: set[WorkerId] = set()
        self.inboxes: dict[WorkerId, deque[object]] = {}
        self.memory: dict[WorkerId, dict[int, int]] = {}
        self.seeded: set[WorkerId] = set()
        self.ids: set[WorkerId] = set()
        self.writing: dict[int, tuple[WorkerId, frozenset[int]]] = {}
        self.generation = 0
        self.todo: list[Command] = []
        self.held: dict[LeaseId, RequestId] = {}
        self.answers: Counter[LeaseId] = Counter()
        self.dropped: set[LeaseId] = set()
        self.commits: dict[RequestId, int] = {}
        self.names = 0
        self.leave_by_s: float | None = None
        self.left_s: float | None = None
        self.take(self.core.start(self.now_s))
        self.send(WelcomeNode(heartbeat_s=1.0, reward_url="http://r"))

    # ---- what the core says ----

    def send(self, event: NodeEvent) -> None:
        self.take(self.core.handle(event, self.now_s))

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            assert self.left_s is None, f"{command} after the end"
            match command:
                case SendToControl():
                    self.hear(command.message)
                case EndNode():
                    self.left_s = self.now_s
                case StartWorker():
                    assert command.worker_id not in self.ids, "an id is used twice"
                    self.ids.add(command.worker_id)
                    self.inboxes[command.worker_id] = deque(["start"])
                    self.memory[command.worker_id] = {}
                case AdmitTo() | DismissFrom() | SeedWorker() | SendToWorker() | KillWorker() | ReleaseWorker():
                    assert command.worker_id in self.inboxes, f"{command} to the dead"
                    self.deliver(command)
                case FormGroup():
                    assert command.generation > self.generation
                    self.generation = command.generation
                    assert self.seeded.issuperset(command.ranks), "an unseeded worker would serve"
                    for worker_id in command.ranks:
                        self.inboxes[worker_id].append(command)
                case StoreProgress():
                    assert command.request_id not in self.commits, "two commits of one request at a time"
                    self.commits[command.request_id] = command.denoising_step
                    self.todo.append(command)
                case _:
                    self.todo.append(command)

    def deliver(self, command: AdmitTo | DismissFrom | SeedWorker | SendToWorker | KillWorker | ReleaseWorker) -> None:
        match command:
            case KillWorker() | ReleaseWorker():
                self.todo.append(command)
                return
            case SeedWorker():
                assert not command.from_peer or command.digest == DIGEST, "there is no peer to copy from"
            case SendToWorker():
                group = self.core.group_of(command.worker_id)
                assert group is not None
                if command.worker_id == group.lead:
                    self.somebody_remembers(group.ranks, command.message)
                    slots = frozenset(slot for _, slot in group.batch)
                    others = [slots & written for lead, written in self.writing.values() if lead != group.lead]
                    assert not any(others), "two leads write to one slot"
                    self.writing[command.message.seq] = (group.lead, slots)
        self.inboxes[command.worker_id].append(command)

    def somebody_remembers(
        self, ranks: tuple[WorkerId, ...], order: DenoiseStep | DecodeSamples | SleepWorker | WakeWorker
    ) -> None:
        cached = {f.slot for f in self.core.flights.values() if f.is_cached}
        for item in order.items if isinstance(order, DenoiseStep) else ():
            known = {self.memory[rank].get(item.slot) for rank in ranks if not self.is_readmitted(rank, item.slot)}
            if item.slot in cached and item.denoising_step > 0:
                assert item.denoising_step in known, f"nobody remembers step {item.denoising_step} of slot {item.slot}"

    def is_readmitted(self, worker_id: WorkerId, slot: int) -> bool:
        return any(isinstance(c, AdmitTo | DismissFrom) and c.slot == slot for c in self.inboxes[worker_id])

    def hear(self, message: object) -> None:
        match message:
            case RequestReturned() | RequestFailed():
                self.answers[message.lease_id] += 1
                assert self.answers[message.lease_id] == 1, message
            case SampleScored():
                self.answers[message.lease_id] = 1
            case RequestCommitted():
                assert 0 < message.denoising_step <= NUM_STEPS
                assert message.commit_key == f"{message.request_id}.{message.denoising_step}"
                assert not self.answers[message.lease_id]
            case SampleDone():
                assert message.lease_id in self.held
            case NodeLeft():
                unanswered = [lease for lease in self.held if not self.answers[lease] and lease not in self.dropped]
                assert not unanswered
            case _:
                pass

    # ---- control ----

    @rule(
        group=st.integers(0, 2),
        count=st.integers(1, 3),
        version=st.sampled_from([1, 1, 2]),
        resumed=st.booleans(),
        threshold=st.sampled_from([0.0, 0.3]),
    )
    def assigns(self, group: int, count: int, version: int, resumed: bool, threshold: float) -> None:
        assignments = []
        for _ in range(count):
            self.names += 1
            lease = LeaseId(f"q{self.names}.1")
            resume = ResumePoint(denoising_step=1, commit_key="c") if resumed and not threshold else None
            made = request(f"q{self.names}", version, threshold)
            assignments.append(Assignment(lease_id=lease, request=made, resume=resume))
            if self.left_s is None:
                self.held[lease] = RequestId(f"q{self.names}")
        self.send(AssignWork(group_id=f"n-g{group}", assignments=tuple(assignments)))

    @precondition(lambda self: self.core.flights)
    @rule(data=st.data())
    def drops(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.core.flights)))
        self.dropped.add(self.core.flights[request_id].assignment.lease_id)
        self.send(DropRequests(request_ids=(request_id,)))

    @precondition(lambda self: self.core.flights)
    @rule(data=st.data())
    def assigns_again(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.core.flights)))
        lease = self.core.flights[request_id].assignment.lease_id
        renewed = LeaseId(f"{request_id}.{int(lease.rpartition('.')[2]) + data.draw(st.integers(0, 1))}")
        if renewed != lease and self.left_s is None:
            self.dropped.add(lease)
            self.held[renewed] = request_id
        again = Assignment(lease_id=renewed, request=self.core.flights[request_id].assignment.request)
        self.send(AssignWork(group_id="n-g0", assignments=(again,)))

    @rule(pause=st.booleans())
    def pauses_or_resumes(self, pause: bool) -> None:
        self.send(PauseNode() if pause else ResumeNode())

    @rule(ticks=st.integers(1, 3))
    def the_trainer_works(self, ticks: int) -> None:
        """The machine is parked, in time, unless something befalls it."""
        self.send(PauseNode())
        if not self.core.draining:
            self.live(ticks)

    @rule()
    def restarts(self) -> None:
        self.send(WelcomeNode(heartbeat_s=1.0, reward_url="http://r"))

    @rule(grace_s=st.sampled_from([0.5, 2.0, 30.0]))
    def notices(self, grace_s: float) -> None:
        by_s = self.now_s + grace_s - min(MARGIN_S_MAX, MARGIN_SHARE * grace_s)
        if self.left_s is None:
            self.leave_by_s = by_s if self.leave_by_s is None else min(by_s, self.leave_by_s)
        self.send(NoticeReceived(grace_s))

    # ---- the machine ----

    @rule(ticks=st.integers(1, 8))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now_s += TICK_S
            self.send(TimePassed())

    @rule(ticks=st.integers(1, 3))
    def all_goes_well(self, ticks: int) -> None:
        if not self.core.draining:
            self.live(ticks)

    @precondition(lambda self: self.todo)
    @rule(data=st.data())
    def carries_out(self, data: st.DataObject) -> None:
        self.carry_out(self.todo.pop(data.draw(st.integers(0, len(self.todo) - 1))))

    @precondition(lambda self: self.todo)
    @rule(data=st.data())
    def fails_at(self, data: st.DataObject) -> None:
        command = self.todo.pop(data.draw(st.integers(0, len(self.todo) - 1)))
        match command:
            case StoreProgress():
                del self.commits[command.request_id]
                self.send(ProgressStored(command.request_id, 0, ""))
            case StoreSample() | FetchInputs():
                name = command.assignment.request.request_id if isinstance(command, FetchInputs) else command.request_id
                self.send(AttemptFailed(name, "StoreError", "no answer"))
            case Judge():
                for request_id in command.request_ids:
                    self.send(AttemptFailed(request_id, "RewardError", "no answer"))
            case _:
                self.carry_out(command)

    @rule(slots=st.sets(st.integers(0, 3)), grace_s=st.sampled_from([0.0, 0.3, 5.0]))
    def slots_change(self, slots: set[int], grace_s: float) -> None:
        self.send(SlotsChanged(tuple(sorted(slots)), grace_s))

    @precondition(lambda self: self.inboxes)
    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.inboxes)))
        if self.may_fail_to_start(worker_id):
            self.lose(worker_id)

    @precondition(lambda self: any(self.inboxes.values()))
    @rule(data=st.data())
    def worker_answers(self, data: st.DataObject) -> None:
        self.answer(data.draw(st.sampled_from(sorted(name for name, box in self.inboxes.items() if box))))

    @precondition(lambda self: any(self.inboxes.values()))
    @rule(data=st.data(), error_class=st.sampled_from(["ModelError", "GroupError"]))
    def worker_fails(self, data: st.DataObject, error_class: str) -> None:
        worker_id = data.draw(st.sampled_from(sorted(name for name, box in self.inboxes.items() if box)))
        match self.inboxes[worker_id][0]:
            case SendToWorker() as command:
                seq = command.message.seq
                if error_class != "GroupError":
                    self.memory[worker_id] = dict.fromkeys(self.memory[worker_id], -1)
                self.writing.pop(seq, None) if self.writing.get(seq, ("",))[0] == worker_id else None
            case SeedWorker() as command if self.core.roster.failed_starts + 1 < FAILED_STARTS_MAX:
                seq, error_class = command.seq, "UnseededError"
            case FormGroup() as command if self.core._failed_joins + 1 < FAILED_JOINS_MAX:
                seq = command.seq
            case _:
                return
        self.inboxes[worker_id].popleft()
        self.send(WorkerFailed(worker_id=worker_id, seq=seq, error_class=error_class, error="x"))

    @precondition(lambda self: any(isinstance(box[0], SeedWorker) for box in self.inboxes.values() if box))
    @rule(data=st.data())
    def copies_wrong_weights(self, data: st.DataObject) -> None:
        loading = sorted(name for name, box in self.inboxes.items() if box and isinstance(box[0], SeedWorker))
        worker_id = data.draw(st.sampled_from(loading))
        if self.core.roster.digest and self.may_fail_to_start(worker_id):
            command = self.inboxes[worker_id].popleft()
            self.send(WorkerSeeded(worker_id=worker_id, seq=command.seq, digest="torn"))  # type: ignore[attr-defined]

    def may_fail_to_start(self, worker_id: WorkerId) -> bool:
        """Processes that end too often before they are seeded end the node: a life of its own, tested elsewhere."""
        is_starting = worker_id not in self.seeded
        return not is_starting or self.core.roster.failed_starts + 1 < FAILED_STARTS_MAX

    def lose(self, worker_id: WorkerId) -> None:
        if worker_id not in self.inboxes:
            return
        del self.inboxes[worker_id]
        self.seeded.discard(worker_id)
        self.asleep.discard(worker_id)
        self.writing = {seq: entry for seq, entry in self.writing.items() if entry[0] != worker_id}
        self.todo = [c for c in self.todo if getattr(c, "worker_id", None) != worker_id]
        self.send(WorkerDied(worker_id))

    def answer(self, worker_id: WorkerId) -> None:
        match self.inboxes[worker_id].popleft():
            case "start":
                self.send(WorkerReady(worker_id=worker_id, pid=1))
            case SeedWorker() as command:
                self.seeded.add(worker_id)
                self.send(WorkerSeeded(worker_id=worker_id, seq=command.seq, digest=DIGEST))
            case FormGroup() as command:
                self.send(GroupJoined(worker_id=worker_id, seq=command.seq))
            case AdmitTo() as command:
                self.memory[worker_id][command.slot] = 0
            case DismissFrom() as command:
                self.memory[worker_id].pop(command.slot, None)
            case SendToWorker(message=message):
                if self.writing.get(message.seq, ("",))[0] == worker_id:
                    del self.writing[message.seq]
                self.obey(worker_id, message)

    def obey(self, worker_id: WorkerId, message: DenoiseStep | DecodeSamples | SleepWorker | WakeWorker) -> None:
        match message:
            case SleepWorker():
                self.asleep.add(worker_id)
                self.send(WorkerSlept(worker_id=worker_id, seq=message.seq))
            case WakeWorker():
                self.asleep.discard(worker_id)
                self.send(WorkerWoke(worker_id=worker_id, seq=message.seq))
            case _:
                assert worker_id not in self.asleep, "it would compute in its sleep"
                if isinstance(message, DenoiseStep):
                    for item in message.items:
                        assert item.slot in self.memory[worker_id], "it holds no such request"
                        self.memory[worker_id][item.slot] = item.denoising_step + 1
                    self.send(StepDone(worker_id=worker_id, seq=message.seq, elapsed_s=0.05))
                else:
                    pngs = tuple(b"" for _ in message.slots)
                    self.send(SamplesDecoded(worker_id=worker_id, seq=message.seq, pngs=pngs, elapsed_s=0.05))

    def carry_out(self, command: Command) -> None:
        match command:
            case KillWorker() | ReleaseWorker():
                self.lose(command.worker_id)
            case FetchInputs():
                self.send(InputsFetched(command.assignment.request.request_id))
            case StoreSample():
                self.send(SampleStored(command.request_id, "s", "d"))
            case StoreProgress():
                del self.commits[command.request_id]
                key = f"{command.request_id}.{command.denoising_step}"
                self.send(ProgressStored(command.request_id, command.denoising_step, key))
            case Judge():
                for request_id in command.request_ids:
                    self.send(SampleJudged(request_id, 1.0, True, ""))
            case _:
                pass

    # ---- what must hold ----

    @invariant()
    def slots_partition_the_arena(self) -> None:
        core = self.core
        written = [
            slot
            for group in core.groups.values()
            for request_id, slot in group.batch
            if request_id not in core.flights or core.flights[request_id].slot != slot
        ]
        slots = core.free_slots + [flight.slot for flight in core.flights.values()] + written
        assert sorted(slots) == list(range(SLOTS))

    @invariant()
    def no_request_is_in_two_batches_and_batches_are_alike(self) -> None:
        flights = self.core.flights
        batched = [entry for group in self.core.groups.values() for entry in group.batch]
        assert len(batched) == len(set(batched))
        working = {(f.request_id, f.slot) for f in flights.values() if f.stage is Stage.WORKING}
        assert working <= set(batched)
        for group in self.core.groups.values():
            policies = {flights[r].assignment.request.policy for r, slot in group.batch if r in flights}
            assert len(policies) <= 1 or any(flights[r].slot != slot for r, slot in group.batch if r in flights)
            assert len(group.batch) <= self.core.max_batch

    @invariant()
    def groups_are_disjoint_and_their_idle_ranks_alive_and_seeded(self) -> None:
        core = self.core
        ranks = [worker_id for group in core.groups.values() for worker_id in group.ranks]
        assert len(ranks) == len(set(ranks))
        for group in core.groups.values():
            assert group.degree in core.degrees
            if group.takes_work and not core.ended:
                assert self.seeded.issuperset(group.ranks)

    @invariant()
    def a_parked_machine_leaves_the_devices_alone(self) -> None:
        if self.core.heartbeat().paused and not self.core.ended:  # what has ended says nothing any more
            at_work = (FormGroup, SeedWorker, SendToWorker)
            assert not any(isinstance(command, at_work) for box in self.inboxes.values() for command in box)
            if self.core.sleeps:
                assert self.seeded <= self.asleep

    @invariant()
    def every_lease_is_held_or_answered_for(self) -> None:
        held = {flight.assignment.lease_id for flight in self.core.flights.values()}
        for lease in self.held:
            assert lease in held or self.answers[lease] or lease in self.dropped, lease

    @invariant()
    def a_drain_ends_in_time(self) -> None:
        if self.leave_by_s is not None and self.left_s is None:
            assert self.now_s < self.leave_by_s + TICK_S

    def teardown(self) -> None:
        """With all well, a machine under notice leaves in time and says so; nothing is left without an answer."""
        if not hasattr(self, "core"):
            return
        if self.left_s is None and not self.core.draining:
            self.send(ResumeNode())  # a slot whose worker died while the trainer had its device is filled afterwards
            self.live(80)
            self.no_slot_is_left_out()
            self.nobody_holds_what_is_gone()
        self.notices(2.0)
        self.live(30)
        assert self.left_s is not None
        assert all(self.answers[lease] or lease in self.dropped for lease in self.held)

    def live(self, ticks: int) -> None:
        """All well: everybody does what it is told, a tick at a time."""
        for _ in range(ticks):
            self.time_passes(1)
            for _ in range(len(self.todo)):
                if self.todo:
                    self.carry_out(self.todo.pop(0))
            for worker_id in sorted(self.inboxes):
                while self.inboxes.get(worker_id):
                    self.answer(worker_id)

    def nobody_holds_what_is_gone(self) -> None:
        held = {(w, f.slot) for f in self.core.flights.values() for w in f.holders}
        assert {(w, slot) for w in self.inboxes for slot in self.memory[w]} <= held

    def no_slot_is_left_out(self) -> None:
        core = self.core
        groups = [group.slots for group in core.groups.values() if group.state is not GroupState.BROKEN]
        assert sorted(groups) == sorted(plan_groups(core.roster.present, groups, core.degrees))
        assert core.is_ready
        assert not core.roster.leave_by_s
        spare = [w for w in core.roster.workers.values() if w.slot is None]
        assert len(spare) == core.roster.standbys
        assert all(worker.state is WorkerState.STANDBY for worker in spare)


NodeMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_any_life_of_a_machine_answers_for_every_request_once_and_in_time = NodeMachine.TestCase
