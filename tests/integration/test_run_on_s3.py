"""A whole run against a real S3 server: model, prompts, embeddings, samples, policies and manifests all lie in the bucket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedServer
from spot_runtime.diffusion.geometry import check_model
from spot_runtime.models.shelf import push_model
from spot_runtime.store.tensors import TensorStore
from spot_runtime.variables import CACHE, ENDPOINT

ROOT = Path(__file__).parents[2]
BUCKET = "runs"
DEADLINE_S = 900.0
CONFIG = {
    "sampling": {"num_steps": 6, "sde_window_stop": 4, "sde_window_size": 2},
    "grpo": {"prompts_per_iteration": 2, "group_size": 4, "optimizer_steps": 1},
    "exploration": {"mode": "none"},
    "evaluation": {"pairs": 4},
    "cluster": {"spot_nodes": 1, "commit_every_steps": 1, "start_deadline_s": 400},
}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_run_lives_in_a_bucket_from_its_weights_to_its_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = SeaweedServer(tmp_path / "server")
    server.start()
    try:
        server.make_bucket(BUCKET)
        environment = {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": server.endpoint_url,
            CACHE: str(tmp_path / "cache"),
            "PYTHONPATH": str(ROOT),
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv(ENDPOINT, raising=False)
        url = f"s3://{BUCKET}/spotlight"
        store = TensorStore(url)
        push_model(store, "base", check_model("tiny").path)
        command = [
            f"{os.path.dirname(sys.executable)}/pyflyte",
            "run",
            str(ROOT / "workflows" / "dit_grpo.py"),
            "train",
        ]
        options = ["--model", "store:base", "--store", url, "--iterations", "1", "--cfg", json.dumps(CONFIG)]
        ended = subprocess.run(
            [*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert ended.returncode == 0, ended.stderr[-2000:]
        keys = store.list("runs")
    finally:
        server.kill()
    run_id = keys[0].split("/")[1]
    kinds = {key.split("/")[2] for key in keys}
    assert {"prompts", "samples", "policies", "trainer", "training", "history"} <= kinds
    assert len([key for key in keys if key.startswith(f"runs/{run_id}/samples/")]) == 8
    assert len(list((tmp_path / "cache" / "models").glob("base-*/.complete"))) == 1
    assert len(list(tmp_path.rglob("report.html"))) == 1
    assert not list((tmp_path / "spotlight-runs").rglob("*.obj"))
