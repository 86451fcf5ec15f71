"""The instance manager as a dialogue: who is there, who is lost, what is refused, and what was held."""

import math

import pytest
from msgspec.structs import replace

from spot_runtime.errors import ProtocolError
from spot_runtime.instances import InstanceManager, NodeDeclaredLost, NodeLost, NodeState, NodeTimePassed
from spot_runtime.instances.cost import cost_usd
from spot_runtime.instances.fleet import NODES_MAX
from spot_runtime.instances.lifecycle import TRANSITIONS, NodeEvent
from spot_runtime.messages import NodeHeartbeat, NodeHello, NodeLeft, NodeNoticed, NodeStatus
from spot_runtime.types import NodeId, Pool

N1, N2, R1 = NodeId("spot-1"), NodeId("spot-2"), NodeId("reserved-1")
TICK = NodeTimePassed()


def hello(node_id: NodeId, slots: int = 2, pool: Pool = Pool.SPOT) -> NodeHello:
    return NodeHello(node_id=node_id, pool=pool, slots=slots)


def beat(node_id: NodeId, slots: int = 2) -> NodeHeartbeat:
    return NodeHeartbeat(node_id=node_id, slots=slots)


def noticed(node_id: NodeId) -> NodeNoticed:
    return NodeNoticed(node_id=node_id, grace_period_s=30.0)


def left(node_id: NodeId) -> NodeLeft:
    return NodeLeft(node_id=node_id)


def fleet(*events: tuple[float, object]) -> InstanceManager:
    manager = InstanceManager(lost_after_s=20.0)
    for now_s, event in events:
        manager.handle(event, now_s)
    return manager


# ---- states -----------------------------------------------------------------------------------------------------------------------

PATHS = {
    NodeState.ABSENT: (),
    NodeState.LIVE: (hello(N1),),
    NodeState.DRAINING: (hello(N1), noticed(N1)),
    NodeState.LOST: (hello(N1), NodeLost(N1)),
    NodeState.LEFT: (hello(N1), left(N1)),
}
EVENTS = {
    NodeEvent.GREETED: (hello(N1), 1.0),
    NodeEvent.BEAT: (beat(N1), 1.0),
    NodeEvent.NOTICED: (noticed(N1), 1.0),
    NodeEvent.DEPARTED: (left(N1), 1.0),
    NodeEvent.VANISHED: (NodeLost(N1), 1.0),
    NodeEvent.SILENT: (TICK, 20.5),
}
GREETED, BEAT, NOTICED, DEPARTED, VANISHED, SILENT = NodeEvent
EXPECTED = {
    NodeState.ABSENT: ("live", "absent", "absent", "absent", "absent", "absent"),
    NodeState.LIVE: ("live", "live", "draining", "left", "lost", "lost"),
    NodeState.DRAINING: ("live", "draining", "draining", "left", "lost", "lost"),
    NodeState.LOST: ("live", "lost", "lost", "lost", "lost", "lost"),
    NodeState.LEFT: ("live", "left", "left", "left", "left", "left"),
}


@pytest.mark.parametrize("state", NodeState)
@pytest.mark.parametrize("event", NodeEvent)
def test_every_state_meets_every_event(state, event):
    manager = fleet(*((0.0, past) for past in PATHS[state]))
    assert manager.state(N1) is state
    fact, now_s = EVENTS[event]
    facts = manager.handle(fact, now_s)
    after = NodeState(EXPECTED[state][list(NodeEvent).index(event)])
    assert manager.state(N1) is after is TRANSITIONS[state, event]
    newly_lost = after is NodeState.LOST and state is not NodeState.LOST
    assert facts == ([NodeDeclaredLost(N1)] if newly_lost else [])
    assert (N1 in manager.pools()) == (after in (NodeState.LIVE, NodeState.DRAINING))
    assert manager.takes_work(N1) == (after is NodeState.LIVE)


def test_the_table_has_every_pair_and_nothing_else():
    assert set(TRANSITIONS) == {(state, event) for state in NodeState for event in NodeEvent}


def test_a_node_is_lost_when_its_heartbeat_is_overdue_at_a_tick():
    manager = fleet((0.0, hello(N1)), (0.0, hello(N2)), (5.0, beat(N2)))
    assert manager.handle(TICK, 20.0) == []
    assert manager.handle(TICK, 20.1) == [NodeDeclaredLost(N1)]
    assert manager.handle(TICK, 25.1) == [NodeDeclaredLost(N2)]
    assert manager.handle(TICK, 99.0) == []


