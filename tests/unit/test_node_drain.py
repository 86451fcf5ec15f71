"""What a machine under notice finishes, commits and lets go of; and its commits in the background."""

from __future__ import annotations

import msgspec
import pytest
from node_processes import settle
from test_node_machine import request

from spot_runtime.messages import (
    Assignment,
    AssignWork,
    NodeLeft,
    PullWork,
    RequestCommitted,
    RequestReturned,
    ResumePoint,
    SampleDone,
    SamplesDecoded,
    StepDone,
    WelcomeNode,
)
from spot_runtime.node.commands import Command, EndNode, SendToControl, SendToWorker, StoreProgress
from spot_runtime.node.core import PROBE_S, NodeCore
from spot_runtime.node.drain import last_word_s, plan_drain
from spot_runtime.node.events import (
    InputsFetched,
    NoticeReceived,
    ProgressStored,
    SampleStored,
    TimePassed,
)
from spot_runtime.node.flight import TRANSITIONS, Flight, FlightEvent, Stage
from spot_runtime.node.pace import Bandwidth, Duration, Pace
from spot_runtime.types import GroupId, LeaseId, NodeId, Pool, RequestId, WorkerId

W0, G0 = WorkerId("n-w0"), GroupId("n-g0")


def flight(name: str, steps: int, stage: Stage = Stage.WAITING, committed: int = 0) -> Flight:
    assignment = Assignment(lease_id=LeaseId(f"{name}.1"), request=request(name))
    return Flight(assignment, G0, 0, 0.0, denoising_step=steps, stage=stage, holders={W0}, committed_step=committed)


def pace(step_s: float = 0.1, decode_s: float = 0.1, commit_s: float = 0.2, finish_s: float = 0.2) -> Pace:
    """A store that takes four latents in `commit_s`."""
    durations = (Duration(0.0, seconds) for seconds in (step_s, decode_s, commit_s, finish_s))
    return Pace(*durations, Bandwidth(0.0, 4 / commit_s))


def names(flights: tuple[Flight, ...]) -> list[str]:
    return [each.request_id for each in flights]


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("event", FlightEvent)
def test_every_stage_meets_every_event(stage: Stage, event: FlightEvent) -> None:
    moved = flight("a", 0, stage)
    if (stage, event) in TRANSITIONS:
        moved.move(event)
        assert moved.stage is TRANSITIONS[stage, event]
    else:
        with pytest.raises(AssertionError, match=f"a: {event} cannot happen in stage {stage}"):
            moved.move(event)
        assert moved.stage is stage


def test_transitions_are_these() -> None:
    assert {f"{stage} {event} {target}" for (stage, event), target in TRANSITIONS.items()} == {
        "fetching fetched waiting",
        "waiting batched working",
        "waiting given_up returning",
        "working stepped waiting",
        "working interrupted waiting",
        "working decoded finishing",
        "finishing judged reported",
    }


@pytest.mark.parametrize(("grace_s", "by_s"), [(0.4, 0.3), (2.0, 1.5), (4.0, 3.0), (120.0, 119.0)])
def test_a_quarter_of_the_grace_period_but_a_second_at_most_is_kept_free(grace_s: float, by_s: float) -> None:
    assert last_word_s(10.0, grace_s) == pytest.approx(10.0 + by_s)


def test_what_fits_is_finished_and_the_rest_committed() -> None:
    """Three batches of one: 1 + 2 + 4 steps of 0.1 s, a decoding of 0.1 s each and 0.2 s to the end."""
    flights = [flight("far", 0), flight("near", 3, committed=2), flight("nearer", 2)]
    full = plan_drain(flights, {G0: 0.0}, pace(), max_batch=1, left_s=1.2 / 0.8 + 0.01)
    assert full.finish == {"far", "near", "nearer"}
    assert (full.commit, full.let_go) == ((), ())
    some = plan_drain(flights, {G0: 0.0}, pace(), max_batch=1, left_s=0.7 / 0.8 + 0.01)
    assert some.finish == {"near", "nearer"}
    assert names(some.let_go) == ["far"]
    none = plan_drain(flights, {G0: 0.0}, pace(), max_batch=1, left_s=0.3)
    assert none.finish == set()
    assert names(none.commit) == ["nearer", "near"]


