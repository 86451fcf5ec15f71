"""A node that is paused for training sends its workers to sleep, says so when all of them do, and works with none before it woke up."""

from __future__ import annotations

import pytest
from node_processes import answers_to, settle
from test_node_machine import request

from spot_runtime.messages import (
    Assignment,
    AssignWork,
    DenoiseStep,
    NodeHeartbeat,
    NodeLeft,
    PauseNode,
    PullWork,
    RequestReturned,
    ResumeNode,
    SleepWorker,
    StepDone,
    WakeWorker,
    WelcomeNode,
    WorkerSlept,
    WorkerWoke,
)
from spot_runtime.node.commands import (
    Command,
    FormGroup,
    KillWorker,
    SeedWorker,
    SendToControl,
    SendToWorker,
    StartWorker,
    StoreProgress,
)
from spot_runtime.node.core import NodeCore
from spot_runtime.node.events import (
    InputsFetched,
    NoticeReceived,
    ProgressStored,
    SlotsChanged,
    TimePassed,
    WorkerDied,
)
from spot_runtime.node.group import GroupState
from spot_runtime.types import GroupId, LeaseId, NodeId, Pool, RequestId, WorkerId

W0, W1 = WorkerId("n-w0"), WorkerId("n-w1")
G0, A = GroupId("n-g0"), RequestId("a")


def machine(slots: int = 1, *, sleeps: bool = True) -> NodeCore:
    node = NodeCore(
        NodeId("n"),
        Pool.RESERVED,
        workers=slots,
        max_batch=2,
        arena_slots=16,
        step_deadline_s=60.0,
        start_deadline_s=60.0,
        now_s=0.0,
        degrees=(1, 2),
        standbys=0,
        sleeps=sleeps,
    )
    settle(node, node.start(0.0), 0.0)
    node.handle(WelcomeNode(heartbeat_s=1.0, reward_url=""), 0.0)
    return node


def give(node: NodeCore) -> list[Command]:
    assignment = Assignment(lease_id=LeaseId("a.1"), request=request("a"))
    node.handle(AssignWork(group_id=G0, assignments=(assignment,)), 0.0)
    return node.handle(InputsFetched(A), 0.0)


def told(commands: list[Command]) -> list[tuple[WorkerId, str]]:
    """What workers are told, with whom."""
    return [(c.worker_id, type(c.message).__name__) for c in commands if isinstance(c, SendToWorker)]


def parked(commands: list[Command]) -> bool:
    """Whether control is told that the trainer may have the devices."""
    beats = [c.message for c in commands if isinstance(c, SendToControl) and isinstance(c.message, NodeHeartbeat)]
    return any(beat.paused for beat in beats)


def slept(node: NodeCore, worker_id: WorkerId = W0) -> list[Command]:
    return node.handle(WorkerSlept(worker_id=worker_id, seq=node.groups[G0].seq), 0.0)


def woke(node: NodeCore, worker_id: WorkerId = W0) -> list[Command]:
    return node.handle(WorkerWoke(worker_id=worker_id, seq=node.groups[G0].seq), 0.0)


def asleep(slots: int = 1) -> NodeCore:
    """A machine that took a denoising step of one request and sleeps."""
    node = machine(slots)
    give(node)
    for rank in node.groups[G0].ranks:
        node.handle(StepDone(worker_id=rank, seq=node.groups[G0].seq, elapsed_s=0.1), 0.0)
    node.handle(PauseNode(), 0.0)
    for rank in node.groups[G0].ranks:
        node.handle(StepDone(worker_id=rank, seq=node.groups[G0].seq, elapsed_s=0.1), 0.0)
    for rank in node.groups[G0].ranks:
        slept(node, rank)
    assert node.groups[G0].state is GroupState.ASLEEP
    return node


def test_the_trainer_has_the_devices_once_the_step_in_hand_is_done_and_all_ranks_sleep() -> None:
    node = machine(slots=2)
    give(node)
    assert not parked(node.handle(PauseNode(), 0.0))
    done = [node.handle(StepDone(worker_id=rank, seq=node.groups[G0].seq, elapsed_s=0.1), 0.0) for rank in (W0, W1)]
    assert told(done[0]) == []
    assert told(done[1]) == [(W0, "SleepWorker"), (W1, "SleepWorker")]
    assert not parked(done[1])
    assert not parked(slept(node, W0))
    assert parked(slept(node, W1))
    assert node.heartbeat().degrees == (2,)
    assert node.is_ready


def test_a_node_that_sleeps_already_says_at_once_which_pause_it_obeys() -> None:
    node = asleep()
    (beat,) = [c.message for c in node.handle(PauseNode(number=7), 1.0) if isinstance(c, SendToControl)]
    assert isinstance(beat, NodeHeartbeat)
    assert (beat.paused, beat.pause) == (True, 7)
    assert node.handle(PauseNode(number=7), 2.0) == []


def test_without_sleep_a_paused_node_is_parked_at_once() -> None:
    commands = machine(sleeps=False).handle(PauseNode(), 0.0)
    assert parked(commands)
    assert told(commands) == []


def test_after_training_the_ranks_wake_up_and_go_on_at_their_denoising_step() -> None:
    node = asleep(slots=2)
    assert told(node.handle(ResumeNode(), 0.0)) == [(W0, "WakeWorker"), (W1, "WakeWorker")]
    assert not node.heartbeat().paused
    assert told(woke(node, W1)) == []
    steps = [c.message for c in woke(node, W0) if isinstance(c, SendToWorker)]
    assert [item.denoising_step for step in steps if isinstance(step, DenoiseStep) for item in step.items] == [2, 2]


