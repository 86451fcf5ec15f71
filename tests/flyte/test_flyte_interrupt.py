"""Ctrl-C and SIGTERM end a local run in order: jobs cancelled, one line, an exit code of its own, nothing half-written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_control import FakeControl

from spot_runtime.types import Op

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_jobs_and_ends_with_its_exit_code(
    control: FakeControl, model_folder: str, tmp_path: Path, number: signal.Signals, times: int
) -> None:
    control.seconds = {Op.TRAIN_STEP: 600.0, Op.EXPLORE: 600.0}
    store = (tmp_path / "store").as_uri()
    command = [f"{os.path.dirname(sys.executable)}/pyflyte", "run", str(ROOT / "workflows" / "dit_grpo.py"), "train"]
    process = subprocess.Popen(
        [*command, "--model", model_folder, "--store", store, "--iterations", "1"],
        cwd=tmp_path,
        env={**os.environ, "SPOTLIGHT_ENDPOINT": control.endpoint, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: len(control.of(Op.TRAIN_STEP)) == len(control.of(Op.EXPLORE)) == 1, process)
        for _ in range(times):
            process.send_signal(number)
            time.sleep(0.05)
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    assert stderr.splitlines()[-1] == f"error: {number.name}: the run was ended"
    assert "Traceback" not in stderr
    assert process.returncode == 128 + number
    assert {control.of(op)[0].cancelled for op in (Op.TRAIN_STEP, Op.EXPLORE)} == {"the Flyte task was aborted"}
    assert list(tmp_path.rglob("*.html")) == []


def wait_for(condition, process: subprocess.Popen[str], deadline_s: float = 60.0) -> None:  # type: ignore[no-untyped-def]
    """Until it holds; fails where the process ends first or the deadline passes."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end_s, "too late"
        time.sleep(0.05)
