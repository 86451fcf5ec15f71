"""Random lives of one machine: whatever happens in whatever order, each request is answered for once and a drain ends in time."""

from __future__ import annotations

from collections import Counter

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
    StepDone,
    WelcomeNode,
    WorkerFailed,
    WorkerReady,
)
from spot_runtime.node.commands import (
    Command,
    EndNode,
    FetchInputs,
    Judge,
    KillWorker,
    SendToControl,
    SendToWorker,
    StartWorker,
    StoreProgress,
    StoreSample,
)
from spot_runtime.node.core import FAILED_STARTS_MAX, NodeCore, NodeEvent, WorkerState
from spot_runtime.node.drain import MARGIN_S_MAX, MARGIN_SHARE
from spot_runtime.node.events import (
    AttemptFailed,
    InputsFetched,
    NoticeReceived,
    ProgressStored,
    SampleJudged,
    SampleStored,
    TimePassed,
    WorkerDied,
)
from spot_runtime.node.flight import Stage
from spot_runtime.types import JobId, LeaseId, NodeId, Op, PolicyRef, Pool, RequestId, RunId, WorkerId

NUM_STEPS = 4
SLOTS = 9
TICK_S = 0.1


def request(name: str, version: int = 1) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(name),
        job_id=JobId("j"),
        run_id=RunId("r"),
        op=Op.ROLLOUT,
        prompt_id="p",
        prompt="a cube",
        row_json="{}",
        seed=1,
        sde_window=(0, 2),
        params=SamplingParams(height=64, width=64, num_steps=NUM_STEPS, noise_level=0.7),
        policy=PolicyRef(version, "k", "d"),
        embedding_key="e",
    )


class NodeMachine(RuleBasedStateMachine):
    """Commands of the core wait in `todo` until a rule carries one out, in any order but that of one worker's batches."""

    @initialize(workers=st.integers(1, 3), every=st.sampled_from([None, 0, 1, 2]))
    def start(self, workers: int, every: int | None) -> None:
        self.now_s = 100.0
        self.core = NodeCore(
            NodeId("n"),
            Pool.SPOT,
            workers=workers,
            max_batch=2,
            arena_slots=SLOTS,
            step_deadline_s=5.0,
            start_deadline_s=5.0,
            now_s=self.now_s,
            commit_every_steps=every,
        )
        self.todo: list[Command] = []
        self.held: dict[LeaseId, RequestId] = {}
        self.answers: Counter[LeaseId] = Counter()
        self.dropped: set[LeaseId] = set()
        self.commits: dict[RequestId, int] = {}
        self.names = 0
        self.leave_by_s: float | None = None
        self.left_s: float | None = None
        self.take(self.core.start())
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
                case StoreProgress():
                    assert command.request_id not in self.commits, "two commits of one request at a time"
                    self.commits[command.request_id] = command.denoising_step
                    self.todo.append(command)
                case _:
                    self.todo.append(command)

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

    @rule(group=st.integers(0, 2), count=st.integers(1, 3), version=st.sampled_from([1, 1, 2]), resumed=st.booleans())
    def assigns(self, group: int, count: int, version: int, resumed: bool) -> None:
        assignments = []
        for _ in range(count):
            self.names += 1
            lease = LeaseId(f"q{self.names}.1")
            resume = ResumePoint(denoising_step=1, commit_key="c") if resumed else None
            assignments.append(Assignment(lease_id=lease, request=request(f"q{self.names}", version), resume=resume))
            if self.left_s is None:
                self.held[lease] = RequestId(f"q{self.names}")
        self.send(AssignWork(group_id=f"n-w{group}", assignments=tuple(assignments)))

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
        if renewed != lease:
            self.dropped.add(lease)
            self.held[renewed] = request_id
        again = Assignment(lease_id=renewed, request=self.core.flights[request_id].assignment.request)
        self.send(AssignWork(group_id="n-w0", assignments=(again,)))

    @rule(pause=st.booleans())
    def pauses_or_resumes(self, pause: bool) -> None:
        self.send(PauseNode() if pause else ResumeNode())

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
            case SendToWorker():
                self.send(
                    WorkerFailed(
                        worker_id=command.worker_id, seq=command.message.seq, error_class="ModelError", error="nan"
                    )
                )
            case _:
                self.carry_out(command)

    @rule(index=st.integers(0, 2))
    def worker_dies(self, index: int) -> None:
        self.lose(WorkerId(f"n-w{index}"))

    def lose(self, worker_id: WorkerId) -> None:
        """A process that ends too often before it is ready ends the node: a life of its own, tested elsewhere."""
        worker = self.core.workers.get(worker_id)
        if worker is not None and worker.failed_starts + 1 >= FAILED_STARTS_MAX:
            return
        self.todo = [c for c in self.todo if getattr(c, "worker_id", None) != worker_id]
        self.send(WorkerDied(worker_id))

    def carry_out(self, command: Command) -> None:
        match command:
            case StartWorker():
                if self.core.workers[command.worker_id].state is WorkerState.STARTING:
                    self.send(WorkerReady(worker_id=command.worker_id, pid=1))
            case KillWorker():
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
            case SendToWorker(message=DenoiseStep()):
                self.send(StepDone(worker_id=command.worker_id, seq=command.message.seq, elapsed_s=0.05))
            case SendToWorker(message=DecodeSamples()):
                pngs = tuple(b"" for _ in command.message.slots)  # type: ignore[union-attr]
                seq = command.message.seq
                self.send(SamplesDecoded(worker_id=command.worker_id, seq=seq, pngs=pngs, elapsed_s=0.05))
            case _:
                pass

    # ---- what must hold ----

    @invariant()
    def slots_partition_the_arena(self) -> None:
        core = self.core
        written = [
            slot
            for worker in core.workers.values()
            for request_id, slot in worker.batch
            if request_id not in core.flights or core.flights[request_id].slot != slot
        ]
        slots = core.free_slots + [flight.slot for flight in core.flights.values()] + written
        assert sorted(slots) == list(range(SLOTS))

    @invariant()
    def no_request_is_in_two_batches_and_batches_are_alike(self) -> None:
        flights = self.core.flights
        batched = [entry for worker in self.core.workers.values() for entry in worker.batch]
        assert len(batched) == len(set(batched))
        working = {(f.request_id, f.slot) for f in flights.values() if f.stage is Stage.WORKING}
        assert working <= set(batched)
        for worker in self.core.workers.values():
            policies = {flights[r].assignment.request.policy for r, slot in worker.batch if r in flights}
            assert len(policies) <= 1 or any(flights[r].slot != slot for r, slot in worker.batch if r in flights)
            assert len(worker.batch) <= self.core.max_batch

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
        self.notices(2.0)
        for _ in range(30):
            self.time_passes(1)
            for _ in range(len(self.todo)):
                if self.todo:
                    self.carry_out(self.todo.pop(0))
        assert self.left_s is not None
        assert all(self.answers[lease] or lease in self.dropped for lease in self.held)


NodeMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_any_life_of_a_machine_answers_for_every_request_once_and_in_time = NodeMachine.TestCase
