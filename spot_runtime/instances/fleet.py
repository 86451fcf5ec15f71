"""The instance manager (paper §4.1): which nodes are there, and how many slots were held and took work over time.

Owns node states, heartbeat deadlines and capacity. Never knows requests or leases, never reads a clock: `now_s` comes in and only grows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from spot_runtime.errors import ProtocolError
from spot_runtime.instances.capacity import StepFunction
from spot_runtime.instances.events import (
    InstanceEvent,
    NodeDeclaredLost,
    NodeLost,
    NodeMessage,
    NodesExcused,
    NodeTimePassed,
)
from spot_runtime.instances.lifecycle import PRESENT_STATES, TRANSITIONS, NodeEvent, NodeState
from spot_runtime.messages import NodeHeartbeat, NodeHello, NodeLeft, NodeNoticed, NodeStatus
from spot_runtime.types import NodeId, Pool

SLOTS_MAX = 1024
"""Slots that one node may claim."""
NODES_MAX = 4096
"""Nodes present at a time, and as many again that are gone but still remembered."""
STEP_S_MAX = 1e6
"""GPU-seconds of a sample's denoising step that a node may claim: more than a week of one GPU."""

EVENT_OF = {
    NodeHello: NodeEvent.GREETED,
    NodeHeartbeat: NodeEvent.BEAT,
    NodeNoticed: NodeEvent.NOTICED,
    NodeLeft: NodeEvent.DEPARTED,
    NodeLost: NodeEvent.VANISHED,
}


@dataclass
class NodeRecord:
    """One node. `held` and `working` are its share of the pool's capacity now: `slots` while it is present, and while it takes work."""

    node_id: NodeId
    pool: Pool
    state: NodeState = NodeState.ABSENT
    slots: int = 0
    held: int = 0
    working: int = 0
    seen_s: float = 0.0
    lost_steps: int = 0
    degrees: tuple[int, ...] = ()
    standbys: int = 0

    @property
    def is_present(self) -> bool:
        return self.state in PRESENT_STATES


