"""The embedded cluster: every daemon as a real process on loopback. Owns its layout; never what a daemon does.

control, one reserved node with the trainer, `cluster.spot_nodes` spot nodes and the reward service. Nothing is left after `stop`, and
nothing after the owner dies, however it dies.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from spot_runtime.config import RunSettings
from spot_runtime.daemons.settings import ControlSettings, NodeSettings, RewardSettings
from spot_runtime.daemons.supervision import Member, Supervisor
from spot_runtime.errors import ClusterError, InputError
from spot_runtime.preemption import write_notice
from spot_runtime.types import Pool

HOST = "127.0.0.1"
NOTICE_FILE = "notice"
"""Name of the file in a node's folder that its watcher looks for."""

_PORT_MIN = 20_000
_PORT_TRIES = 200
_DAEMONS, _NODES = 0, 1


class EmbeddedCluster:
    """A cluster of this machine's processes, for one owner.

    Args:
        settings: model, store, resolution and `config.cluster`; what else a run is comes with its jobs.
        folder: logs, journal and scratch; made where it is missing.
        port: where control answers; 0: a free one.
    """

    def __init__(self, settings: RunSettings, folder: Path, *, port: int = 0) -> None:
        self._settings = settings
        self._folder = folder.absolute()
        self._port = port
        self._supervisor: Supervisor | None = None
        self.endpoint = ""
        """Where control answers; empty until started."""

    def start(self) -> str:
        """Starts all processes, waits until they are ready and returns control's endpoint. On an error nothing is left.

        Raises:
            PortInUseError: `port` is taken.
            ClusterError: a process died or was not ready within `cluster.start_deadline_s`.
            SpotlightError: whatever else a daemon ended with (ModelError, StoreError).
        """
        assert self._supervisor is None, "started twice"
        control_port = self._port or free_port()
        members = layout(self._settings, self._folder, control_port=control_port, reward_port=free_port())
        deadline_s = self._settings.config.cluster.start_deadline_s
        supervisor = Supervisor(members, self._folder / "logs", start_deadline_s=deadline_s)
        self.endpoint = str(supervisor.start()["control"]["endpoint"])
        self._supervisor = supervisor
        return self.endpoint

    def stop(self) -> None:
        """Ends all processes in order. May be called again."""
        if self._supervisor is not None:
            self._supervisor.stop()

    def check(self) -> None:
        """Raises ClusterError where a process died more often than is made good; the cluster has ended then."""
        if self._supervisor is not None:
            self._supervisor.check()

    def pids(self) -> dict[str, int]:
        """Process ids of the daemons that run, by name: `control`, `reward`, `reserved-0`, `spot-0`…"""
        return {} if self._supervisor is None else self._supervisor.pids()

    def notice(self, node_id: str, grace_period_s: float) -> None:
        """Delivers a preemption notice to a node. Raises InputError for one that is not there."""
        folder = node_folder(self._folder, node_id)
        if node_id not in self.pids() or not folder.is_dir():
            raise InputError(f"node = {node_id!r}: must be one of {', '.join(sorted(self.pids()))}")
        write_notice(folder / NOTICE_FILE, grace_period_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


# ---- layout -----------------------------------------------------------------------------------------------------------------------


def layout(settings: RunSettings, folder: Path, *, control_port: int, reward_port: int) -> list[Member]:
    """The members of an embedded cluster. Ports are fixed before the start, so that a restarted daemon is found where it was."""
    cluster = settings.config.cluster
    endpoint = f"tcp://{HOST}:{control_port}"
    reserved, spot = pinned_cores(usable_cores(), pin=cluster.pin_cores)
    reward = RewardSettings(host=HOST, port=reward_port, dataset=settings.dataset)
    control = ControlSettings(
        bind=endpoint,
        journal_path=str(folder / "journal.sqlite"),
        store=settings.store,
        cluster=cluster,
        reward_url=f"http://{HOST}:{reward_port}",
    )
    nodes = [node_settings(settings, folder, "reserved-0", Pool.RESERVED, endpoint, reserved)]
    nodes += [
        node_settings(settings, folder, f"spot-{index}", Pool.SPOT, endpoint, spot)
        for index in range(cluster.spot_nodes)
    ]
    return [
        Member("reward", "spot_runtime.daemons.reward", reward, stage=_DAEMONS),
        Member("control", "spot_runtime.daemons.control", control, stage=_DAEMONS),
        *(_node_member(node) for node in nodes),
    ]


def node_settings(
    settings: RunSettings, folder: Path, node_id: str, pool: Pool, endpoint: str, cores: tuple[int, ...] | None
) -> NodeSettings:
    """A reserved node has one rollout worker and the trainer; a spot node `slots_per_spot_node` workers."""
    cluster = settings.config.cluster
    return NodeSettings(
        node_id=node_id,
        pool=pool,
        slots=1 if pool is Pool.RESERVED else cluster.slots_per_spot_node,
        control_endpoint=endpoint,
        store=settings.store,
        model=settings.model,
        resolution=settings.resolution,
        folder=str(node_folder(folder, node_id)),
        cores=cores,
        window_max=settings.config.sampling.sde_window_size,
        with_trainer=pool is Pool.RESERVED,
        deterministic=settings.config.deterministic,
        cluster=cluster,
    )


def node_folder(folder: Path, node_id: str) -> Path:
    return folder / "nodes" / node_id


def _node_member(node: NodeSettings) -> Member:
    return Member(
        node.node_id,
        "spot_runtime.daemons.node",
        node,
        cores=node.cores,
        threads=node.threads,
        stage=_NODES,
        may_leave=node.pool is Pool.SPOT,
    )


def usable_cores() -> tuple[int, ...]:
    """Cores that this process may use, ascending; empty where the system does not say."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def pinned_cores(usable: Sequence[int], *, pin: bool) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Cores of the reserved node's processes and of the spot nodes': the first and the second, or None and None."""
    if not pin or len(usable) < 2:
        return None, None
    return (usable[0],), (usable[1],)


def free_port() -> int:
    """A port that nobody listens on, below those that the system hands to outgoing connections.

    Of those, one could be taken while its daemon restarts, by the very peers that try to reconnect to it.
    """
    entropy = random.SystemRandom()
    for _ in range(_PORT_TRIES):
        port = entropy.randrange(_PORT_MIN, _outgoing_port_min())
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if _can_bind(probe, port):
                return port
    raise ClusterError(f"no free port found in {_PORT_TRIES} tries from {_PORT_MIN} up")


def _can_bind(probe: socket.socket, port: int) -> bool:
    try:
        probe.bind((HOST, port))
    except OSError:
        return False
    return True


def _outgoing_port_min() -> int:
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    except OSError:
        return 32_768
    return max(int(text.split()[0]), _PORT_MIN + 1000)
