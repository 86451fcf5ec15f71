"""What a store keeps of runs: all of one that goes on, what it hands over of one that has ended."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from spot_runtime import cli
from spot_runtime.store.retention import sweep
from spot_runtime.store.tensors import TensorStore

HOUR_S = 3600.0
KEYS = ("commits/q.1.3", "samples/q", "policies/1-ab", "manifests/rollout.json", "images/q.png")


@pytest.fixture
def store(tmp_path: Path) -> TensorStore:
    """A run that ended two hours ago, one that wrote something now, and things of neither."""
    store = TensorStore(f"file://{tmp_path}/store")
    for key in [f"runs/{run}/{key}" for run in ("old", "live") for key in KEYS] + [
        "embeddings/a",
        "models/m/model.json",
    ]:
        store.put_bytes(key, b"x")
        age(tmp_path, key, 2 * HOUR_S)
    age(tmp_path, "runs/live/images/q.png", 0.0)
    return store


def age(tmp_path: Path, key: str, age_s: float) -> None:
    then_s = time.time() - age_s
    os.utime(tmp_path / "store" / f"{key}.obj", (then_s, then_s))


def test_of_an_ended_run_what_it_left_in_passing_goes(store: TensorStore) -> None:
    before = set(store.list(""))
    swept = sweep(store, HOUR_S)
    assert swept.ended_runs == ("old",)
    assert set(swept.keys) == before - set(store.list("")) == {"runs/old/commits/q.1.3", "runs/old/samples/q"}
    assert sweep(store, HOUR_S).keys == ()


def test_a_dry_run_says_the_same_and_removes_nothing(store: TensorStore) -> None:
    before = store.list("")
    foretold = sweep(store, HOUR_S, dry_run=True)
    assert store.list("") == before
    assert sweep(store, HOUR_S).keys == foretold.keys


def test_whole_runs_go_only_when_asked_and_never_what_is_shared(store: TensorStore) -> None:
    sweep(store, HOUR_S, whole_runs=True)
    assert store.list("runs/old") == []
    assert len(store.list("runs/live")) == len(KEYS)
    assert store.list("embeddings") + store.list("models") == ["embeddings/a", "models/m/model.json"]


def test_a_run_that_wakes_up_in_between_is_spared(store: TensorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = store.ages_s
    calls: list[str] = []

    def ages_s(prefix: str) -> dict[str, float]:
        calls.append(prefix)
        if calls.count("runs/old") == 2:
            store.put_bytes("runs/old/history/000003.json", b"new")
        return asked(prefix)

    monkeypatch.setattr(store, "ages_s", ages_s)
    assert sweep(store, HOUR_S).keys == ()
    assert len(store.list("runs/old")) == len(KEYS) + 1


def test_the_command_counts_what_went(store: TensorStore, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["store", "gc", "--store", store.url, "--older-than-h", "1", "--json"])
    assert ended.value.code in (0, None)
    said = json.loads(capsys.readouterr().out)
    assert (said["ended_runs"], len(said["keys"]), said["dry_run"]) == (["old"], 2, False)
