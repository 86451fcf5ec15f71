import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from process_child import ChildConfig

from spot_runtime.daemons.process import Child, Family, spawn
from spot_runtime.errors import ClusterError, InputError, ModelError

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _children_find_their_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Child]]:
    children: list[Child] = []
    yield children
    for child in children:
        child.kill()


def start(tmp_path: Path, started: list[Child], behaviour: str, **options: object) -> Child:
    config = ChildConfig(behaviour=behaviour, folder=str(tmp_path), depth=int(options.pop("depth", 0)))
    child = spawn("process_child", config, log_path=tmp_path / "logs" / "child.log", **options)
    started.append(child)
    return child


def wait_until_gone(pids: list[int], deadline_s: float = 10.0) -> list[int]:
    """The processes that are still there after the deadline."""
    end_s = time.monotonic() + deadline_s
    left = pids
    while left and time.monotonic() < end_s:
        left = [pid for pid in left if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.02)
    return left


def test_a_child_says_that_it_is_ready_and_ends_when_asked(tmp_path: Path, started: list[Child]) -> None:
    child = start(tmp_path, started, "wait", threads=2)
    facts = child.ready(20)
    assert facts == {"pid": child.pid, "endpoint": "tcp://127.0.0.1:1", "pids": str(child.pid), "threads": "2"}
    assert child.poll() is None
    assert child.terminate(10) == 0
    lines = (tmp_path / "logs" / "child.log").read_text().splitlines()
    assert [line.split("event=")[1].split()[0] for line in lines] == ["ready", "ended"]
    assert "daemon=process_child" in lines[0]


def test_a_child_keeps_to_its_cores_and_has_a_session_of_its_own(tmp_path: Path, started: list[Child]) -> None:
    core = max(os.sched_getaffinity(0))
    child = start(tmp_path, started, "wait", cores=[core], depth=1)
    pids = [int(pid) for pid in child.ready(30)["pids"].split()]
    assert [os.sched_getaffinity(pid) for pid in pids] == [{core}, {core}]
    assert [os.getsid(pid) for pid in pids] == pids


def test_its_configuration_is_not_on_its_command_line(tmp_path: Path, started: list[Child]) -> None:
    child = start(tmp_path, started, "wait")
    child.ready(20)
    assert psutil.Process(child.pid).cmdline()[1:] == ["-m", "spot_runtime.lifeline", "process_child"]


def test_a_call_that_hangs_does_not_keep_a_child_that_ends(tmp_path: Path, started: list[Child]) -> None:
    child = start(tmp_path, started, "end_beside_a_call")
    child.ready(60)
    limit_s = time.monotonic() + 60
    while child.poll() is None and time.monotonic() < limit_s:
        time.sleep(0.02)
    assert child.poll() == 7


def test_a_child_that_never_gets_ready_is_reported_with_its_last_log_lines(
    tmp_path: Path, started: list[Child]
) -> None:
    child = start(tmp_path, started, "never")
    with pytest.raises(ClusterError, match=r"^process_child was not ready within 6 s: .*looking for the weights$"):
        child.ready(6.0)  # it logs first, which a busy machine takes a while for
    assert child.terminate(10) == 128 + signal.SIGTERM


def test_a_child_that_dies_is_reported_at_once_with_how_it_died(tmp_path: Path, started: list[Child]) -> None:
    began_s = time.monotonic()
    with pytest.raises(ClusterError, match=r"process_child ended with exit code -9 before it was ready"):
        start(tmp_path, started, "vanish").ready(60)
    with pytest.raises(ClusterError, match=r"ended with exit code 1 before it was ready: .*one over none"):
        start(tmp_path, started, "crash").ready(60)
    assert time.monotonic() - began_s < 20


def test_an_error_of_the_tree_crosses_the_ready_pipe_with_class_and_exit_code(
    tmp_path: Path, started: list[Child]
) -> None:
    child = start(tmp_path, started, "refuse")
    with pytest.raises(ModelError, match=r"^model = x: lacks vae$"):
        child.ready(20)
    assert child.terminate(10) == ModelError.exit_code


def test_a_configuration_that_does_not_validate_is_the_parents_input_error(
    tmp_path: Path, started: list[Child]
) -> None:
    class OtherConfig(ChildConfig):
        surplus: int = 1

    child = spawn("process_child", OtherConfig(), log_path=tmp_path / "child.log")
    started.append(child)
    with pytest.raises(InputError, match="surplus = 1: Extra inputs are not permitted"):
        child.ready(20)


def test_a_deaf_child_is_killed_after_the_grace_period(tmp_path: Path, started: list[Child]) -> None:
    child = start(tmp_path, started, "deaf")
    child.ready(20)
    began_s = time.monotonic()
    assert child.terminate(0.5) == -signal.SIGKILL
    assert 0.5 <= time.monotonic() - began_s < 5
    assert child.terminate(0.5) == -signal.SIGKILL


def test_killing_a_child_ends_its_own_children_and_the_family_knows_when(tmp_path: Path, started: list[Child]) -> None:
    family = Family()
    child = start(tmp_path, started, "wait", depth=2, family=family)
    pids = [int(pid) for pid in child.ready(60)["pids"].split()]
    assert len(pids) == 3
    assert not family.wait(0.05)
    child.kill()
    assert family.wait(10)
    assert wait_until_gone(pids, 1.0) == []
    family.close()


def test_kill_9_of_the_owner_leaves_no_process(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom process_child import ChildConfig\n"
        "from spot_runtime.daemons.process import spawn\n"
        f"folder = {str(tmp_path)!r}\n"
        "ready = spawn('process_child', ChildConfig(folder=folder, depth=1), log_path=Path(folder) / 'a.log')\n"
        "late = spawn('process_child', ChildConfig(behaviour='never'), log_path=Path(folder) / 'b.log')\n"
        "print(ready.ready(30)['pids'], late.pid, flush=True)\ntime.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 3
    assert all(psutil.pid_exists(pid) for pid in pids)
    owner.kill()
    owner.wait(10)
    owner.stdout.close()
    assert wait_until_gone(pids) == []


def test_a_program_that_a_child_leaves_behind_does_not_hide_the_childs_end(
    tmp_path: Path, started: list[Child]
) -> None:
    child = start(tmp_path, started, "leave_a_program")
    program = child.ready(20)["program"]
    assert child.terminate(10) == 7
    os.kill(program, signal.SIGKILL)


def test_starting_and_ending_children_leaks_no_descriptor(tmp_path: Path, started: list[Child]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        child = start(tmp_path, started, "refuse")
        with pytest.raises(ModelError):
            child.ready(20)
        child.terminate(5)
    assert len(os.listdir("/proc/self/fd")) == before