class InstanceManager:
    """`handle(event, now_s)` takes a fact in and returns the nodes that it finds lost.

    `_present` and `_gone` share no key; `_gone` is in order of departure. `_held` is the sum of the slots of present nodes, by pool, over
    time: what is paid for. `_working` is that of the nodes that take work: N_spot. `lost_steps` are the sample-steps that nodes took again,
    since this process began.
    """

    def __init__(self, *, lost_after_s: float) -> None:
        assert lost_after_s > 0, f"lost_after_s = {lost_after_s}: must be > 0"
        self.lost_after_s = lost_after_s
        self._now_s = -math.inf
        self._present: dict[NodeId, NodeRecord] = {}
        self._gone: dict[NodeId, NodeRecord] = {}
        self._held = {pool: StepFunction() for pool in Pool}
        self._working = {pool: StepFunction() for pool in Pool}
        self._earlier_s = (0.0, 0.0)
        self.lost_steps = 0

    # ---- facts in ----

    def handle(self, event: InstanceEvent, now_s: float) -> list[NodeDeclaredLost]:
        """Takes one fact in. Raises ProtocolError, and changes nothing, for numbers that no node can have."""
        assert now_s >= self._now_s, f"time went back from {self._now_s} s to {now_s} s"
        if isinstance(event, NodeHello | NodeHeartbeat):
            self._check(event)
        self._now_s = now_s
        if isinstance(event, NodeTimePassed):
            return self._find_silent(now_s)
        if isinstance(event, NodesExcused):
            for record in self._present.values():
                record.seen_s = now_s
            return []
        return self._take(event, now_s)

    # ---- what holds now ----

    def pools(self) -> dict[NodeId, Pool]:
        """Nodes that are present, live or draining, with their pools."""
        return {node_id: record.pool for node_id, record in self._present.items()}

    def is_present(self, node_id: NodeId) -> bool:
        return node_id in self._present

    def pool(self, node_id: NodeId) -> Pool | None:
        """Of a node that is present; else None."""
        record = self._present.get(node_id)
        return record.pool if record else None

    def slots_of(self, node_id: NodeId) -> int:
        """Slots of a node that is present; else 0."""
        record = self._present.get(node_id)
        return record.slots if record else 0

    @property
    def standbys(self) -> int:
        """Processes of all present nodes that wait for a slot."""
        return sum(record.standbys for record in self._present.values())

    def state(self, node_id: NodeId) -> NodeState:
        record = self._present.get(node_id) or self._gone.get(node_id)
        return record.state if record else NodeState.ABSENT

    def takes_work(self, node_id: NodeId) -> bool:
        """Whether the node is there and not under a preemption notice."""
        return self.state(node_id) is NodeState.LIVE

    @property
    def spot_slots(self) -> int:
        """N_spot: slots of spot nodes that take work."""
        return int(self._working[Pool.SPOT].last)

    @property
    def slots(self) -> int:
        """The same of both pools."""
        return int(sum(working.last for working in self._working.values()))

    def statuses(self, in_flight: Mapping[NodeId, int]) -> tuple[NodeStatus, ...]:
        """Every remembered node for the status page; `in_flight` counts the requests each holds."""
        return tuple(
            NodeStatus(
                node_id=record.node_id,
                pool=record.pool,
                slots=record.slots if record.is_present else 0,
                in_flight=in_flight.get(record.node_id, 0),
                state=record.state,
                last_seen_s=record.seen_s,
                degrees=record.degrees if record.is_present else (),
                standbys=record.standbys if record.is_present else 0,
            )
            for record in (*self._present.values(), *self._gone.values())
        )

    # ---- what was held ----

    def usage(self, from_s: float, to_s: float) -> tuple[float, float]:
        """(reserved, spot) GPU-seconds held within [from_s, to_s]: a node counts from its hello until it left or was declared lost."""
        return (
            self._held[Pool.RESERVED].integral(from_s, to_s),
            self._held[Pool.SPOT].integral(from_s, to_s),
        )

    def totals(self, now_s: float) -> tuple[float, float]:
        """(reserved, spot) GPU-seconds held since the cluster began, what an earlier life of control counted included."""
        reserved_s, spot_s = self.usage(-math.inf, now_s)
        return self._earlier_s[0] + reserved_s, self._earlier_s[1] + spot_s

    def held_slots(self) -> tuple[float, float]:
        """(reserved, spot) slots held now, draining ones included."""
        return self._held[Pool.RESERVED].last, self._held[Pool.SPOT].last

    def resume(self, reserved_s: float, spot_s: float) -> None:
        """Counts on from totals of an earlier life; before any node has said hello."""
        assert not self._present, "nodes are here already"
        self._earlier_s = (reserved_s, spot_s)

    # ---- transitions ----

    def _take(self, event: NodeMessage | NodeLost, now_s: float) -> list[NodeDeclaredLost]:
        if isinstance(event, NodeHello):
            self._admit(event)
        record = self._present.get(event.node_id) or self._gone.get(event.node_id)
        if record is None:
            return []  # ABSENT: only a hello makes a record
        if isinstance(event, NodeHeartbeat) and record.is_present:
            self._book_lost_steps(record, event.lost_steps)
            record.slots, record.degrees, record.standbys = event.slots, event.degrees, event.standbys
        if not isinstance(event, NodeLost):
            record.seen_s = now_s
        return self._move(record, EVENT_OF[type(event)], now_s)

    def _admit(self, hello: NodeHello) -> None:
        """Finds or makes the node's record."""
        record = self._gone.pop(hello.node_id, None) or self._present.get(hello.node_id)
        if record is None:
            record = NodeRecord(hello.node_id, hello.pool)
        self._present[hello.node_id] = record
        record.slots = hello.slots

    def _book_lost_steps(self, record: NodeRecord, lost_steps: int) -> None:
        """What the node's counter grew by; one that fell belongs to a new process."""
        self.lost_steps += lost_steps - record.lost_steps if lost_steps >= record.lost_steps else lost_steps
        record.lost_steps = lost_steps

    def _move(self, record: NodeRecord, event: NodeEvent, now_s: float) -> list[NodeDeclaredLost]:
        was_present = record.is_present
        record.state = TRANSITIONS[record.state, event]
        if was_present and not record.is_present:
            self._gone[record.node_id] = self._present.pop(record.node_id)
            while len(self._gone) > NODES_MAX:
                del self._gone[next(iter(self._gone))]
        self._count(record, now_s)
        lost = was_present and record.state is NodeState.LOST
        return [NodeDeclaredLost(record.node_id)] if lost else []

    def _count(self, record: NodeRecord, now_s: float) -> None:
        held = record.slots if record.is_present else 0
        working = record.slots if record.state is NodeState.LIVE else 0
        for capacity, change in ((self._held, held - record.held), (self._working, working - record.working)):
            capacity[record.pool].set(now_s, capacity[record.pool].last + change)
        record.held, record.working = held, working

    def _find_silent(self, now_s: float) -> list[NodeDeclaredLost]:
        silent = [record for record in self._present.values() if now_s - record.seen_s > self.lost_after_s]
        return [
            fact
            for record in sorted(silent, key=lambda record: (record.seen_s, record.node_id))
            for fact in self._move(record, NodeEvent.SILENT, now_s)
        ]

    # ---- bad numbers ----

    def _check(self, event: NodeHello | NodeHeartbeat) -> None:
        if not 0 <= event.slots <= SLOTS_MAX:
            raise ProtocolError(f"slots = {event.slots} of node {event.node_id}: must be within [0, {SLOTS_MAX}]")
        if isinstance(event, NodeHeartbeat):
            if event.lost_steps < 0:
                raise ProtocolError(f"lost_steps = {event.lost_steps} of node {event.node_id}: must be >= 0")
            if not 0 <= event.step_s <= STEP_S_MAX:
                raise ProtocolError(
                    f"step_s = {event.step_s} of node {event.node_id}: must be within [0, {STEP_S_MAX:g}]"
                )
            return
        known = self._present.get(event.node_id) or self._gone.get(event.node_id)
        if known and known.pool is not event.pool:
            raise ProtocolError(f"pool = {event.pool} of node {event.node_id}: must be {known.pool}, as it said before")
        if event.node_id not in self._present and len(self._present) >= NODES_MAX:
            raise ProtocolError(f"nodes = {len(self._present) + 1}: must be <= {NODES_MAX}")
