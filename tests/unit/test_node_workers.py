"""What a node does about workers that die, refuse or forget: policies, admissions, starts."""

from __future__ import annotations

import msgspec
from node_processes import settle
from test_node_machine import request

from spot_runtime.messages import (
    RESIDENT_POLICIES_MAX,
    Assignment,
    AssignWork,
    DenoiseStep,
    DropRequests,
    GenerationRequest,
    NodeHello,
    NodeNoticed,
    PullWork,
    Refused,
    RequestFailed,
    ResumeNode,
    ResumePoint,
    SampleDone,
    SamplesDecoded,
    StepDone,
    WelcomeNode,
    WorkerFailed,
)
from spot_runtime.node.commands import AdmitTo, BindPolicy, Command, FailNode, SendToControl, SendToWorker, StartWorker
from spot_runtime.node.core import HELLO_AGAIN_S, PULL_AGAIN_S, NodeCore
from spot_runtime.node.events import InputsFetched, NoticeReceived, SampleStored, TimePassed, WorkerDied
from spot_runtime.node.roster import FAILED_STARTS_MAX
from spot_runtime.types import GroupId, LeaseId, NodeId, PolicyRef, Pool, RequestId, WorkerId

W0, G0 = WorkerId("n-w0"), GroupId("n-g0")


def core(max_batch: int = 2) -> NodeCore:
    return NodeCore(
        NodeId("n"),
        Pool.SPOT,
        workers=1,
        max_batch=max_batch,
        arena_slots=16,
        step_deadline_s=60.0,
        start_deadline_s=60.0,
        now_s=0.0,
    )


def machine(max_batch: int = 2) -> NodeCore:
    node = core(max_batch)
    settle(node, node.start(0.0), 0.0)
    node.handle(WelcomeNode(heartbeat_s=1.0, reward_url=""), 0.0)
    return node


def give(node: NodeCore, made: GenerationRequest) -> list[Command]:
    assignment = Assignment(lease_id=LeaseId(f"{made.request_id}.1"), request=made)
    node.handle(AssignWork(group_id=G0, assignments=(assignment,)), 0.0)
    return node.handle(InputsFetched(made.request_id), 0.0)


def with_policy(name: str, version: int) -> GenerationRequest:
    return msgspec.structs.replace(request(name), policy=PolicyRef(version, f"k{version}", "d"))


def fail_batch(node: NodeCore, error_class: str) -> list[Command]:
    failed = WorkerFailed(worker_id=W0, seq=node.groups[G0].seq, error_class=error_class, error="x")
    return settle(node, node.handle(failed, 0.0), 0.0)


def test_a_policy_that_the_worker_no_longer_keeps_is_bound_again() -> None:
    node = machine(max_batch=1)
    bound: list[int] = []
    for version in (*range(1, RESIDENT_POLICIES_MAX + 2), 1):
        name = f"r{len(bound)}"
        commands = give(node, with_policy(name, version))
        bound += [c.policy.version for c in commands if isinstance(c, BindPolicy)]
        node.handle(DropRequests(request_ids=(RequestId(name),)), 0.0)
        node.handle(StepDone(worker_id=W0, seq=node.groups[G0].seq, elapsed_s=0.1), 0.0)
    assert bound == [*range(1, RESIDENT_POLICIES_MAX + 2), 1]


def test_a_refused_admission_is_given_up_and_its_mates_step_again() -> None:
    node = machine()
    give(node, request("a"))
    node.handle(StepDone(worker_id=W0, seq=node.groups[G0].seq, elapsed_s=0.1), 0.0)
    give(node, request("b"))
    node.handle(StepDone(worker_id=W0, seq=node.groups[G0].seq, elapsed_s=0.1), 0.0)
    slot = node.flights[RequestId("b")].slot
    refused = WorkerFailed(worker_id=W0, seq=-1, error_class="InputError", error="bad", slot=slot)
    said = [c.message for c in node.handle(refused, 0.0) if isinstance(c, SendToControl)]
    assert [m.request_id for m in said if isinstance(m, RequestFailed)] == ["b"]
    commands = fail_batch(node, "ClusterError")
    assert node.flights[RequestId("a")].denoising_step == 2
    assert [c.request_id for c in commands if isinstance(c, AdmitTo)] == ["a"]
    steps = [c.message for c in commands if isinstance(c, SendToWorker)]
    assert [item.denoising_step for step in steps if isinstance(step, DenoiseStep) for item in step.items] == [2]