def test_a_batch_takes_as_long_as_its_longest_member() -> None:
    flights = [flight("a", 1), flight("b", 3)]
    assert plan_drain(flights, {G0: 0.0}, pace(), max_batch=2, left_s=0.6 / 0.8 + 0.01).finish == {"a", "b"}
    assert plan_drain(flights, {G0: 0.0}, pace(), max_batch=2, left_s=0.6 / 0.8 - 0.01).finish == {"b"}


def test_where_not_all_commits_fit_those_started_last_are_let_go_of() -> None:
    """4 latents a second for 1.2 s; each has its own latents and the rows of its window [0, 2] that were never committed."""
    flights = [flight(f"q{index}", 1) for index in range(4)]
    plan = plan_drain(flights, {}, pace(commit_s=1.0), max_batch=2, left_s=1.5)
    assert (names(plan.commit), names(plan.let_go)) == (["q0", "q1"], ["q2", "q3"])
    assert plan_drain(flights, {}, pace(commit_s=2.0), max_batch=2, left_s=1.5).commit == ()
    assert plan_drain(flights, {}, pace(commit_s=1.0), max_batch=2, left_s=1.5, latent_bytes=9).commit == ()


def test_those_with_the_most_to_lose_are_committed_first_and_what_is_under_way_counts() -> None:
    flights = [flight("a", 3, committed=2), flight("b", 3), flight("c", 2, committed=1)]
    plan = plan_drain(flights, {}, pace(commit_s=1.0), max_batch=2, left_s=1.5)
    assert (names(plan.commit), names(plan.let_go)) == (["b"], ["a", "c"])
    under_way = [flight("d", 2, Stage.RETURNING), flight("e", 3, committed=2), flight("f", 3, committed=2)]
    plan = plan_drain(under_way, {}, pace(commit_s=1.0), max_batch=2, left_s=1.5)
    assert (names(plan.commit), names(plan.let_go)) == (["e"], ["f"])


@pytest.mark.parametrize(
    ("steps", "committed", "latents"), [(1, 0, 2), (2, 0, 3), (2, 1, 1), (3, 0, 4), (3, 2, 1), (4, 1, 2)]
)
def test_a_commit_writes_its_own_latents_and_the_rows_that_no_commit_has(
    steps: int, committed: int, latents: int
) -> None:
    assert flight("a", steps, committed=committed).commit_latents() == latents


def test_a_store_is_as_fast_as_what_it_takes_of_all_together() -> None:
    store = Bandwidth(5.0)
    assert store.seconds(10) == 2.0
    seen = []
    for size_bytes, now_s, under_way in ((100, 1.0, 4), (100, 3.0, 1), (100, 4.0, 1)):
        since_s = store.shared_s
        store.advance(now_s, under_way)
        store.observe(size_bytes, since_s)
        store.advance(now_s, 0)
        seen.append(store.value_bytes_s)
    assert seen == pytest.approx([400.0, 50.0, 65.0])


def test_one_that_begins_late_has_its_share_only_from_then_on() -> None:
    """100 bytes a second: 150 bytes from 0 s to 2 s, alone at first, and 50 bytes from 1 s to 2 s."""
    store = Bandwidth(5.0)
    store.advance(1.0, 1)
    since_s = store.shared_s
    store.advance(2.0, 2)
    store.observe(50, since_s)
    assert store.value_bytes_s == pytest.approx(100.0)
    store.observe(150, 0.0)
    assert store.value_bytes_s == pytest.approx(100.0)


def cached(name: str, steps: int) -> Flight:
    made = flight(name, steps)
    asked = made.assignment.request
    params = msgspec.structs.replace(asked.params, cache_threshold=0.3)
    made.assignment = msgspec.structs.replace(made.assignment, request=msgspec.structs.replace(asked, params=params))
    return made


