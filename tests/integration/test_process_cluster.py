"""The whole embedded cluster, with the shipped model."""

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

from spot_runtime.client import Client
from spot_runtime.config import ClusterConfig, RunSettings, TrainConfig
from spot_runtime.daemons.supervisor import EmbeddedCluster
from spot_runtime.errors import InputError, PortInUseError
from spot_runtime.types import Pool

pytestmark = pytest.mark.slow


def settings(folder: Path, **cluster: object) -> RunSettings:
    return RunSettings(
        run_id="run-1",
        iterations=1,
        resolution=64,
        model="tiny",
        store=f"file://{folder}/store",
        train_prompts_key="train",
        validation_prompts_key="validation",
        config=TrainConfig(cluster=ClusterConfig(spot_nodes=1, **cluster)),
    )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(settings(tmp_path), tmp_path / "cluster") as cluster:
        yield cluster


@pytest.fixture
def client(cluster: EmbeddedCluster) -> Iterator[Client]:
    with Client(cluster.endpoint) as client:
        yield client


def wait_for(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    end_s = time.monotonic() + deadline_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.05)
    assert condition()


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def states(client: Client) -> dict[str, str]:
    return {node.node_id: node.state for node in client.status().nodes}


def test_daemons_that_are_killed_come_back_and_a_notice_makes_a_spot_node_leave(
    cluster: EmbeddedCluster, client: Client
) -> None:
    wait_for(lambda: states(client) == {"reserved-0": "live", "spot-0": "live"})
    pools = {node.node_id: (node.pool, node.slots) for node in client.status().nodes}
    assert pools == {"reserved-0": (Pool.RESERVED, 1), "spot-0": (Pool.SPOT, 1)}
    before = cluster.pids()
    for name in ("control", "reward", "spot-0"):
        os.kill(before[name], signal.SIGKILL)
    wait_for(
        lambda: all(cluster.pids().get(name, before[name]) != before[name] for name in ("control", "reward", "spot-0"))
    )
    assert cluster.pids()["reserved-0"] == before["reserved-0"]
    wait_for(lambda: states(client) == {"reserved-0": "live", "spot-0": "live"})
    cluster.notice("spot-0", 1.0)
    wait_for(lambda: "spot-0" not in cluster.pids())
    wait_for(lambda: states(client)["spot-0"] == "left")
    cluster.check()
    everyone = psutil.Process().children(recursive=True)
    assert len(everyone) >= 4
    cluster.stop()
    wait_for(lambda: living(everyone) == [], 10)


def test_a_taken_port_or_folder_is_one_error_and_leaves_nothing(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    everyone = set(psutil.Process().children(recursive=True))
    port = int(cluster.endpoint.rpartition(":")[2])
    with pytest.raises(PortInUseError, match=f"^127.0.0.1:{port} is taken"):
        EmbeddedCluster(settings(tmp_path), tmp_path / "other", port=port).start()
    with pytest.raises(InputError, match=r"/cluster: another cluster uses it$"):
        EmbeddedCluster(settings(tmp_path), tmp_path / "cluster").start()
    assert living(list(set(psutil.Process().children()) - everyone)) == []


def test_kill_9_of_the_owner_leaves_no_process_and_no_socket(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "spot_runtime.cli", "up", "--spot-nodes", "1", "--folder", str(tmp_path)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert owner.stdout is not None
    endpoint = owner.stdout.readline().strip()
    port = int(endpoint.rpartition(":")[2])
    everyone = psutil.Process(owner.pid).children(recursive=True)
    assert len(everyone) >= 4
    owner.kill()
    owner.wait(10)
    owner.stdout.close()
    wait_for(lambda: living(everyone) == [], 10)
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_ctrl_c_ends_everything_in_order(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "spot_runtime.cli", "up", "--spot-nodes", "0", "--folder", str(tmp_path)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert owner.stdout is not None
    owner.stdout.readline()
    everyone = psutil.Process(owner.pid).children(recursive=True)
    owner.send_signal(signal.SIGINT)
    assert owner.wait(30) == 0
    owner.stdout.close()
    assert living(everyone) == []
    for daemon in ("control", "reward", "reserved-0"):
        assert "event=ended exit_code=0" in (tmp_path / "logs" / f"{daemon}.log").read_text()
