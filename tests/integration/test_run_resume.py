"""kill -9 of a whole run, then `--resume_from`: the policy is that of a run which nothing disturbed, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from spot_runtime.store.checkpoints import last_valid
from spot_runtime.store.tensors import TensorStore

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 400.0
CFG = {
    "sampling": {"num_steps": 5, "sde_window_stop": 4, "sde_window_size": 2},
    "grpo": {"prompts_per_iteration": 3, "group_size": 4, "optimizer_steps": 1, "micro_batch": 2, "ema_decay": 0.5},
    "evaluation": {"pairs": 2, "every": 0},
    "cluster": {"spot_nodes": 1, "lease_s": 6.0, "heartbeat_s": 0.5},
    "deterministic": True,
}


def start(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    pyflyte = Path(sys.executable).with_name("pyflyte")
    command = [str(pyflyte), "run", str(ROOT / "workflows" / "dit_grpo.py"), "train", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("SPOTLIGHT_ENDPOINT", None)
    with (folder / "run.log").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)


def fresh(folder: Path) -> subprocess.Popen[bytes]:
    return start(folder, "--iterations", "2", "--exploration", "none", "--cfg", json.dumps(CFG))


def run_folder(folder: Path) -> Path | None:
    return next(iter(folder.glob("spotlight-runs/*")), None)


def keys(folder: Path, part: str) -> list[str]:
    """Objects of the run below `part`."""
    run = run_folder(folder)
    return sorted(path.name for path in run.glob(f"store/runs/*/{part}/*.obj")) if run else []


def kill_once(process: subprocess.Popen[bytes], happened: Callable[[], bool]) -> None:
    """SIGKILL to the run as soon as `happened`; its cluster ends by itself."""
    limit_s = time.monotonic() + DEADLINE_S
    while not happened():
        assert process.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < limit_s
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait(30)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []


def policy(folder: Path) -> tuple[int, str, dict[str, object]]:
    run = run_folder(folder)
    assert run is not None
    found = last_valid(TensorStore((run / "store").as_uri()), run.name).checkpoint
    state = msgspec.json.decode(found.state_json)
    return found.iteration, found.policy.digest, state["scores"]


def finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    code = process.wait(DEADLINE_S)
    assert code == 0, (folder / "run.log").read_text()[-2000:]
    run = run_folder(folder)
    assert run is not None
    assert (run / "report.html").is_file()


def test_a_run_killed_in_every_phase_ends_in_the_policy_of_an_undisturbed_one(tmp_path: Path) -> None:
    calm, storm = tmp_path / "calm", tmp_path / "storm"
    finish(fresh(calm), calm)
    process = fresh(storm)
    kill_once(process, lambda: bool(keys(storm, "samples")) or bool(keys(storm, "manifests")))  # rolling out
    process = start(storm, "--resume_from", "latest")
    kill_once(process, lambda: bool(keys(storm, "policies")))  # trained, not yet committed
    process = start(storm, "--resume_from", "latest")
    kill_once(process, lambda: len(keys(storm, "manifests")) >= 3)  # training or validating in the second iteration
    finish(start(storm, "--resume_from", "latest"), storm)
    assert policy(storm)[:2] == policy(calm)[:2]
    assert policy(storm)[0] == 2
    assert len(list(storm.glob("spotlight-runs/*"))) == 1


def test_a_run_whose_newest_trainer_state_is_damaged_goes_on_from_the_one_before(tmp_path: Path) -> None:
    """The training that wrote the damaged state had succeeded, so control and trainer know its result: it must not count."""
    process = start(tmp_path, "--iterations", "3", "--exploration", "none", "--cfg", json.dumps(CFG))
    kill_once(process, lambda: any(key.startswith("000002") for key in keys(tmp_path, "checkpoints")))
    run = run_folder(tmp_path)
    assert run is not None
    (state,) = run.glob("store/runs/*/trainer/2-*.obj")
    blob = bytearray(state.read_bytes())
    blob[len(blob) // 2] ^= 1
    state.write_bytes(blob)
    finish(start(tmp_path, "--resume_from", "latest"), tmp_path)
    log = (tmp_path / "run.log").read_text()
    assert "passed over" in log
    assert "after iteration 1, of 3" in log
    assert policy(tmp_path)[0] == 3
    assert len(keys(tmp_path, "trainer")) == 3