def test_what_has_a_step_cache_takes_no_room_from_what_can_be_committed() -> None:
    flights = [cached("explored", 3), cached("explored too", 3), flight("rollout", 2)]
    plan = plan_drain(flights, {}, pace(commit_s=1.0), max_batch=2, left_s=1.5)
    assert (names(plan.commit), names(plan.let_go)) == (["rollout"], ["explored", "explored too"])


@pytest.mark.parametrize("stage", [Stage.WAITING, Stage.WORKING])
def test_a_commit_under_way_is_awaited_however_late(stage: Stage) -> None:
    under_way = flight("a", 3, stage, committed=1)
    under_way.committing_step = 2
    assert plan_drain([under_way], {G0: 0.0}, pace(step_s=0.7, commit_s=1.0), max_batch=2, left_s=0.8).let_go == ()


def test_a_step_that_ends_too_late_for_a_commit_is_not_awaited() -> None:
    working = flight("a", 1, Stage.WORKING)
    slow = pace(step_s=3.0)
    assert plan_drain([working], {G0: 0.5}, slow, max_batch=2, left_s=1.5).let_go == (working,)
    assert plan_drain([working], {G0: 2.5}, slow, max_batch=2, left_s=1.5).let_go == ()


def test_nothing_is_begun_that_was_never_seen_to_end() -> None:
    plan = plan_drain([flight("a", 1)], {G0: 0.0}, Pace(), max_batch=2, left_s=1000.0)
    assert plan.finish == set()
    assert names(plan.commit) == ["a"]


def test_a_duration_follows_a_slower_measurement_at_once_and_a_faster_one_slowly() -> None:
    duration = Duration(9.0)
    assert duration.value_s == 9.0
    seen = []
    for elapsed_s in (1.0, 2.0, 1.0):
        duration.observe(elapsed_s)
        seen.append(duration.value_s)
    assert seen == pytest.approx([1.0, 2.0, 1.7])


# ---- the core -----------------------------------------------------------------------------------------------------------------------


class Machine:
    """One worker; a denoising step takes `step_s` of the machine's clock, commits wait until they are answered by hand."""

    def __init__(
        self,
        *,
        commit_every_steps: int | None = 0,
        max_batch: int = 2,
        live_migration: bool = True,
        latent_bytes: int = 1,
    ) -> None:
        self.now_s = 0.0
        self.core = NodeCore(
            NodeId("n"),
            Pool.SPOT,
            workers=1,
            max_batch=max_batch,
            arena_slots=16,
            latent_bytes=latent_bytes,
            step_deadline_s=60.0,
            start_deadline_s=60.0,
            now_s=0.0,
            commit_every_steps=commit_every_steps,
            live_migration=live_migration,
        )
        settle(self.core, self.core.start(0.0), 0.0)
        self.send(WelcomeNode(heartbeat_s=1.0, reward_url=""))

    def send(self, event: object) -> list[Command]:
        return self.core.handle(event, self.now_s)  # type: ignore[arg-type]

    def assign(self, *request_names: str, resume: ResumePoint | None = None) -> list[Command]:
        given = [Assignment(lease_id=LeaseId(f"{n}.1"), request=request(n), resume=resume) for n in request_names]
        said = self.send(AssignWork(group_id=G0, assignments=tuple(given)))
        return said + [command for name in request_names for command in self.send(InputsFetched(RequestId(name)))]

    def step(self, step_s: float = 0.1) -> list[Command]:
        self.now_s += step_s
        return self.send(StepDone(worker_id=W0, seq=self.core.groups[G0].seq, elapsed_s=step_s))


def said(commands: list[Command], kind: type) -> list[object]:
    return [c.message for c in commands if isinstance(c, SendToControl) and isinstance(c.message, kind)]


def commits(commands: list[Command]) -> list[int]:
    return [command.denoising_step for command in commands if isinstance(command, StoreProgress)]


