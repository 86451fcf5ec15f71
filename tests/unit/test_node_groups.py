"""Sequence-parallel groups of one machine: how they are planned, reshaped between steps, broken and staffed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_processes import DIGEST, answers_to, settle
from test_node_machine import NUM_STEPS, request

from spot_runtime.messages import (
    Assignment,
    AssignWork,
    DenoiseStep,
    DropRequests,
    GroupJoined,
    PullWork,
    RequestFailed,
    RequestReturned,
    SamplesDecoded,
    StepDone,
    WelcomeNode,
    WorkerFailed,
    WorkerReady,
    WorkerSeeded,
)
from spot_runtime.node import group as groups
from spot_runtime.node import roster as processes
from spot_runtime.node.commands import (
    AdmitTo,
    BindPolicy,
    Command,
    DismissFrom,
    FailNode,
    FormGroup,
    KillWorker,
    ReleaseWorker,
    SeedWorker,
    SendToControl,
    SendToWorker,
    StartWorker,
    StoreProgress,
)
from spot_runtime.node.core import FAILED_JOINS_MAX, HANG_S, HOLD_S, NodeCore
from spot_runtime.node.events import InputsFetched, ProgressStored, SlotsChanged, TimePassed, WorkerDied
from spot_runtime.node.plan import plan_groups
from spot_runtime.types import GroupId, LeaseId, NodeId, Pool, RequestId, WorkerId

W0, W1, W2 = (WorkerId(f"n-w{index}") for index in range(3))
G0, G1 = GroupId("n-g0"), GroupId("n-g1")


# ---- the plan -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("live", "present", "degrees", "plan"),
    [
        ((), (), (1, 2), ()),
        ((0,), (), (1, 2), ((0,),)),
        ((0, 1), (), (1, 2), ((0, 1),)),
        ((0, 1), (), (1,), ((0,), (1,))),
        ((0, 1, 2), (), (1, 2), ((0, 1), (2,))),
        ((0, 1, 2, 3, 4, 5, 6), (), (1, 2, 4), ((0, 1, 2, 3), (4, 5), (6,))),
        ((1, 2, 3), ((0, 1), (2, 3)), (1, 2), ((2, 3), (1,))),
        ((0, 1, 2), ((1, 2), (0,)), (1, 2), ((1, 2), (0,))),
        ((0, 2), ((0, 1), (2,)), (1, 2), ((0, 2),)),
        ((1, 2, 3, 4, 5, 6), ((0, 1, 2, 3), (4, 5), (6,)), (1, 2, 4), ((1, 2, 3, 6), (4, 5))),
        ((0, 1, 2), (), (1, 2, 3, 4), ((0, 1, 2),)),
        ((0, 1, 2, 3, 4), (), (1, 2, 3, 6), ((0, 1, 2), (3, 4))),
    ],
)
def test_groups_are_planned_largest_first_and_whole_ones_stay(
    live: tuple[int, ...],
    present: tuple[tuple[int, ...], ...],
    degrees: tuple[int, ...],
    plan: tuple[tuple[int, ...], ...],
) -> None:
    assert plan_groups(live, present, degrees) == plan


@given(
    live=st.sets(st.integers(0, 12)),
    gone=st.integers(0, 12),
    degrees=st.sampled_from([(1,), (1, 2), (1, 3), (1, 2, 3, 4), (1, 2, 4, 8)]),
)
def test_a_plan_is_a_partition_and_one_slot_less_leaves_full_groups_alone(
    live: set[int], gone: int, degrees: tuple[int, ...]
) -> None:
    plan = plan_groups(live, (), degrees)
    assert sorted(slot for group in plan for slot in group) == sorted(live)
    assert all(len(group) in degrees for group in plan)
    assert plan_groups(live, plan, degrees) == plan
    after = plan_groups(live - {gone}, plan, degrees)
    kept = {group for group in plan if len(group) == max(degrees) and gone not in group}
    assert kept <= set(after)


# ---- transitions --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", groups.GroupState)
@pytest.mark.parametrize("event", groups.GroupEvent)
def test_every_group_state_meets_every_event(state: groups.GroupState, event: groups.GroupEvent) -> None:
    group = groups.Group(G0, 1, (0,), (W0,), 1, 0.0, state=state)
    if (state, event) in groups.TRANSITIONS:
        group.move(event, 1.0)
        assert group.state is groups.TRANSITIONS[state, event]
    else:
        with pytest.raises(AssertionError, match=f"{event} cannot happen in state {state}"):
            group.move(event, 1.0)


@pytest.mark.parametrize("state", processes.WorkerState)
@pytest.mark.parametrize("event", processes.WorkerEvent)
def test_every_worker_state_meets_every_event(state: processes.WorkerState, event: processes.WorkerEvent) -> None:
    worker = processes.Worker(W0, 0.0, state=state)
    if (state, event) in processes.TRANSITIONS:
        worker.move(event, 1.0)
        assert worker.state is processes.TRANSITIONS[state, event]
    else:
        with pytest.raises(AssertionError, match=f"{event} cannot happen in state {state}"):
            worker.move(event, 1.0)


# ---- the core -----------------------------------------------------------------------------------------------------------------------


class Machine:
    """A machine whose processes start, load and join at once, and whose steps end when told to."""

    def __init__(self, *, slots: int = 2, degrees: tuple[int, ...] = (1, 2), standbys: int = 1) -> None:
        self.now_s = 0.0
        self.core = NodeCore(
            NodeId("n"),
            Pool.SPOT,
            workers=slots,
            max_batch=2,
            arena_slots=12,
            step_deadline_s=60.0,
            start_deadline_s=60.0,
            now_s=0.0,
            degrees=degrees,
            standbys=standbys,
            group_timeout_s=3.0,
        )
        settle(self.core, self.core.start(0.0), 0.0)
        self.send(WelcomeNode(heartbeat_s=1.0, reward_url=""))

    def raw(self, event: object) -> list[Command]:
        return self.core.handle(event, self.now_s)  # type: ignore[arg-type]

    def send(self, event: object) -> list[Command]:
        return settle(self.core, self.raw(event), self.now_s)

    def wait(self, seconds: float) -> list[Command]:
        self.now_s += seconds
        return self.send(TimePassed())

    def assign(self, *names: str, threshold: float = 0.0) -> list[Command]:
        made = [request(name, threshold=threshold) for name in names]
        given = tuple(Assignment(lease_id=LeaseId(f"{r.request_id}.1"), request=r) for r in made)
        said = self.send(AssignWork(group_id=G0, assignments=given))
        return said + [command for name in names for command in self.send(InputsFetched(RequestId(name)))]

    def done(self, worker_id: WorkerId) -> list[Command]:
        group = self.core.group_of(worker_id)
        assert group is not None
        return self.send(StepDone(worker_id=worker_id, seq=group.seq, elapsed_s=0.1))

    def step(self, group_id: GroupId = G0) -> list[Command]:
        return [command for rank in self.core.groups[group_id].ranks for command in self.done(rank)]

    def failed(self, worker_id: WorkerId, error_class: str = "GroupError") -> WorkerFailed:
        group = self.core.group_of(worker_id)
        assert group is not None
        return WorkerFailed(worker_id=worker_id, seq=group.seq, error_class=error_class, error="x")

    def reached(self) -> dict[str, int]:
        return {flight.request_id: flight.denoising_step for flight in self.core.flights.values()}

    def shape(self) -> list[tuple[WorkerId, ...]]:
        return sorted(group.ranks for group in self.core.groups.values())


def sent(commands: list[Command]) -> list[tuple[WorkerId, tuple[int, ...]]]:
    """Who is to take which denoising steps."""
    return [
        (c.worker_id, tuple(item.denoising_step for item in c.message.items))
        for c in commands
        if isinstance(c, SendToWorker) and isinstance(c.message, DenoiseStep)
    ]


def of(commands: list[Command], kind: type) -> list[Command]:
    return [command for command in commands if isinstance(command, kind)]


def test_all_ranks_take_a_step_and_the_next_waits_for_the_last_of_them() -> None:
    machine = Machine()
    assert sent(machine.assign("a")) == [(W0, (0,)), (W1, (0,))]
    assert sent(machine.done(W0)) == []
    assert machine.reached() == {"a": 1}
    assert sent(machine.done(W1)) == [(W0, (1,)), (W1, (1,))]


def test_a_slot_that_leaves_is_let_go_between_two_steps_and_the_other_goes_on_with_what_it_has() -> None:
    machine = Machine()
    machine.assign("a", "b")
    machine.step()
    assert of(machine.send(SlotsChanged((0,), 30.0)), ReleaseWorker) == []
    machine.done(W0)
    said = machine.done(W1)
    assert sent(said) == [(W0, (2, 1))]
    assert of(said, ReleaseWorker) == [ReleaseWorker(W1)]
    assert of(said, AdmitTo) == of(said, BindPolicy) == []
    assert machine.core.lost_steps == 0
    assert machine.core.heartbeat().slots == 1


def test_a_slot_that_comes_gets_a_standby_and_weights_while_the_other_works_and_joins_between_two_steps() -> None:
    machine = Machine(slots=1)
    assert machine.shape() == [(W0,)]
    machine.assign("a")
    machine.step()
    commands = machine.raw(SlotsChanged((0, 1), 0.0))
    (seed,) = of(commands, SeedWorker)
    assert seed == SeedWorker(W1, 2, 1, from_peer=True, digest=DIGEST)
    assert sent(machine.step()) == [(W0, (2,))]
    assert of(machine.raw(WorkerSeeded(worker_id=W1, seq=2, digest=DIGEST)), FormGroup) == []
    said = machine.done(W0)
    assert machine.shape() == [(W0, W1)]
    assert sent(said) == [(W0, (3,)), (W1, (3,))]
    assert [c.worker_id for c in of(said, AdmitTo)] == [W1]  # type: ignore[attr-defined]
    assert [c.worker_id for c in of(said, BindPolicy)] == [W1]  # type: ignore[attr-defined]


def test_a_rank_that_dies_costs_the_step_in_hand_and_the_survivor_takes_it_again() -> None:
    machine = Machine(standbys=0)
    machine.assign("a", "b")
    machine.step()
    assert sent(machine.raw(WorkerDied(W1))) == []  # the lead may still write what it has in hand
    assert sent(machine.send(machine.failed(W0))) == [(W0, (1, 0))]
    assert machine.core.lost_steps == 2


def test_a_step_that_the_lead_has_ended_is_kept_though_another_rank_died_in_it() -> None:
    machine = Machine(standbys=0)
    machine.assign("a")
    machine.raw(WorkerDied(W1))
    assert sent(machine.done(W0)) == [(W0, (1,))]
    assert machine.core.lost_steps == 0


def test_a_lead_that_dies_leaves_the_step_to_the_survivor_at_once() -> None:
    machine = Machine(standbys=0)
    machine.assign("a")
    assert sent(machine.send(WorkerDied(W0))) == [(W1, (0,))]


def test_a_silent_rank_is_killed_once_another_one_has_failed() -> None:
    machine = Machine(standbys=0)
    machine.assign("a")
    machine.step()
    assert of(machine.send(machine.failed(W0)), KillWorker) == []
    assert of(machine.wait(HANG_S / 2), KillWorker) == []
    assert of(machine.wait(HANG_S), KillWorker) == [KillWorker(W1)]
    assert sent(machine.send(WorkerDied(W1))) == [(W0, (1,))]


def test_a_generation_that_cannot_form_is_tried_again_and_a_lasting_failure_ends_the_node() -> None:
    machine = Machine(slots=1, standbys=0)
    commands = machine.raw(SlotsChanged((0, 1), 0.0))
    commands = machine.raw(WorkerReady(worker_id=W1, pid=1))
    commands = machine.raw(WorkerSeeded(worker_id=W1, seq=2, digest=DIGEST))
    generations = []
    while formed := of(commands, FormGroup):
        (form,) = formed
        assert isinstance(form, FormGroup)
        generations.append(form.generation)
        for rank in form.ranks:
            failed = WorkerFailed(worker_id=rank, seq=form.seq, error_class="GroupError", error="no route")
            commands = machine.raw(failed)
            if of(commands, FailNode):
                break
    assert of(commands, FailNode) == [FailNode(form.ranks[0], "GroupError", "no route")]
    assert generations == sorted(set(generations))
    assert len(generations) == FAILED_JOINS_MAX


def test_a_request_that_breaks_every_group_it_is_in_goes_back_with_its_error() -> None:
    machine = Machine()
    machine.assign("a")
    said: list[Command] = []
    for _ in range(3):
        for rank in machine.core.groups[G0].ranks:
            said += machine.send(machine.failed(rank, "ModelError"))
    failures = [c.message for c in of(said, SendToControl) if isinstance(c.message, RequestFailed)]  # type: ignore[attr-defined]
    assert [failure.error_class for failure in failures] == ["ModelError"]


def test_interruptions_count_in_a_row_only() -> None:
    machine = Machine(slots=1, degrees=(1,))
    machine.assign("a")
    for _ in range(2):
        for _ in range(2):
            machine.send(machine.failed(machine.shape()[0][0]))
        machine.step()
    assert machine.reached() == {"a": 2}


def test_only_one_process_reads_the_model_folder() -> None:
    machine = Machine(slots=0, standbys=0)
    machine.raw(SlotsChanged((0, 1, 2), 0.0))
    seeds: list[Command] = []
    for worker_id in (W0, W1, W2):
        seeds += of(machine.raw(WorkerReady(worker_id=worker_id, pid=1)), SeedWorker)
    assert [(c.worker_id, c.from_peer) for c in seeds] == [(W0, False)]  # type: ignore[attr-defined]
    seeds = of(machine.raw(WorkerSeeded(worker_id=W0, seq=1, digest=DIGEST)), SeedWorker)
    assert [(c.worker_id, c.from_peer) for c in seeds] == [(W1, True), (W2, True)]  # type: ignore[attr-defined]


def test_a_copy_with_another_digest_is_killed_and_the_next_process_reads_the_model_folder() -> None:
    machine = Machine(slots=1, standbys=1)
    assert machine.core.heartbeat().standbys == 1
    (seed,) = of(machine.raw(SlotsChanged((0, 1), 0.0)), SeedWorker)
    assert isinstance(seed, SeedWorker)
    assert machine.core.heartbeat().standbys == 0
    commands = machine.raw(WorkerSeeded(worker_id=W1, seq=seed.seq, digest="torn"))
    assert of(commands, KillWorker) == [KillWorker(W1)]
    assert of(commands, FormGroup) == []
    (start,) = of(machine.raw(WorkerDied(W1)), StartWorker)
    assert isinstance(start, StartWorker)
    (again,) = of(machine.raw(WorkerReady(worker_id=start.worker_id, pid=1)), SeedWorker)
    assert isinstance(again, SeedWorker)
    assert (again.from_peer, again.digest) == (False, DIGEST)


def test_a_model_that_cannot_be_loaded_ends_the_node_with_its_error() -> None:
    machine = Machine(slots=0, standbys=0)
    machine.raw(SlotsChanged((0,), 0.0))
    machine.raw(WorkerReady(worker_id=W0, pid=1))
    failed = WorkerFailed(worker_id=W0, seq=1, error_class="ModelError", error="truncated")
    assert of(machine.raw(failed), FailNode) == [FailNode(W0, "ModelError", "truncated")]


def test_a_slot_that_must_be_free_is_freed_by_force() -> None:
    machine = Machine()
    machine.assign("a")
    machine.send(SlotsChanged((0,), 1.0))
    assert of(machine.wait(0.5), KillWorker) == []
    assert of(machine.wait(0.6), KillWorker) == [KillWorker(W1)]


def test_without_slots_requests_are_held_a_while_then_committed_and_returned() -> None:
    machine = Machine()
    machine.assign("a")
    machine.step()
    machine.send(SlotsChanged((), 0.0))
    for rank in (W0, W1):
        machine.done(rank)
    for rank in (W0, W1):
        machine.send(WorkerDied(rank))
    assert of(machine.wait(HOLD_S - 1.0), StoreProgress) == []
    assert of(machine.wait(2.0), StoreProgress) == [StoreProgress(RequestId("a"), machine.core.flights["a"].slot, 2)]  # type: ignore[index]
    said = machine.send(ProgressStored(RequestId("a"), 2, "c2"))
    (back,) = [c.message for c in of(said, SendToControl) if isinstance(c.message, RequestReturned)]  # type: ignore[attr-defined]
    assert (back.denoising_step, back.commit_key) == (2, "c2")
    assert not machine.core.flights


def test_a_group_that_is_no_more_withdraws_its_pull() -> None:
    machine = Machine(degrees=(1,))
    assert machine.shape() == [(W0,), (W1,)]
    said = machine.send(SlotsChanged((0,), 0.0))
    pulls = [c.message for c in of(said, SendToControl) if isinstance(c.message, PullWork)]  # type: ignore[attr-defined]
    assert [(pull.group_id, pull.room) for pull in pulls] == [(G1, 0)]


def test_an_idle_group_takes_what_waits_beside_a_full_batch() -> None:
    machine = Machine(degrees=(1,))
    assert sent(machine.assign("a", "b")) == [(W0, (0,))]
    assert sent(machine.assign("c")) == [(W1, (0,))]
    assert sent(machine.step()) == [(W0, (1, 0))]


def test_late_answers_of_a_generation_that_is_over_change_nothing() -> None:
    machine = Machine(standbys=0)
    machine.assign("a")
    late = machine.failed(W1)
    machine.send(WorkerDied(W0))
    before = machine.shape(), machine.reached()
    machine.send(late)
    machine.send(GroupJoined(worker_id=W1, seq=1))
    machine.send(StepDone(worker_id=W1, seq=late.seq, elapsed_s=0.1))
    assert (machine.shape(), machine.reached()) == before


# ---- step caches --------------------------------------------------------------------------------------------------------------------


def test_a_cached_request_goes_on_at_its_step_with_a_survivor_that_remembers_it() -> None:
    machine = Machine(standbys=0)
    machine.assign("a", threshold=0.3)
    machine.step()
    said = machine.send(WorkerDied(W0))
    assert sent(said) == [(W1, (1,))]
    assert of(said, AdmitTo) == []
    said = machine.done(W1)
    assert sent(said) == [(W2, (2,)), (W1, (2,))]
    assert [c.worker_id for c in of(said, AdmitTo)] == [W2]  # type: ignore[attr-defined]
    assert machine.core.lost_steps == 1  # the one in hand


def test_a_newcomer_takes_a_cached_request_on_only_beside_one_that_remembers_it() -> None:
    machine = Machine(slots=1)
    machine.assign("a", threshold=0.3)
    machine.step()
    machine.send(SlotsChanged((0, 1), 0.0))
    assert sent(machine.done(W0)) == [(W0, (2,)), (W1, (2,))]
    machine.send(SlotsChanged((1,), 30.0))
    assert sent(machine.step()) == [(W1, (3,))]
    assert machine.core.lost_steps == 0


def test_a_cached_request_that_nobody_remembers_starts_over() -> None:
    machine = Machine(slots=1, degrees=(1,))
    machine.assign("a", "b", threshold=0.3)
    machine.step()
    machine.step()
    assert machine.reached() == {"a": 2, "b": 1}
    machine.send(WorkerDied(W0))
    assert machine.reached() == {"a": 0, "b": 0}
    assert machine.core.lost_steps == 2 + 3  # those in hand, and those before


def test_a_rank_that_is_a_step_ahead_of_a_dead_lead_is_no_memory_to_go_on_with() -> None:
    """Its cache has moved on with a denoising step whose latents died with the lead."""
    machine = Machine(standbys=0)
    machine.assign("a", threshold=0.3)
    machine.step()
    machine.done(W1)
    said = machine.send(WorkerDied(W0))
    assert sent(said) == [(W1, (0,))]
    assert machine.core.flights[RequestId("a")].forwards == 0


def test_a_rank_whose_step_ended_in_a_generation_that_is_gone_is_no_memory_either() -> None:
    machine = Machine(standbys=0)
    machine.assign("a", threshold=0.3)
    machine.step()
    seq = machine.core.groups[G0].seq
    commands = machine.raw(WorkerDied(W0))
    machine.raw(StepDone(worker_id=W1, seq=seq, elapsed_s=0.1))
    assert sent(settle(machine.core, commands, machine.now_s)) == [(W1, (0,))]


def test_what_is_decoded_or_dropped_is_held_by_no_rank() -> None:
    machine = Machine(standbys=0)
    machine.assign("a", "b")
    machine.step()
    slots = {flight.request_id: flight.slot for flight in machine.core.flights.values()}
    said = machine.send(DropRequests(request_ids=(RequestId("b"),)))
    assert of(said, DismissFrom) == [DismissFrom(rank, slots[RequestId("b")]) for rank in (W0, W1)]
    for _ in range(NUM_STEPS - 1):
        machine.step()
    group = machine.core.groups[G0]
    assert group.is_decoding
    said = machine.send(SamplesDecoded(worker_id=W0, seq=group.seq, pngs=(b"",), elapsed_s=0.1))
    assert of(said, DismissFrom) == [DismissFrom(rank, slots[RequestId("a")]) for rank in (W0, W1)]


# ---- joins --------------------------------------------------------------------------------------------------------------------------


def test_joins_that_failed_because_a_peer_died_do_not_count() -> None:
    machine = Machine(slots=1, standbys=0)
    commands, said = machine.raw(SlotsChanged((0, 1), 0.0)), []
    for _ in range(FAILED_JOINS_MAX + 1):
        while not of(commands, FormGroup):
            commands = [c for command in commands for answer in answers_to(command) for c in machine.raw(answer)]
        (form,) = of(commands, FormGroup)
        assert isinstance(form, FormGroup)
        survivor, victim = form.ranks
        failed = WorkerFailed(worker_id=survivor, seq=form.seq, error_class="GroupError", error="peer is gone")
        said += machine.raw(failed)
        commands = machine.raw(WorkerDied(victim))
        alone = [c for c in of(commands, FormGroup) if c.ranks == (survivor,)]  # type: ignore[attr-defined]
        said += commands
        commands = [c for c in commands if c not in alone] + [
            x for c in alone for a in answers_to(c) for x in machine.raw(a)
        ]
    assert of(said, FailNode) == []
