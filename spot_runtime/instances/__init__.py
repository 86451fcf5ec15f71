"""Pure core: which nodes exist, their capacity over time and what it costs."""

from spot_runtime.instances.cost import PAPER_PRICES, Prices, cost_usd
from spot_runtime.instances.events import NodeDeclaredLost, NodeLost, NodesExcused, NodeTimePassed
from spot_runtime.instances.fleet import InstanceManager
from spot_runtime.instances.lifecycle import NodeState

__all__ = [
    "PAPER_PRICES",
    "InstanceManager",
    "NodeDeclaredLost",
    "NodeLost",
    "NodeState",
    "NodeTimePassed",
    "NodesExcused",
    "Prices",
    "cost_usd",
]