def test_commits_run_in_the_background_one_at_a_time_and_the_newest_wins() -> None:
    machine = Machine(commit_every_steps=1)
    machine.assign("a")
    assert commits(machine.step()) == [1]
    assert commits(machine.step()) == []
    (told,) = said(machine.send(ProgressStored(RequestId("a"), 1, "c1")), RequestCommitted)
    assert (told.denoising_step, told.commit_key) == (1, "c1")  # type: ignore[attr-defined]
    assert commits(machine.step()) == [3]
    assert said(machine.send(ProgressStored(RequestId("a"), 0, "")), RequestCommitted) == [told]
    assert commits(machine.step()) == []


def test_where_nobody_says_how_often_one_commit_shows_what_they_cost() -> None:
    """Steps of .1 s, of which commits may take a twentieth: one of 2 ms every step, one of 8 ms every second."""
    for commit_s, later in ((0.002, [2, 3]), (0.008, [3])):
        machine = Machine(commit_every_steps=None, max_batch=1)
        machine.assign("a")
        assert commits(machine.step()) == [1]
        machine.now_s += commit_s
        machine.send(ProgressStored(RequestId("a"), 1, "c1"))
        machine.core.pace.store.measured_bytes_s = 1 / commit_s
        done: list[int] = []
        for step in (2, 3):
            for each in commits(machine.step(0.1 - commit_s * (step == 2))):
                done.append(each)
                machine.send(ProgressStored(RequestId("a"), each, f"c{each}"))
                machine.core.pace.store.measured_bytes_s = 1 / commit_s
        assert done == later


def test_a_store_that_is_too_slow_is_looked_at_again_later() -> None:
    machine = Machine(commit_every_steps=None, max_batch=1)
    machine.assign("a")
    assert commits(machine.step()) == [1]
    machine.now_s += 10.0
    machine.send(ProgressStored(RequestId("a"), 1, "c1"))
    assert commits(machine.step()) == []
    assert commits(machine.step(PROBE_S)) == [3]


def test_without_live_migration_nothing_is_committed_and_what_cannot_end_starts_over() -> None:
    machine = Machine(commit_every_steps=1, max_batch=1, live_migration=False)
    machine.assign("a")
    assert commits(machine.step(5.0)) == []
    machine.send(NoticeReceived(8.0))
    ended = machine.step(5.0)
    (back,) = said(ended, RequestReturned)
    assert (back.denoising_step, back.commit_key, commits(ended)) == (0, "", [])  # type: ignore[attr-defined]
    assert ended[-1] == EndNode()


def test_a_notice_during_a_commit_waits_for_it_and_commits_what_came_since() -> None:
    machine = Machine(commit_every_steps=1)
    machine.assign("a")
    assert commits(machine.step(5.0)) == [1]
    machine.send(NoticeReceived(8.0))
    assert commits(machine.step(5.0)) == []
    assert machine.core.flights[RequestId("a")].stage is Stage.RETURNING
    assert commits(machine.send(ProgressStored(RequestId("a"), 1, "c1"))) == [2]
    ended = machine.send(ProgressStored(RequestId("a"), 2, "c2"))
    (back,) = said(ended, RequestReturned)
    assert (back.denoising_step, back.commit_key, back.busy_s) == (2, "c2", 10.0)  # type: ignore[attr-defined]
    assert ended[-1] == EndNode()


def test_a_request_about_to_end_is_finished_under_a_notice_and_nothing_is_pulled() -> None:
    machine = Machine()
    machine.assign("a")
    for _ in range(3):
        machine.step()
    machine.send(NoticeReceived(30.0))
    ordered = machine.step()
    assert [type(c.message).__name__ for c in ordered if isinstance(c, SendToWorker)] == ["DecodeSamples"]
    decoded = SamplesDecoded(worker_id=W0, seq=machine.core.groups[G0].seq, pngs=(b"",), elapsed_s=0.1)
    assert said(machine.send(decoded), PullWork) == []
    assert len(said(machine.send(SampleStored(RequestId("a"), "s", "d")), SampleDone)) == 1


