"""What the instance manager handles beside wire messages, and what it finds out. Plain facts; no behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from spot_runtime.messages import NodeHeartbeat, NodeHello, NodeLeft, NodeNoticed
from spot_runtime.types import NodeId


@dataclass(frozen=True)
class NodeLost:
    """Somebody saw the node end without a word, for instance its supervisor."""

    node_id: NodeId


@dataclass(frozen=True)
class NodeTimePassed:
    """Heartbeat deadlines are looked at; to be sent several times a heartbeat deadline."""


@dataclass(frozen=True)
class NodesExcused:
    """Nobody listened until now: no node is to blame for having been silent."""


@dataclass(frozen=True)
class NodeDeclaredLost:
    """The node is gone: its leases are to be given to others. Until it says hello again, it has no capacity."""

    node_id: NodeId


NodeMessage = NodeHello | NodeHeartbeat | NodeNoticed | NodeLeft
InstanceEvent = NodeMessage | NodeLost | NodesExcused | NodeTimePassed
