"""A whole run at sequence-parallel degree 2, from the start to the report: rollouts, exploration with step caches and validation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spot_runtime.store.tensors import TensorStore
from spot_runtime.variables import ENDPOINT

ROOT = Path(__file__).parents[2]
DEADLINE_S = 1500.0
CONFIG = {
    "grpo": {"prompts_per_iteration": 4, "group_size": 4, "optimizer_steps": 2},
    "exploration": {"max_sequences": 6, "unexplored_prompts": 1},
    "evaluation": {"pairs": 8},
    "cluster": {
        "sequence_parallel_degree": 2,
        "spot_nodes": 1,
        "slots_per_spot_node": 2,
        "start_deadline_s": 600,
        "group_timeout_s": 60,
        "step_deadline_s": 300,
        "lease_s": 120,
    },
}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_at_degree_2_ends_with_trained_policies_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENDPOINT, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    url = f"file://{tmp_path}/store"
    workflow = str(ROOT / "workflows" / "dit_grpo.py")
    command = [f"{os.path.dirname(sys.executable)}/pyflyte", "run", workflow, "train", "--dataset", "geneval"]
    options = ["--iterations", "2", "--store", url, "--cfg", json.dumps(CONFIG)]
    ended = subprocess.run(
        [*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    keys = TensorStore(url).list("runs")
    run_id = keys[0].split("/")[1]
    samples = [key for key in keys if key.startswith(f"runs/{run_id}/samples/")]
    policies = [key for key in keys if key.startswith(f"runs/{run_id}/policies/")]
    assert len(samples) == 2 * 4 * 4
    assert len(policies) == 2
    assert len(list(tmp_path.rglob("report.html"))) == 1