def test_a_store_that_does_not_answer_does_not_keep_the_node_past_its_grace_period() -> None:
    machine = Machine(commit_every_steps=1)
    machine.assign("a")
    machine.step()
    machine.send(ProgressStored(RequestId("a"), 1, "c1"))
    machine.step()
    machine.send(NoticeReceived(4.0))
    assert commits(machine.step()) == []
    machine.now_s += 2.8
    assert said(machine.send(TimePassed()), NodeLeft) == []
    machine.now_s += 0.2
    last = machine.send(TimePassed())
    (back,) = said(last, RequestReturned)
    assert (back.denoising_step, back.commit_key) == (1, "c1")  # type: ignore[attr-defined]
    assert len(said(last, NodeLeft)) == 1
    assert machine.send(TimePassed()) == []


def test_a_sample_that_is_stored_but_not_judged_is_returned_for_scoring_alone() -> None:
    machine = Machine(commit_every_steps=3)
    machine.assign("a")
    for _ in range(3):
        machine.step()
    machine.send(ProgressStored(RequestId("a"), 3, "c3"))
    machine.step()
    machine.send(SamplesDecoded(worker_id=W0, seq=machine.core.groups[G0].seq, pngs=(b"",), elapsed_s=0.1))
    machine.send(SampleStored(RequestId("a"), "s", "d"))
    machine.send(NoticeReceived(2.0))
    machine.now_s += 1.5
    (back,) = said(machine.send(TimePassed()), RequestReturned)
    assert (back.commit_key, back.busy_s) == ("", 0.0)  # type: ignore[attr-defined]  # SampleDone has told


def test_what_the_store_was_seen_to_take_says_what_is_committed_under_a_notice() -> None:
    """A store of 8 latents a second, shared by 12 commits of which the first has one latent and the others two.

    Under the notice it takes 19 latents in .8 of the 3 s that are left: one of the first and two of nine others.
    """
    machine = Machine(commit_every_steps=1, max_batch=12, latent_bytes=1000)
    others = [f"q{index}" for index in range(1, 12)]
    machine.assign("q0", *others)
    machine.step()
    machine.now_s += 1.0
    machine.send(ProgressStored(RequestId("q0"), 1, "q0-1"))
    machine.core.pace.store.measured_bytes_s = None
    assert commits(machine.step()) == [2] + [1] * 11
    machine.now_s += 12 / 8
    machine.send(ProgressStored(RequestId("q0"), 2, "q0-2"))
    machine.now_s += 11 / 8
    for name in reversed(others):
        machine.send(ProgressStored(RequestId(name), 1, f"{name}-1"))
    seen = machine.core.pace.store.value_bytes_s
    assert 0.98 * 8000 <= seen <= 8001
    machine.core.commit_every_steps = 0
    machine.step()
    machine.core.pace.step.measured_s = 0.1  # the one before it lasted as long as the commits
    machine.send(NoticeReceived(4.1))
    last = machine.step()
    assert commits(last) == [4] + [3] * 9
    assert [each.request_id for each in said(last, RequestReturned)] == ["q10", "q11"]  # type: ignore[attr-defined]


def test_a_request_that_took_no_step_here_goes_back_at_once() -> None:
    machine = Machine(max_batch=1)
    machine.assign("a", "b", resume=ResumePoint(denoising_step=2, commit_key="c"))
    back = said(machine.send(NoticeReceived(2.0)), RequestReturned)
    assert [(each.request_id, each.commit_key) for each in back] == [("b", "")]  # type: ignore[attr-defined]


def test_the_shorter_of_two_notices_holds() -> None:
    machine = Machine()
    machine.assign("a")
    machine.send(NoticeReceived(60.0))
    machine.send(NoticeReceived(4.0))
    machine.send(NoticeReceived(60.0))
    machine.now_s += 3.0
    assert len(said(machine.send(TimePassed()), NodeLeft)) == 1