def test_a_request_that_fails_again_and_again_goes_back_with_its_error() -> None:
    node = machine()
    give(node, request("a"))
    said = [m for _ in range(3) for m in fail_batch(node, "ModelError")]
    failures = [c.message for c in said if isinstance(c, SendToControl) and isinstance(c.message, RequestFailed)]
    assert [(f.request_id, f.error_class) for f in failures] == [("a", "ModelError")]
    assert not node.flights


def test_a_step_cached_request_starts_over_when_its_worker_is_gone() -> None:
    node = machine()
    made = request("a")
    give(node, msgspec.structs.replace(made, params=msgspec.structs.replace(made.params, cache_threshold=0.1)))
    node.handle(StepDone(worker_id=W0, seq=node.groups[G0].seq, elapsed_s=0.1), 0.0)
    assert node.flights[RequestId("a")].denoising_step == 1
    node.handle(WorkerDied(W0), 0.0)
    assert node.flights[RequestId("a")].denoising_step == 0


def test_a_worker_that_never_gets_ready_ends_the_node_after_a_bounded_number_of_starts() -> None:
    node = core()
    commands, starts = node.start(0.0), 0
    while not (fails := [c for c in commands if isinstance(c, FailNode)]):
        started = [c for c in commands if isinstance(c, StartWorker)]
        starts += len(started)
        (only,) = started
        commands = node.handle(WorkerDied(only.worker_id), 0.0)
    assert (starts, len(fails)) == (FAILED_STARTS_MAX, 1)


def test_a_node_under_notice_says_so_again_after_its_hello() -> None:
    node = machine()
    give(node, request("a"))
    node.handle(NoticeReceived(30.0), 0.0)
    commands = node.handle(Refused(error_class="UnknownNodeError", error=""), 1.0)
    said = [type(c.message) for c in commands if isinstance(c, SendToControl)]
    assert said[:2] == [NodeHello, NodeNoticed]


def test_refusals_that_piled_up_are_answered_by_one_hello() -> None:
    node = machine()
    said = [c for _ in range(20) for c in node.handle(Refused(error_class="UnknownNodeError", error=""), 1.0)]
    later = node.handle(Refused(error_class="UnknownNodeError", error=""), 1.0 + HELLO_AGAIN_S)
    hellos = [c for c in (*said, *later) if isinstance(c, SendToControl) and isinstance(c.message, NodeHello)]
    assert len(hellos) == 2


def pulls(commands: list[Command]) -> list[tuple[int, int]]:
    """(number, room) of each."""
    said = [c.message for c in commands if isinstance(c, SendToControl)]
    return [(message.number, message.room) for message in said if isinstance(message, PullWork)]


def test_a_question_keeps_its_number_until_it_is_answered() -> None:
    node = core()
    settle(node, node.start(0.0), 0.0)
    welcome = WelcomeNode(heartbeat_s=1.0, reward_url="")
    ((first, room),) = pulls(node.handle(welcome, 0.0))
    assert room == 2
    assert pulls(node.handle(TimePassed(), PULL_AGAIN_S + 0.1)) == [(first, 2)]
    assert pulls(node.handle(welcome, 6.0)) == [(first, 2)]  # control is back, and may never have heard it
    lease = Assignment(lease_id=LeaseId("a.1"), request=request("a"))
    answer = AssignWork(group_id=G0, assignments=(lease,), number=first)
    ((second, room),) = pulls(node.handle(answer, 6.0))
    assert (second > first, room) == (True, 1)
    assert pulls(node.handle(answer, 6.0)) == []  # the same answer again settles nothing
    assert pulls(node.handle(TimePassed(), 12.0)) == [(second, 1)]
    assert len(node.flights) == 1