def test_several_silent_nodes_are_lost_in_the_order_they_fell_silent():
    manager = fleet((0.0, hello(N2)), (0.0, hello(N1)), (0.0, hello(R1, pool=Pool.RESERVED)), (1.0, beat(N1)))
    assert manager.handle(TICK, 50.0) == [NodeDeclaredLost(R1), NodeDeclaredLost(N2), NodeDeclaredLost(N1)]


def test_a_late_heartbeat_before_the_tick_saves_the_node():
    manager = fleet((0.0, hello(N1)), (30.0, beat(N1)))
    assert manager.handle(TICK, 30.0) == []
    assert manager.state(N1) is NodeState.LIVE


def test_a_lost_node_comes_back_by_hello_only():
    manager = fleet((0.0, hello(N1)), (1.0, NodeLost(N1)), (2.0, beat(N1)))
    assert manager.spot_slots == 0
    manager.handle(hello(N1, slots=3), 3.0)
    assert manager.spot_slots == 3


# ---- capacity ---------------------------------------------------------------------------------------------------------------------


def test_spot_slots_leave_out_draining_lost_and_reserved_nodes():
    manager = fleet((0.0, hello(R1, 4, Pool.RESERVED)), (0.0, hello(N1, 2)), (10.0, hello(N2, 3)))
    assert (manager.spot_slots, manager.slots) == (5, 9)
    manager.handle(beat(N2, slots=2), 19.0)  # one of its GPUs went
    assert (manager.spot_slots, manager.slots) == (4, 8)
    manager.handle(beat(R1, slots=4), 20.0)
    manager.handle(TICK, 20.5)
    assert (manager.spot_slots, manager.slots) == (2, 6)  # spot-1 was silent for too long
    manager.handle(noticed(N2), 21.0)
    assert (manager.spot_slots, manager.slots) == (0, 4)
    assert manager.held_slots() == (4, 2)  # still paid for
    manager.handle(hello(N2, 2), 22.0)
    assert (manager.spot_slots, manager.slots) == (2, 6)


def test_gpu_seconds_are_the_integral_of_what_was_held():
    manager = fleet(
        (0.0, hello(R1, 4, Pool.RESERVED)),
        (10.0, hello(N1, 2)),
        (20.0, hello(N2, 2)),
        (30.0, noticed(N1)),  # still paid for
        (35.0, left(N1)),
        (40.0, beat(N2, slots=1)),  # one of its GPUs went
    )
    # spot: [10, 20) 2, [20, 35) 4, [35, 40) 2, [40, ...) 1
    assert manager.usage(0.0, 50.0) == (200.0, 20.0 + 60.0 + 10.0 + 10.0)
    assert manager.usage(15.0, 37.0) == (88.0, 10.0 + 60.0 + 4.0)
    assert manager.usage(-5.0, 0.0) == (0.0, 0.0)
    assert manager.usage(60.0, 60.0) == (0.0, 0.0)


def test_a_silent_node_is_paid_for_until_it_is_declared_lost():
    manager = fleet((0.0, hello(N1, 2)), (25.0, TICK))
    assert manager.usage(0.0, 100.0) == (0.0, 50.0)


def test_statuses_list_present_nodes_then_gone_ones():
    manager = fleet((0.0, hello(N1)), (1.0, hello(N2)), (2.0, left(N1)), (3.0, noticed(N2)))
    assert manager.statuses({N2: 5}) == (
        NodeStatus(node_id=N2, pool=Pool.SPOT, slots=2, in_flight=5, state="draining", last_seen_s=3.0),
        NodeStatus(node_id=N1, pool=Pool.SPOT, slots=0, in_flight=0, state="left", last_seen_s=2.0),
    )


