"""Random lives of a fleet against an oracle that only keeps the log, and random step functions against a sum over small cells."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from spot_runtime.instances import InstanceManager, NodeDeclaredLost, NodeLost, NodeState, NodeTimePassed
from spot_runtime.instances.capacity import StepFunction
from spot_runtime.messages import NodeHeartbeat, NodeHello, NodeLeft, NodeNoticed
from spot_runtime.types import NodeId, Pool

LOST_AFTER_S = 3
POOL_OF = {
    NodeId("a"): Pool.SPOT,
    NodeId("b"): Pool.SPOT,
    NodeId("c"): Pool.SPOT,
    NodeId("d"): Pool.RESERVED,
}
nodes = st.sampled_from(sorted(POOL_OF))
slots = st.integers(0, 4)


class Life:
    """The oracle of one node: when it was there with how many slots, written as finished and open intervals of whole seconds."""

    def __init__(self) -> None:
        self.intervals: list[tuple[int, int, int]] = []
        self.since, self.slots = 0, 0
        self.there = self.draining = False
        self.heard = 0

    def close(self, now: int) -> None:
        if self.there:
            self.intervals.append((self.since, now, self.slots))
        self.there = self.draining = False

    def open(self, now: int, slots: int) -> None:
        draining = self.draining
        self.close(now)
        self.since, self.slots, self.there, self.draining = now, slots, True, draining

    def held(self, begin: int, end: int, now: int) -> int:
        parts = [*self.intervals, *([(self.since, now, self.slots)] if self.there else [])]
        return sum(slots * max(0, min(end, stop) - max(begin, start)) for start, stop, slots in parts)


class FleetMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.now = 0
        self.fleet = InstanceManager(lost_after_s=LOST_AFTER_S)
        self.lives = {node_id: Life() for node_id in POOL_OF}

    def send(self, event: object) -> list[NodeDeclaredLost]:
        return self.fleet.handle(event, float(self.now))

    @rule(seconds=st.integers(1, 4))
    def time_goes_on(self, seconds: int) -> None:
        self.now += seconds

    @rule(node_id=nodes, slots=slots)
    def hello(self, node_id: NodeId, slots: int) -> None:
        assert self.send(NodeHello(node_id=node_id, pool=POOL_OF[node_id], slots=slots)) == []
        life = self.lives[node_id]
        life.open(self.now, slots)
        life.draining, life.heard = False, self.now

    @rule(node_id=nodes, slots=slots)
    def heartbeat(self, node_id: NodeId, slots: int) -> None:
        assert self.send(NodeHeartbeat(node_id=node_id, slots=slots)) == []
        life = self.lives[node_id]
        if life.there:
            life.open(self.now, slots)
            life.heard = self.now

    @rule(node_id=nodes)
    def noticed(self, node_id: NodeId) -> None:
        assert self.send(NodeNoticed(node_id=node_id, grace_period_s=30.0)) == []
        life = self.lives[node_id]
        life.draining = life.there
        if life.there:
            life.heard = self.now

    @rule(node_id=nodes)
    def left(self, node_id: NodeId) -> None:
        assert self.send(NodeLeft(node_id=node_id)) == []
        self.lives[node_id].close(self.now)

    @rule(node_id=nodes)
    def vanished(self, node_id: NodeId) -> None:
        facts = self.send(NodeLost(node_id))
        assert facts == ([NodeDeclaredLost(node_id)] if self.lives[node_id].there else [])
        self.lives[node_id].close(self.now)

    @rule()
    def tick(self) -> None:
        silent = {n for n, life in self.lives.items() if life.there and self.now - life.heard > LOST_AFTER_S}
        facts = self.send(NodeTimePassed())
        assert {fact.node_id for fact in facts} == silent
        assert len(facts) == len(silent)
        for node_id in silent:
            self.lives[node_id].close(self.now)

    @rule(data=st.data())
    def any_interval_has_the_oracles_integral(self, data: st.DataObject) -> None:
        begin = data.draw(st.integers(0, self.now))
        end = data.draw(st.integers(begin, self.now))
        held = self.fleet.usage(float(begin), float(end))
        assert held == pytest.approx(self.expected(begin, end), abs=1e-9)

    def expected(self, begin: int, end: int) -> tuple[int, int]:
        held = dict.fromkeys(Pool, 0)
        for node_id, life in self.lives.items():
            held[POOL_OF[node_id]] += life.held(begin, end, self.now)
        return held[Pool.RESERVED], held[Pool.SPOT]

    @invariant()
    def all_time_since_the_start_is_accounted_for(self) -> None:
        assert self.fleet.usage(0.0, float(self.now)) == pytest.approx(self.expected(0, self.now), abs=1e-9)

    @invariant()
    def who_is_there_and_takes_work(self) -> None:
        assert set(self.fleet.pools()) == {node_id for node_id, life in self.lives.items() if life.there}
        takers = {node_id for node_id, life in self.lives.items() if life.there and not life.draining}
        assert {node_id for node_id in POOL_OF if self.fleet.takes_work(node_id)} == takers
        working = {pool: sum(self.lives[n].slots for n in takers if POOL_OF[n] is pool) for pool in Pool}
        assert (self.fleet.spot_slots, self.fleet.slots) == (working[Pool.SPOT], sum(working.values()))
        there = [(POOL_OF[node_id], life.slots) for node_id, life in self.lives.items() if life.there]
        held = {pool: sum(slots for its, slots in there if its is pool) for pool in Pool}
        assert self.fleet.held_slots() == (held[Pool.RESERVED], held[Pool.SPOT])

    @invariant()
    def no_node_is_in_two_states(self) -> None:
        listed = [status.node_id for status in self.fleet.statuses({})]
        assert len(listed) == len(set(listed))
        for status in self.fleet.statuses({}):
            assert status.state == self.fleet.state(status.node_id)
            assert (status.state in (NodeState.LIVE, NodeState.DRAINING)) == self.lives[status.node_id].there


FleetMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_fleet_lives_as_its_log_says = FleetMachine.TestCase


# ---- step functions ---------------------------------------------------------------------------------------------------------------

steps = st.lists(st.tuples(st.integers(0, 5), st.integers(-3, 3)), max_size=40)


def build(changes: list[tuple[int, int]], points_max: int = 4096) -> tuple[StepFunction, list[int], int]:
    """The function, and its value in each whole second up to the end."""
    function, cells, now = StepFunction(points_max), [], 0
    value = 0
    for wait, after in changes:
        cells += [value] * wait
        now += wait
        value = after
        function.set(float(now), float(value))
    cells += [value] * 10
    return function, cells, now + 10


@given(steps, st.data())
def test_integral_is_the_sum_over_whole_seconds(changes, data):
    function, cells, end = build(changes)
    begin = data.draw(st.integers(0, end))
    stop = data.draw(st.integers(begin, end))
    assert function.integral(begin, stop) == sum(cells[begin:stop])
    assert [function.at(second) for second in range(end)] == cells


@given(steps)
def test_a_full_function_grows_coarser_but_keeps_its_total_and_its_recent_half(changes):
    function, cells, end = build(changes, points_max=8)
    assert len(function.points) <= 8
    assert function.integral(0, end) == pytest.approx(sum(cells))
    recent = [int(start) for start, _ in function.points][-4:]
    if len(recent) == 4:
        assert [function.at(second) for second in range(recent[0], end)] == cells[recent[0] :]


def test_step_function_by_hand():
    function = StepFunction()
    for start_s, value in ((10.0, 2), (10.0, 3), (20.0, 3), (30.0, 0), (30.0, 1)):
        function.set(start_s, value)
    assert function.points == ((10.0, 3), (30.0, 1))
    assert [function.at(time_s) for time_s in (9.9, 10.0, 29.9, 30.0)] == [0.0, 3, 3, 1]
    assert function.integral(0.0, 40.0) == 70.0


def test_a_value_set_in_the_past_is_a_programmer_error():
    function = StepFunction()
    function.set(10.0, 1)
    with pytest.raises(AssertionError, match=r"9.0 s is before 10.0 s"):
        function.set(9.0, 2)
