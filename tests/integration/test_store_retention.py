"""What a store keeps of runs: all of one that goes on, what it hands over of one that has ended."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sample_records import sample_record

from spot_runtime import cli
from spot_runtime.errors import InputError
from spot_runtime.store.checkpoints import Checkpoint, checkpoint_key, put_checkpoint
from spot_runtime.store.garbage import Collected
from spot_runtime.store.retention import sweep
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import JobId, Manifest, Op, PolicyRef

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


def test_whole_runs_go_only_when_asked_and_never_what_is_shared(store: TensorStore, tmp_path: Path) -> None:
    for key in store.list("runs/old"):
        age(tmp_path, key, 25 * HOUR_S)
    store.put_bytes("lineages/geneval/old.json", b"{}")
    store.put_bytes("lineages/geneval/live.json", b"{}")
    sweep(store, 24 * HOUR_S, whole_runs=True)
    assert store.list("runs/old") == []
    assert len(store.list("runs/live")) == len(KEYS)
    assert store.list("embeddings") + store.list("models") == ["embeddings/a", "models/m/model.json"]
    assert store.list("lineages") == ["lineages/geneval/live.json"]


def test_a_whole_run_goes_only_after_a_day_and_its_checkpoints_go_first(
    store: TensorStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = store.list("")
    with pytest.raises(InputError, match=r"^older_than_h = 1: must be >= 24 to remove whole runs$"):
        sweep(store, HOUR_S, whole_runs=True)
    assert store.list("") == before
    for iteration in (0, 1):
        put_record(store, tmp_path, "old", iteration, 26 * HOUR_S)
    for key in store.list("runs/old"):
        age(tmp_path, key, 26 * HOUR_S)
    gone: list[str] = []
    delete = store._objects.delete
    monkeypatch.setattr(store._objects, "delete", lambda key: (gone.append(key), delete(key))[1])
    sweep(store, 24 * HOUR_S, whole_runs=True)
    assert gone[0] == "lineages/l/old.json"
    assert {key.split("/")[2] for key in gone[1:3]} == {"checkpoints"}
    assert len(gone) == len(KEYS) + 3


def put_record(
    store: TensorStore, tmp_path: Path, run: str, iteration: int, age_s: float, samples_key: str = ""
) -> None:
    record = Checkpoint(
        run_id=run, iteration=iteration, lineage="l", policy=PolicyRef(), state_json="{}", samples_key=samples_key
    )
    put_checkpoint(store, record)
    age(tmp_path, checkpoint_key(run, iteration), age_s)


def put_sample(store: TensorStore, tmp_path: Path, key: str, age_s: float) -> None:
    store.put_bytes(key, b"x")
    age(tmp_path, key, age_s)


@pytest.fixture
def broken_off(store: TensorStore, tmp_path: Path) -> TensorStore:
    """Run `old` ended in its third iteration; what the second explored is taken over by the third."""
    put_sample(store, tmp_path, "runs/old/samples/rollout-1", 9 * HOUR_S)
    put_sample(store, tmp_path, "runs/old/samples/explored-1", 8 * HOUR_S)
    sample = sample_record(sample_key="runs/old/samples/explored-1", sample_digest="d", embedding_key="embeddings/a")
    manifest = Manifest(job_id=JobId("e"), op=Op.EXPLORE, iteration=1, policy=PolicyRef(), samples=(sample,))
    put_sample(store, tmp_path, "runs/old/commits/rollout-1.1.4", 9 * HOUR_S)
    store.put_bytes("runs/old/manifests/explored-1.json", msgspec.json.encode(manifest))
    age(tmp_path, "runs/old/manifests/explored-1.json", 8 * HOUR_S)
    put_record(store, tmp_path, "old", 1, 9.5 * HOUR_S)
    put_record(store, tmp_path, "old", 2, 7 * HOUR_S, "runs/old/manifests/explored-1.json")
    put_sample(store, tmp_path, "runs/old/samples/rollout-2", 6 * HOUR_S)
    put_sample(store, tmp_path, "runs/old/commits/rollout-2.1.4", 6 * HOUR_S)
    return store


def test_a_run_that_was_broken_off_keeps_what_its_resume_needs(broken_off: TensorStore) -> None:
    swept = sweep(broken_off, HOUR_S, dry_run=True)
    assert sweep(broken_off, HOUR_S).keys == swept.keys
    assert swept.keys == ("runs/old/commits/rollout-1.1.4", "runs/old/samples/rollout-1")


def test_what_an_older_checkpoint_takes_over_stays_as_long_as_its_record(
    broken_off: TensorStore, tmp_path: Path
) -> None:
    """The newest may turn out not to be whole."""
    put_record(broken_off, tmp_path, "old", 3, 5 * HOUR_S)
    assert "runs/old/samples/rollout-2" in sweep(broken_off, HOUR_S).keys
    assert broken_off.exists("runs/old/samples/explored-1")


def test_where_what_a_checkpoint_names_cannot_be_read_all_stays(broken_off: TensorStore) -> None:
    broken_off.delete("runs/old/manifests/explored-1.json")
    assert sweep(broken_off, HOUR_S).keys == ()


def test_a_run_that_is_resumed_while_it_is_swept_loses_nothing_that_it_needs(
    broken_off: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = broken_off.collect

    def resumed_first(prefix: str, *rest: Any) -> Collected:
        """Its rollout is there already; it finds each sample by its key and does not write it again."""
        broken_off.put_bytes("runs/old/samples/rollout-2", b"x")
        return collect(prefix, *rest)

    monkeypatch.setattr(broken_off, "collect", resumed_first)
    sweep(broken_off, HOUR_S)
    kept = {key for folder in ("samples", "commits") for key in broken_off.list(f"runs/old/{folder}")}
    assert kept == {
        "runs/old/samples/explored-1",
        "runs/old/samples/rollout-2",
        "runs/old/commits/rollout-2.1.4",
        "runs/old/samples/q",
        "runs/old/commits/q.1.3",
    }


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
