"""The embedded cluster: every daemon as a real process on loopback. Owns its layout; never what a daemon does.

control, one reserved node with the trainer, `cluster.spot_nodes` spot nodes and the reward service. Nothing is left after `stop`, and
nothing after the owner dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from spot_runtime.config import RunSettings
from spot_runtime.daemons.ports import HOST, free_port, listening_socket
from spot_runtime.daemons.settings import ControlSettings, NodeSettings, RewardSettings
from spot_runtime.daemons.supervision import Member, Supervisor
from spot_runtime.errors import InputError
from spot_runtime.models.address import local_model
from spot_runtime.preemption import write_notice, write_slots
from spot_runtime.store.address import check_shared
from spot_runtime.types import Pool

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
        self._members: list[Member] = []
        self._supervisor: Supervisor | None = None
        self._lock: IO[str] | None = None
        self.endpoint = ""
        """Where control answers; empty until started."""

    def start(self) -> str:
        """Starts all processes, waits until they are ready and returns control's endpoint. On an error nothing is left.

        Raises:
            InputError: another cluster uses the folder, or no other process sees the store.
            PortInUseError: `port` is taken.
            ClusterError: a process died or was not ready within `cluster.start_deadline_s`.
            SpotlightError: whatever else a daemon ended with (ModelError, StoreError).
        """
        assert self._supervisor is None, "started twice"
        check_shared(self._settings.store)
        if self._port:
            listening_socket(HOST, self._port).close()
        self._lock = lock_folder(self._folder)
        try:
            # before deadlines run; every node finds it in the cache
            local_model(self._settings.model, self._settings.store)
            self._members = layout(
                self._settings, self._folder, control_port=self._port or free_port(), reward_port=free_port()
            )
            deadline_s = self._settings.config.cluster.start_deadline_s
            self._supervisor = Supervisor(self._members, self._folder / "logs", start_deadline_s=deadline_s)
            self.endpoint = str(self._supervisor.start()["control"]["endpoint"])
        except BaseException:
            self.stop()
            raise
        return self.endpoint

    def stop(self) -> None:
        """Ends all processes in order. May be called again."""
        if self._supervisor is not None:
            self._supervisor.stop()
        if self._lock is not None:
            self._lock.close()

    def check(self) -> None:
        """Raises ClusterError where a process died more often than is made good; the cluster has ended then."""
        if self._supervisor is not None:
            self._supervisor.check()

    def pids(self) -> dict[str, int]:
        """Process ids of the daemons that run, by name: `control`, `reward`, `reserved-0`, `spot-0`…"""
        return {} if self._supervisor is None else self._supervisor.pids()

    def notice(self, node_id: str, grace_period_s: float) -> None:
        """Delivers a preemption notice to a node. Raises InputError for one that is not there."""
        write_notice(self._node(node_id).notice_path, grace_period_s)

    def change_slots(self, node_id: str, slots: Sequence[int], grace_period_s: float) -> None:
        """Gives a node these slots from now on; it has `grace_period_s` to leave those it loses. Raises InputError as `notice`."""
        write_slots(self._node(node_id).slots_path, slots, grace_period_s)

    def _node(self, node_id: str) -> NodeSettings:
        nodes = {each.config.node_id: each.config for each in self._members if isinstance(each.config, NodeSettings)}
        if node_id not in nodes:
            raise InputError(f"node = {node_id!r}: must be one of {', '.join(nodes) or 'none'}")
        return nodes[node_id]

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
    reward = RewardSettings(
        host=HOST,
        port=reward_port,
        threads=cluster.reward_threads,
        rewards=cluster.rewards,
        store=settings.store,
        prompts_keys=(settings.train_prompts_key, settings.validation_prompts_key),
    )
    control = ControlSettings(
        bind=endpoint,
        journal_path=str(folder / "journal.sqlite"),
        store=settings.store,
        cluster=cluster,
        reward_url=f"http://{HOST}:{reward_port}",
        model_digest=settings.model_digest,
        resolution=settings.resolution,
        window_max=settings.config.sampling.sde_window_size,
        deterministic=settings.config.deterministic,
        metrics_port=0,
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
        model_digest=settings.model_digest,
        resolution=settings.resolution,
        folder=str(node_folder(folder, node_id)),
        cores=cores,
        window_max=settings.config.sampling.sde_window_size,
        device=cluster.device,
        threads=cluster.threads,
        step_deadline_s=cluster.step_deadline_s,
        with_trainer=pool is Pool.RESERVED,
        deterministic=settings.config.deterministic,
        cluster=cluster,
    )


def lock_folder(folder: Path) -> IO[str]:
    """Makes the folder ours until the file is closed or this process ends: two clusters must not share a journal."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise InputError(f"folder = {folder}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise InputError(f"folder = {folder}: another cluster uses it") from error
    return lock


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
