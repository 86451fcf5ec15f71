import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from process_child import ChildConfig

from spot_runtime.config import ClusterConfig, RunSettings, TrainConfig
from spot_runtime.daemons.ports import free_port
from spot_runtime.daemons.settings import ControlSettings, NodeSettings, RewardSettings
from spot_runtime.daemons.supervision import Member, Supervisor
from spot_runtime.daemons.supervisor import EmbeddedCluster, layout, pinned_cores
from spot_runtime.errors import ClusterError, InputError, ModelError
from spot_runtime.types import Pool

HERE = Path(__file__).parent
Supervise = Callable[..., Supervisor]


@pytest.fixture(autouse=True)
def _children_find_their_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Supervise]:
    supervisors: list[Supervisor] = []

    def make(*members: Member, **options: float) -> Supervisor:
        supervisors.append(Supervisor(members, tmp_path / "logs", **{"start_deadline_s": 30.0, **options}))
        return supervisors[-1]

    yield make
    for supervisor in supervisors:
        supervisor.stop(0.0)


def member(name: str, folder: Path, behaviour: str = "wait", depth: int = 0, **options: object) -> Member:
    return Member(name, "process_child", ChildConfig(behaviour=behaviour, folder=str(folder), depth=depth), **options)


def wait_for(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    end_s = time.monotonic() + deadline_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.02)
    assert condition()


def running(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


# ---- keeping processes


def test_all_members_are_started_and_stop_leaves_not_even_their_children(tmp_path: Path, supervise: Supervise) -> None:
    before = len(os.listdir("/proc/self/fd"))
    supervisor = supervise(member("control", tmp_path), member("node", tmp_path, depth=1, stage=1))
    facts = supervisor.start()
    pids = [int(pid) for each in facts.values() for pid in each["pids"].split()]
    assert list(facts) == ["control", "node"]
    assert len(pids) == 3
    assert running(pids) == pids
    assert (tmp_path / "logs" / "node.log").is_file()
    supervisor.stop()
    assert running(pids) == []
    supervisor.stop()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_killed_member_is_started_again(tmp_path: Path, supervise: Supervise) -> None:
    supervisor = supervise(member("control", tmp_path), member("node", tmp_path))
    supervisor.start()
    first = supervisor.pids()
    os.kill(first["node"], signal.SIGKILL)
    wait_for(lambda: supervisor.pids().get("node", first["node"]) != first["node"])
    assert supervisor.pids()["control"] == first["control"]
    supervisor.check()


def test_a_member_that_may_leave_is_not_started_again_and_one_that_may_not_is(
    tmp_path: Path, supervise: Supervise
) -> None:
    supervisor = supervise(member("spot", tmp_path, may_leave=True), member("control", tmp_path))
    supervisor.start()
    first = supervisor.pids()
    for pid in first.values():
        os.kill(pid, signal.SIGTERM)
    wait_for(lambda: supervisor.pids().get("control", first["control"]) != first["control"])
    assert "spot" not in supervisor.pids()


def test_a_member_that_dies_too_often_ends_them_all(tmp_path: Path, supervise: Supervise) -> None:
    supervisor = supervise(member("control", tmp_path), member("node", tmp_path), restarts_max=2)
    supervisor.start()
    control = supervisor.pids()["control"]
    killed: set[int] = set()

    def kill_node_again() -> bool:
        pid = supervisor.pids().get("node")
        if pid is not None and pid not in killed:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        return not supervisor.pids()

    wait_for(kill_node_again)
    assert len(killed) == 3
    assert running([control]) == []
    with pytest.raises(ClusterError, match=r"^node died 3 times within 60 s, last with exit code -9: must be <= 2: "):
        supervisor.check()


def test_an_error_at_the_start_is_raised_as_its_class_and_nothing_is_left(tmp_path: Path, supervise: Supervise) -> None:
    children = psutil.Process().children()
    supervisor = supervise(member("control", tmp_path, depth=1), member("node", tmp_path, "refuse"))
    with pytest.raises(ModelError, match=r"^model = x: lacks vae$"):
        supervisor.start()
    assert psutil.Process().children() == children


def test_a_member_that_is_never_ready_ends_the_start_at_its_deadline(tmp_path: Path, supervise: Supervise) -> None:
    children = psutil.Process().children()
    began_s = time.monotonic()
    supervisor = supervise(member("node", tmp_path, "never"), member("control", tmp_path), start_deadline_s=6.0)
    with pytest.raises(ClusterError, match=r"process_child was not ready within 6 s: .*looking for the weights"):
        supervisor.start()
    assert 6.0 <= time.monotonic() - began_s < 30
    assert psutil.Process().children() == children


def test_a_deaf_member_is_killed_by_stop(tmp_path: Path, supervise: Supervise) -> None:
    supervisor = supervise(member("node", tmp_path, "deaf"))
    supervisor.start()
    pid = supervisor.pids()["node"]
    supervisor.stop(0.2)
    assert running([pid]) == []


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, None])
def test_however_the_owner_ends_no_process_is_left(tmp_path: Path, ending: signal.Signals | None) -> None:
    """None: an exception that nobody catches."""
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom process_child import ChildConfig\n"
        "from spot_runtime.daemons.supervision import Member, Supervisor\n"
        f"folder = {str(tmp_path)!r}\n"
        "members = [Member(f'm{d}', 'process_child', ChildConfig(folder=folder, depth=d)) for d in (0, 1)]\n"
        "facts = Supervisor(members, Path(folder) / 'logs', start_deadline_s=30.0).start()\n"
        "print(*(each['pids'] for each in facts.values()), flush=True)\n"
        + ("time.sleep(600)\n" if ending else "1 / 0\n")
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 3
    if ending is not None:
        owner.send_signal(ending)
    assert owner.wait(20) != 0
    owner.stdout.close()
    wait_for(lambda: running(pids) == [], 10)


