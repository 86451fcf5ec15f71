"""Life of one node: its states and transitions. Never counts slots or time.

Rules: only a hello makes a node LIVE, whatever it was before, so a node that is still under a notice repeats the notice after its hello. A
DRAINING node takes no work but is still paid for. What a node that is not present says, other than hello, changes nothing: late and
repeated messages are harmless. Every pair of state and event is in TRANSITIONS.
"""

from __future__ import annotations

from enum import StrEnum


class NodeState(StrEnum):
    """ABSENT: never heard of, or forgotten. LOST and LEFT: gone without and with a word."""

    ABSENT = "absent"
    LIVE = "live"
    DRAINING = "draining"
    LOST = "lost"
    LEFT = "left"


class NodeEvent(StrEnum):
    """What can happen to a node. SILENT: its heartbeat deadline passed. VANISHED: somebody saw it end."""

    GREETED = "greeted"
    BEAT = "beat"
    NOTICED = "noticed"
    DEPARTED = "departed"
    VANISHED = "vanished"
    SILENT = "silent"


S, E = NodeState, NodeEvent
TRANSITIONS: dict[tuple[NodeState, NodeEvent], NodeState] = {
    **{(state, E.GREETED): S.LIVE for state in S},
    **{(state, event): state for state in (S.ABSENT, S.LOST, S.LEFT) for event in E if event is not E.GREETED},
    (S.LIVE, E.BEAT): S.LIVE,
    (S.LIVE, E.NOTICED): S.DRAINING,
    (S.LIVE, E.DEPARTED): S.LEFT,
    (S.LIVE, E.VANISHED): S.LOST,
    (S.LIVE, E.SILENT): S.LOST,
    (S.DRAINING, E.BEAT): S.DRAINING,
    (S.DRAINING, E.NOTICED): S.DRAINING,
    (S.DRAINING, E.DEPARTED): S.LEFT,
    (S.DRAINING, E.VANISHED): S.LOST,
    (S.DRAINING, E.SILENT): S.LOST,
}
PRESENT_STATES = frozenset({S.LIVE, S.DRAINING})
