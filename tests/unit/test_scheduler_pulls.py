"""Pulls: one that is said again has the answer that it had, what fits whom, and shares of groups of any speed."""

from __future__ import annotations

import heapq

import pytest
from msgspec import structs
from scheduler_world import INPUTS, LEASE_S, SPECS, TRAINER, Cluster

from spot_runtime.messages import (
    GenerationRequest,
    HeldLease,
    PullWork,
    RequestFailed,
    RequestReturned,
    SamplingParams,
    TrainerHello,
)
from spot_runtime.scheduler.claim import Claim
from spot_runtime.scheduler.events import ControlAwoke, JobInputsRead, JobSubmitted, TimePassed
from spot_runtime.scheduler.pulls import Grant
from spot_runtime.scheduler.queue import RequestQueue
from spot_runtime.types import JobId, NodeId, Op, PolicyRef, Pool, RequestId, RunId

ROLLOUT = JobId("run-a-rollout-0")
A, B = NodeId("spot-a"), NodeId("spot-b")
POOLS = {A: Pool.SPOT, B: Pool.SPOT}
OLD, NEW = PolicyRef(1, "k1", "d1"), PolicyRef(2, "k2", "d2")


def request(number: int, policy: PolicyRef = OLD, job: str = "j") -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(f"{job}{number}"),
        job_id=JobId(job),
        run_id=RunId("r"),
        op=Op.ROLLOUT,
        prompt_id="p",
        prompt="",
        row_json="{}",
        seed=number,
        sde_window=(0, 1),
        params=SamplingParams(height=64, width=48, num_steps=4, noise_level=0.7),
        policy=policy,
        embedding_key="",
    )


def queue_of(*requests: GenerationRequest, sequence: int = 1, into: RequestQueue | None = None) -> RequestQueue:
    queue = into or RequestQueue(lease_s=4.0, failures_max=2)
    queue.add(Claim(requests[0].job_id, sequence, Op.ROLLOUT, ready=True, everywhere=True), requests, 0.0)
    return queue


def pull(node_id: NodeId = A, room: int = 2, number: int = 1, **fields: object) -> PullWork:
    return PullWork(node_id=node_id, group_id="g", room=room, number=number, **fields)  # type: ignore[arg-type]


def ask(queue: RequestQueue, pulled: PullWork, slots: int = 1, now_s: float = 1.0) -> list[Grant]:
    again = queue.pull(pulled)
    return [again] if again else queue.grants(POOLS, slots=slots, spot_slots=slots, now_s=now_s)


def granted(queue: RequestQueue, pulled: PullWork, slots: int = 1) -> list[str]:
    return [a.request.request_id for grant in ask(queue, pulled, slots) for a in grant.assignments]


# ---- the same question ------------------------------------------------------------------------------------------------------------


def test_a_pull_that_is_said_again_has_the_same_leases_however_often_and_with_whatever_room() -> None:
    queue = queue_of(*map(request, range(8)))
    (first,) = ask(queue, pull(room=2))
    assert [a.request.request_id for a in first.assignments] == ["j0", "j1"]
    assert [ask(queue, pull(room=room)) for room in (2, 2, 4)] == [[first]] * 3
    assert len(queue.held[A]) == 2
    assert granted(queue, pull(room=2, number=2)) == ["j2", "j3"]


def test_a_pull_from_before_the_last_answer_is_over() -> None:
    queue = queue_of(*map(request, range(8)))
    assert granted(queue, pull(number=7)) == ["j0", "j1"]
    assert granted(queue, pull(number=6)) == []
    assert not queue.pulls.parked


def test_a_pull_whose_answer_nobody_holds_any_more_is_answered_anew() -> None:
    queue = queue_of(*map(request, range(3)))
    (first,) = ask(queue, pull(room=2))
    for assignment in first.assignments:
        queue.returned(
            RequestReturned(node_id=A, lease_id=assignment.lease_id, request_id=assignment.request.request_id), 2.0
        )
    (again,) = ask(queue, pull(room=2))
    assert [a.lease_id for a in again.assignments] == ["j0.2", "j1.2"]