# ---- the layout of an embedded cluster


def run_settings(**cluster: object) -> RunSettings:
    return RunSettings(
        run_id="run-1",
        iterations=1,
        resolution=64,
        model="some/model",
        store="memory://store",
        train_prompts_key="train",
        validation_prompts_key="validation",
        config=TrainConfig(cluster=ClusterConfig(**cluster)),
    )


def test_the_layout_has_every_daemon_once_and_the_spot_nodes_asked_for(tmp_path: Path) -> None:
    members = layout(
        run_settings(spot_nodes=3, slots_per_spot_node=2), tmp_path, control_port=20_001, reward_port=20_002
    )
    assert [each.name for each in members] == ["reward", "control", "reserved-0", "spot-0", "spot-1", "spot-2"]
    reward, control, reserved, *spots = [each.config for each in members]
    assert isinstance(reward, RewardSettings)
    assert isinstance(control, ControlSettings)
    assert (control.bind, control.reward_url, reward.port) == (
        "tcp://127.0.0.1:20001",
        "http://127.0.0.1:20002",
        20_002,
    )
    assert isinstance(reserved, NodeSettings)
    assert (reserved.pool, reserved.slots, reserved.with_trainer) == (Pool.RESERVED, 1, True)
    for index, spot in enumerate(spots):
        assert isinstance(spot, NodeSettings)
        assert (spot.node_id, spot.pool, spot.slots, spot.with_trainer) == (f"spot-{index}", Pool.SPOT, 2, False)
        assert spot.control_endpoint == control.bind
        assert Path(spot.folder) == tmp_path / "nodes" / f"spot-{index}"


def test_reserved_and_spot_processes_have_a_core_each_where_there_are_two() -> None:
    assert pinned_cores((3, 5, 9), pin=True) == ((3,), (5,))
    assert pinned_cores((3,), pin=True) == (None, None)
    assert pinned_cores((3, 5), pin=False) == (None, None)


def test_a_pinned_layout_gives_nodes_their_cores_and_leaves_the_other_daemons_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 6})
    members = layout(run_settings(spot_nodes=1), tmp_path, control_port=1, reward_port=2)
    assert [each.cores for each in members] == [None, None, (4,), (6,)]
    assert [each.config.cores for each in members if isinstance(each.config, NodeSettings)] == [(4,), (6,)]


def test_a_free_port_is_below_those_of_outgoing_connections_and_can_be_bound() -> None:
    lowest_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = free_port()
    assert 20_000 <= port < max(lowest_outgoing, 21_000)
    socket.create_server(("127.0.0.1", port)).close()


def test_a_notice_to_a_node_that_is_not_there_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="node = 'spot-9': must be one of"):
        EmbeddedCluster(run_settings(), tmp_path).notice("spot-9", 2.0)