# ---- refusals ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (hello(N2, -1), "slots = -1 of node spot-2: must be within [0, 1024]"),
        (beat(N1, 1025), "slots = 1025 of node spot-1: must be within [0, 1024]"),
        *(
            (replace(beat(N1), step_s=step_s), f"step_s = {step_s} of node spot-1: must be within [0, 1e+06]")
            for step_s in (math.nan, math.inf, -0.5, 1e308)
        ),
        (hello(N1, pool=Pool.RESERVED), "pool = reserved of node spot-1: must be spot, as it said before"),
    ],
)
def test_impossible_numbers_are_refused_and_change_nothing(event, line):
    manager = fleet((0.0, hello(N1)))
    before = manager.statuses({}), manager.held_slots(), manager.slots, manager.usage(0.0, 9.0)
    with pytest.raises(ProtocolError) as caught:
        manager.handle(event, 1.0)
    assert str(caught.value) == line
    assert (manager.statuses({}), manager.held_slots(), manager.slots, manager.usage(0.0, 9.0)) == before


def test_nodes_are_bounded_present_and_gone():
    manager = InstanceManager(lost_after_s=20.0)
    ids = [NodeId(f"n{i}") for i in range(NODES_MAX + 1)]
    for node_id in ids[:-1]:
        manager.handle(hello(node_id, 1), 0.0)
    with pytest.raises(ProtocolError, match="nodes = 4097: must be <= 4096"):
        manager.handle(hello(ids[-1]), 0.0)
    manager.handle(hello(ids[0], 1), 0.0)  # one that is there may say hello again
    assert manager.usage(0.0, 1.0) == (0.0, float(NODES_MAX))
    assert len(manager.handle(TICK, 30.0)) == NODES_MAX
    manager.handle(hello(ids[-1]), 30.0)
    manager.handle(left(ids[-1]), 30.0)
    assert len(manager.statuses({})) == NODES_MAX
    assert manager.usage(31.0, 32.0) == (0.0, 0.0)


def test_time_going_back_is_a_programmer_error():
    manager = fleet((10.0, hello(N1)))
    with pytest.raises(AssertionError, match=r"time went back from 10.0 s to 9.0 s"):
        manager.handle(TICK, 9.0)


# ---- cost -------------------------------------------------------------------------------------------------------------------------


def test_paper_prices_are_the_averages_of_its_table():
    # per GPU-hour: reserved (55.04 + 88.49 + 98.32) / 8 / 3 = 10.077; spot (14.24 / 8 + 2.47 + 39.81 / 8 + 18.17 / 8) / 4 = 2.874
    assert cost_usd(3600.0, 0.0) == 10.08 == round((55.04 + 88.49 + 98.32) / 24, 2)
    assert cost_usd(0.0, 3600.0) == 2.87 == round((14.24 / 8 + 2.47 + 39.81 / 8 + 18.17 / 8) / 4, 2)


def test_cost_by_hand():
    # 4 reserved GPUs for half an hour, 8 spot GPUs for a quarter: 2 * 10.08 + 2 * 2.87 = 25.90
    assert cost_usd(4 * 1800.0, 8 * 900.0) == pytest.approx(25.90)


def test_lost_steps_add_up_over_nodes_and_over_the_lives_of_one() -> None:
    manager = InstanceManager(lost_after_s=10.0)
    for node_id in (N1, N2):
        manager.handle(NodeHello(node_id=node_id, pool=Pool.SPOT, slots=2), 0.0)
    for at_s, (node_id, lost_steps) in enumerate([(N1, 2), (N2, 3), (N1, 2), (N1, 1), (N1, 4)]):
        beat = NodeHeartbeat(node_id=node_id, slots=2, lost_steps=lost_steps, degrees=(2,))
        manager.handle(beat, float(at_s))
    assert manager.lost_steps == 2 + 3 + 4
    assert {status.node_id: status.degrees for status in manager.statuses({})} == {N1: (2,), N2: (2,)}
    with pytest.raises(ProtocolError, match=r"^lost_steps = -1 of node"):
        manager.handle(NodeHeartbeat(node_id=N1, slots=2, lost_steps=-1), 9.0)


def test_standbys_of_present_nodes_are_counted_and_told():
    fleet = InstanceManager(lost_after_s=20.0)
    for number in (1, 2):
        node_id = NodeId(f"spot-{number}")
        fleet.handle(NodeHello(node_id=node_id, pool=Pool.SPOT, slots=1), number)
        fleet.handle(NodeHeartbeat(node_id=node_id, slots=1, standbys=number), number)
    assert fleet.standbys == 3
    fleet.handle(NodeLeft(node_id=NodeId("spot-2")), 3.0)
    assert fleet.standbys == 1
    assert [status.standbys for status in fleet.statuses({})] == [1, 0]