def test_the_answer_outlives_control() -> None:
    before = queue_of(*map(request, range(8)))
    (first,) = ask(before, pull(room=2))
    after = RequestQueue(lease_s=4.0, failures_max=2)
    after.add(Claim(JobId("j"), 1, Op.ROLLOUT, ready=True, everywhere=True), (), 2.0)
    for record in before.of_job(JobId("j")):
        after.restore(record)
    assert ask(after, pull(room=2)) == [first]


def test_a_new_process_of_the_same_name_may_count_from_below() -> None:
    queue = queue_of(*map(request, range(8)))
    assert granted(queue, pull(number=1000)) == ["j0", "j1"]
    queue.reclaim(A, 2.0, "node restarted")
    assert granted(queue, pull(number=1)) == ["j0", "j1"]


def test_a_pull_that_is_only_said_again_keeps_its_place() -> None:
    queue = queue_of(*map(request, range(1)))
    queue.cancel(JobId("j"), 0.0)
    for waiting in (pull(A), pull(B), pull(A, room=1)):
        assert ask(queue, waiting) == []
    queue_of(*(request(number, job="k") for number in range(2)), into=queue)
    grants = queue.grants(POOLS, slots=2, spot_slots=2, now_s=1.0)
    assert [(grant.node_id, len(grant.assignments)) for grant in grants] == [(A, 1), (B, 1)]


def test_what_piled_up_while_control_stood_still_takes_no_more_than_its_share() -> None:
    """Two groups asked every second while control was stopped for longer than a lease; then all of it is read at once."""
    world = Cluster()
    for name in ("s1", "s2"):
        world.hello(world.nodes[NodeId(name)], fresh=True)
    world.trainer.runs = True
    world.say(TrainerHello(trainer_id=TRAINER))
    world.send(JobSubmitted(job=SPECS[ROLLOUT]))
    world.send(JobInputsRead(job_id=ROLLOUT, inputs=INPUTS))
    world.train()
    for name in ("s1", "s2"):
        world.pull(world.nodes[NodeId(name)], "g", 1)
    leases = {record.request_id: record.lease_id for record in world.core.queue.of_job(ROLLOUT)}
    world.now += 5 * LEASE_S
    for _ in range(20):
        for name in ("s1", "s2"):
            world.pull(world.nodes[NodeId(name)], "g", 1, again=True)
    world.send(ControlAwoke())
    world.send(TimePassed())
    assert {record.request_id: record.lease_id for record in world.core.queue.of_job(ROLLOUT)} == leases
    assert {name: len(held) for name, held in world.core.queue.held.items()} == {"s1": 1, "s2": 1}
    assert world.core.queue.leases_lost == 0
    world.now += LEASE_S + 0.1  # who is still not heard by then is gone
    world.send(TimePassed())
    assert not world.core.queue.held


# ---- what fits whom ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "fits"), [((64, 48), True), ((0, 0), True), ((48, 64), False), ((64, 64), False), ((0, 64), False)]
)
def test_a_group_gets_only_samples_of_the_size_that_its_arena_holds(size: tuple[int, int], fits: bool) -> None:
    queue = queue_of(request(0))
    assert granted(queue, pull(height=size[0], width=size[1])) == (["j0"] if fits else [])


def test_a_group_that_one_job_does_not_fit_goes_on_to_the_next() -> None:
    queue = queue_of(request(0))
    small = structs.replace(request(0, job="k"), params=SamplingParams(height=8, width=8, num_steps=4, noise_level=0.7))
    queue_of(small, sequence=2, into=queue)
    assert granted(queue, pull(A, height=8, width=8)) == ["k0"]
    assert granted(queue, pull(B, height=64, width=48)) == ["j0"]


def test_a_pull_gets_a_batch_of_one_policy_first_of_one_that_is_bound_though_they_alternate() -> None:
    queue = queue_of(*(request(number, OLD if number % 2 else NEW) for number in range(6)))
    assert granted(queue, pull(room=8, number=1, policies=(OLD,))) == ["j1", "j3", "j5"]
    assert granted(queue, pull(room=2, number=2)) == ["j0", "j2"]
    assert granted(queue, pull(room=2, number=3)) == ["j4"]