def test_a_later_process_of_the_same_name_asks_with_greater_numbers() -> None:
    def first_number(now_s: float) -> int:
        node = NodeCore(
            NodeId("n"),
            Pool.SPOT,
            workers=1,
            max_batch=2,
            arena_slots=16,
            step_deadline_s=60.0,
            start_deadline_s=60.0,
            now_s=now_s,
        )
        settle(node, node.start(now_s), now_s)
        return pulls(node.handle(WelcomeNode(heartbeat_s=1.0, reward_url=""), now_s))[0][0]

    assert first_number(11.0) - first_number(10.0) == 1000


def denoised_and_told(node: NodeCore, names: tuple[str, ...]) -> dict[str, SampleDone]:
    """Decodes and stores; what control hears of each."""
    node.handle(SamplesDecoded(worker_id=W0, seq=node.groups[G0].seq, pngs=(b"",) * len(names), elapsed_s=0.5), 0.0)
    said = [c for name in names for c in node.handle(SampleStored(RequestId(name), "key", "digest"), 0.0)]
    done = [c.message for c in said if isinstance(c, SendToControl) and isinstance(c.message, SampleDone)]
    return {message.request_id: message for message in done}


def test_a_sample_says_how_many_forwards_and_how_much_time_it_took() -> None:
    """Both share each step's and the decoding's time; b does without two of its forwards."""
    node = machine()
    made = [cached(name) for name in ("a", "b")]
    for asked in made:
        node.handle(
            AssignWork(
                group_id=G0, assignments=(Assignment(lease_id=LeaseId(f"{asked.request_id}.1"), request=asked),)
            ),
            0.0,
        )
    node.paused = True
    for asked in made:
        node.handle(InputsFetched(asked.request_id), 0.0)
    node.handle(ResumeNode(), 0.0)
    for step in range(made[0].params.num_steps):
        forwards = (True, step not in (1, 2))
        node.handle(StepDone(worker_id=W0, seq=node.groups[G0].seq, elapsed_s=0.25, forwards=forwards), 0.0)
    done = denoised_and_told(node, ("a", "b"))
    steps = made[0].params.num_steps
    assert {name: message.effective_steps for name, message in done.items()} == {"a": steps, "b": steps - 2}
    assert {message.busy_s for message in done.values()} == {(0.25 * steps + 0.5) / 2}


def test_without_a_step_cache_all_steps_are_forwards_also_those_of_another_node() -> None:
    node = machine(max_batch=1)
    made = request("a")
    resume = ResumePoint(denoising_step=2, commit_key="k")
    given = Assignment(lease_id=LeaseId("a.2"), request=made, resume=resume)
    node.handle(AssignWork(group_id=G0, assignments=(given,)), 0.0)
    node.handle(InputsFetched(RequestId("a")), 0.0)
    for _ in range(made.params.num_steps - 2):
        node.handle(StepDone(worker_id=W0, seq=node.groups[G0].seq, elapsed_s=0.25), 0.0)
    told = denoised_and_told(node, ("a",))["a"]
    assert told.effective_steps == made.params.num_steps
    assert told.busy_s == 0.25 * (made.params.num_steps - 2) + 0.5


def test_a_sample_starts_when_it_is_worked_on_not_when_it_is_fetched() -> None:
    node = machine(max_batch=1)
    give(node, request("a"))
    give(node, request("b"))
    steps = request("a").params.num_steps
    for step in range(steps):
        node.handle(StepDone(worker_id=W0, seq=node.groups[G0].seq, elapsed_s=0.25), 1.0 + step)
    first = node.flights[RequestId("a")].started_s
    node.handle(SamplesDecoded(worker_id=W0, seq=node.groups[G0].seq, pngs=(b"",), elapsed_s=0.25), 50.0)
    assert (first, node.flights[RequestId("b")].started_s) == (0.0, 50.0)


def test_forwards_of_a_cached_sample_that_starts_over_count_once() -> None:
    node = machine(max_batch=1)
    give(node, cached("a"))
    node.handle(StepDone(worker_id=W0, seq=node.groups[G0].seq, elapsed_s=0.1, forwards=(True,)), 0.0)
    node.handle(WorkerDied(W0), 0.0)
    flight = node.flights[RequestId("a")]
    assert (flight.denoising_step, flight.forwards, flight.busy_s) == (0, 0, 0.1)


def cached(name: str) -> GenerationRequest:
    made = request(name)
    return msgspec.structs.replace(made, params=msgspec.structs.replace(made.params, cache_threshold=0.1))