def test_work_that_comes_while_the_trainer_works_waits_and_nothing_is_asked_for() -> None:
    node = machine()
    node.handle(PauseNode(), 0.0)
    slept(node)
    commands = give(node) + node.handle(TimePassed(), 30.0)
    assert told(commands) == []
    assert not any(isinstance(c, SendToControl) and isinstance(c.message, PullWork) for c in commands)
    assert node.heartbeat().paused


def test_a_change_of_mind_waits_for_the_answer() -> None:
    node = machine()
    assert told(node.handle(PauseNode(), 0.0)) == [(W0, "SleepWorker")]
    assert told(node.handle(ResumeNode(), 0.0)) == []
    assert told(slept(node)) == [(W0, "WakeWorker")]
    assert told(node.handle(PauseNode(), 0.0)) == []
    assert told(woke(node)) == [(W0, "SleepWorker")]
    assert parked(slept(node))


def test_control_that_restarts_during_training_finds_the_node_asleep() -> None:
    node = asleep()
    welcome = WelcomeNode(heartbeat_s=1.0, reward_url="", paused=True)
    assert told(node.handle(PauseNode(), 0.0) + node.handle(welcome, 0.0)) == []
    assert node.heartbeat().paused
    welcome = WelcomeNode(heartbeat_s=1.0, reward_url="", paused=False)
    assert told(node.handle(welcome, 0.0)) == [(W0, "WakeWorker")]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_worker_that_dies_in_its_sleep_or_as_it_wakes_up_is_replaced_and_its_request_goes_on(resumed: bool) -> None:
    node = asleep()
    if resumed:
        node.handle(ResumeNode(), 0.0)
    said = settle(node, node.handle(WorkerDied(W0), 0.0), 0.0)
    if not resumed:
        assert not any(isinstance(c, SeedWorker) for c in said)
        assert node.heartbeat().paused
        assert node.flights[A].denoising_step == 2
        said = settle(node, node.handle(ResumeNode(), 0.0), 0.0)
    assert node.roster.serving()[0].worker_id == W1
    steps = [c.message for c in said if isinstance(c, SendToWorker)]
    assert [item.denoising_step for step in steps if isinstance(step, DenoiseStep) for item in step.items] == [2]
    assert node.lost_steps == 0


def test_while_a_worker_loads_the_node_is_not_parked() -> None:
    node = machine()
    (start,) = [c for c in node.handle(WorkerDied(W0), 0.0) if isinstance(c, StartWorker)]
    (seed,) = node.handle(answers_to(start)[0], 0.0)
    assert isinstance(seed, SeedWorker)
    assert not parked(node.handle(PauseNode(), 0.0))
    assert parked(settle(node, [seed], 0.0))


def test_a_survivor_of_a_group_that_slept_is_woken_before_it_works_alone() -> None:
    node = asleep(slots=2)
    lost = node.handle(SlotsChanged((0,), 5.0), 0.0)
    said = settle(node, lost, 0.0)
    assert not any(isinstance(c, SendToWorker) and not isinstance(c.message, SleepWorker) for c in said)
    node.handle(WorkerDied(W1), 0.0)
    assert node.heartbeat().paused
    said = node.handle(ResumeNode(), 0.0)
    assert told(said) == [(W0, "WakeWorker")]
    assert told(woke(node))[-1] == (W0, "DenoiseStep")


def test_a_survivor_that_joins_another_group_after_training_is_woken_all_the_same() -> None:
    """Training ends before the new group has met, so it never slept itself."""
    node = asleep(slots=2)
    (joined,) = [answers_to(c)[0] for c in node.handle(WorkerDied(W1), 0.0) if isinstance(c, FormGroup)]
    node.handle(ResumeNode(), 0.0)
    assert told(node.handle(joined, 0.0)) == [(W0, "WakeWorker")]
    assert told(woke(node)) == [(W0, "DenoiseStep")]


def test_an_answer_of_an_earlier_generation_wakes_nobody() -> None:
    """W1 dies as both wake up; W0 is sent to sleep again before its old answer comes."""
    node = asleep(slots=2)
    node.handle(ResumeNode(), 0.0)
    late = WorkerWoke(worker_id=W0, seq=node.groups[G0].seq)
    node.handle(PauseNode(), 0.0)
    (joined,) = [answers_to(c)[0] for c in node.handle(WorkerDied(W1), 0.0) if isinstance(c, FormGroup)]
    assert told(node.handle(joined, 0.0)) == [(W0, "SleepWorker")]
    node.handle(late, 0.0)
    assert node.roster.workers[W0].is_asleep
    assert node.groups[G0].state is GroupState.DOZING


def test_a_notice_in_their_sleep_commits_without_them() -> None:
    node = asleep()
    commands = node.handle(NoticeReceived(10.0), 0.0)
    assert told(commands) == []
    assert [(c.request_id, c.denoising_step) for c in commands if isinstance(c, StoreProgress)] == [(A, 2)]
    said = [c.message for c in node.handle(ProgressStored(A, 2, "key"), 0.0) if isinstance(c, SendToControl)]
    assert [(m.denoising_step, m.commit_key) for m in said if isinstance(m, RequestReturned)] == [(2, "key")]
    assert any(isinstance(m, NodeLeft) for m in said)


@pytest.mark.parametrize("message", [SleepWorker, WakeWorker])
def test_a_worker_that_neither_sleeps_nor_wakes_up_is_killed_after_the_deadline(
    message: type[SleepWorker | WakeWorker],
) -> None:
    node = machine()
    node.handle(PauseNode(), 0.0)
    if message is WakeWorker:
        slept(node)
        node.handle(ResumeNode(), 0.0)
    assert KillWorker(W0) not in node.handle(TimePassed(), 59.0)
    assert KillWorker(W0) in node.handle(TimePassed(), 61.0)