def test_leftovers_of_two_policies_are_batches_of_one_each() -> None:
    """Those that had begun go on with the policy that they began with; all others take the new one together."""
    queue = queue_of(*map(request, range(4)))
    (first,) = ask(queue, pull(room=1))
    queue.change_policy(JobId("j"), NEW)
    (begun,) = first.assignments
    queue.returned(
        RequestReturned(
            node_id=A, lease_id=begun.lease_id, request_id=RequestId("j0"), denoising_step=2, commit_key="c"
        ),
        2.0,
    )
    (old,) = ask(queue, pull(room=8, number=2, policies=(OLD,)))
    (new,) = ask(queue, pull(room=8, number=3))
    assert [(a.request.request_id, a.request.policy) for a in old.assignments] == [("j0", OLD)]
    assert [(a.request.request_id, a.request.policy) for a in new.assignments] == [
        (name, NEW) for name in ("j1", "j2", "j3")
    ]


# ---- what it cost -----------------------------------------------------------------------------------------------------------------


def test_what_a_sample_took_of_nodes_that_gave_it_back_is_counted_and_only_spot_is_spot() -> None:
    queue = queue_of(request(0))
    (first,) = ask(queue, pull(room=1))
    (lease,) = first.assignments
    queue.returned(RequestReturned(node_id=A, lease_id=lease.lease_id, request_id=RequestId("j0"), busy_s=2.0), 2.0)
    queue.pull(pull(B, room=1))
    (second,) = queue.grants({B: Pool.RESERVED}, slots=1, spot_slots=0, now_s=3.0)
    (lease,) = second.assignments
    failed = RequestFailed(
        node_id=B, lease_id=lease.lease_id, request_id=RequestId("j0"), error_class="RewardError", error="", busy_s=0.5
    )
    queue.failed(failed, 4.0)
    queue.failed(failed, 5.0)  # said twice, counted once
    record = queue.records[RequestId("j0")]
    assert (record.busy_s, record.spot_busy_s) == (2.5, 2.0)


# ---- fair shares ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [1, 4, 16])
def test_groups_of_any_speed_get_work_as_fast_as_they_do_it_and_end_together(room: int) -> None:
    """Groups that take 1, 2 and 4 s a request: 140 requests take 80 s at best, of which the slowest group does 20."""
    queue = queue_of(*map(request, range(140)))
    pace = {NodeId("fast"): 1.0, NodeId("even"): 2.0, NodeId("slow"): 4.0}
    pools = dict.fromkeys(pace, Pool.SPOT)
    free = [(0.0, name, 1) for name in sorted(pace)]
    done = dict.fromkeys(pace, 0)
    ended_s = 0.0
    while free:
        now_s, name, number = heapq.heappop(free)
        queue.pull(pull(name, room=room, number=number))
        for grant in queue.grants(pools, slots=3, spot_slots=3, now_s=now_s):
            done[name] += len(grant.assignments)
            ended_s = now_s + len(grant.assignments) * pace[name]
            heapq.heappush(free, (ended_s, name, number + 1))
    assert sum(done.values()) == 140
    assert queue.claims[JobId("j")].pending == 0
    assert done == pytest.approx({"fast": 80, "even": 40, "slow": 20}, abs=room)
    assert ended_s <= 80.0 + 4.0 * min(room, 3)


def test_a_hello_that_holds_the_answer_keeps_it() -> None:
    queue = queue_of(*map(request, range(8)))
    (first,) = ask(queue, pull(room=2))
    held = [HeldLease(request_id=a.request.request_id, lease_id=a.lease_id) for a in first.assignments]
    queue.reclaim(A, 2.0, "node restarted", keep=frozenset(lease.lease_id for lease in held))
    assert ask(queue, pull(room=2)) == [first]


def test_rollouts_go_before_leftovers_before_explorations_before_evaluations_whoever_came_first() -> None:
    """An evaluation whose samples may go anywhere is no leftover."""

    def claim(op: Op, sequence: int, everywhere: bool = False) -> Claim:
        return Claim(JobId(op), sequence, op, ready=True, everywhere=everywhere)

    order = [
        claim(Op.ROLLOUT, 7),
        claim(Op.ROLLOUT, 8, everywhere=True),
        claim(Op.EXPLORE, 5, everywhere=True),
        claim(Op.EXPLORE, 3),
        claim(Op.EVALUATE, 1, everywhere=True),
        claim(Op.EVALUATE, 2),
    ]
    assert sorted(order, key=lambda claim: claim.rank) == order
