"""Checkpoints on a real file store: which one is taken, and what a bad name says."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from sample_records import sample_record

from spot_runtime.errors import CorruptObjectError, InputError, MissingObjectError, StoreError
from spot_runtime.store.checkpoints import (
    STATE_BYTES_MAX,
    Checkpoint,
    checkpoint_key,
    find_checkpoint,
    last_valid,
    put_checkpoint,
    trainer_key,
)
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import JobId, Manifest, Op, PolicyRef

RUN = "geneval-20260101-000000-ab12"


def policy(version: int, run_id: str = RUN) -> PolicyRef:
    return PolicyRef(version, f"runs/{run_id}/policies/{version}-abcd", f"digest-{version}") if version else PolicyRef()


def commit(
    store: TensorStore,
    iteration: int,
    *,
    run_id: str = RUN,
    lineage: str = "geneval",
    made_s: float = 0.0,
    samples_key: str = "",
) -> None:
    """A whole checkpoint after `iteration` iterations."""
    held = policy(iteration, run_id)
    if held.key:
        weights, meta = {"w": np.full(64, iteration, dtype=np.float32)}, {"policy_digest": held.digest}
        store.put(trainer_key(held), weights, meta)
        store.put(held.key, weights, meta)
    put_checkpoint(
        store,
        Checkpoint(
            run_id=run_id,
            iteration=iteration,
            lineage=lineage,
            policy=held,
            state_json=f"state {iteration}",
            made_s=made_s or float(iteration),
            samples_key=samples_key,
        ),
    )


def blob(folder: Path, key: str) -> Path:
    return folder / f"{key}.obj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spotlight-runs" / RUN / "store"


@pytest.fixture
def store(folder: Path) -> TensorStore:
    store = TensorStore(folder.as_uri())
    for iteration in range(4):
        commit(store, iteration)
    return store


def test_the_newest_is_taken_and_an_older_one_by_its_number(store: TensorStore) -> None:
    assert last_valid(store, RUN).checkpoint.state_json == "state 3"
    assert last_valid(store, RUN, 1).checkpoint.policy == policy(1)
    with pytest.raises(MissingObjectError, match=f"no checkpoint of run {RUN} at iteration 9"):
        last_valid(store, RUN, 9)


@pytest.mark.parametrize("damaged", ["record", "trainer", "policy"])
@pytest.mark.parametrize("harm", ["torn", "altered", "gone"])
def test_the_last_whole_one_wins_over_a_newer_one_that_is_not(
    store: TensorStore, folder: Path, damaged: str, harm: str
) -> None:
    keys = {"record": checkpoint_key(RUN, 3), "trainer": trainer_key(policy(3)), "policy": policy(3).key}
    path = blob(folder, keys[damaged])
    content = path.read_bytes()
    match harm:
        case "torn":
            path.write_bytes(content[: len(content) // 2])
        case "altered":
            path.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
        case "gone":
            path.unlink()
    found = last_valid(store, RUN)
    assert found.checkpoint.iteration == 2
    if (damaged, harm) != ("record", "gone"):
        assert len(found.passed_over) == 1
        assert found.passed_over[0].startswith(f"{checkpoint_key(RUN, 3)}: ")


def test_a_checkpoint_larger_than_is_read_at_once_is_whole_and_its_state_can_be_read(folder: Path) -> None:
    store = TensorStore(folder.as_uri(), part_bytes=1024, read_bytes_max=8192)
    held = policy(4)
    weights = {"w": np.arange(5000, dtype=np.float32)}
    for key in (trainer_key(held), held.key):
        store.put(key, weights, {"policy_digest": held.digest})
    record = Checkpoint(run_id=RUN, iteration=4, lineage="geneval", policy=held, state_json="state 4", made_s=4.0)
    put_checkpoint(store, record)
    assert last_valid(store, RUN).checkpoint == record
    with pytest.raises(StoreError, match="must be <= 8192 to be read at once"):
        store.get(trainer_key(held))
    np.testing.assert_array_equal(store.get(trainer_key(held), bytes_max=STATE_BYTES_MAX).tensors["w"], weights["w"])


@pytest.mark.parametrize("harm", ["manifest gone", "manifest torn", "sample gone", "sample torn"])
def test_a_checkpoint_whose_samples_are_not_all_there_is_not_whole(store: TensorStore, folder: Path, harm: str) -> None:
    sample_key, manifest_key = f"runs/{RUN}/samples/e-0", f"runs/{RUN}/manifests/e.json"
    store.put(sample_key, {"log_probs": np.zeros(3, np.float32)})
    explored = sample_record(sample_key=sample_key, sample_digest="d", embedding_key="embeddings/e", policy=policy(3))
    manifest = Manifest(job_id=JobId("e"), op=Op.EXPLORE, iteration=3, policy=policy(3), samples=(explored,))
    store.put_bytes(manifest_key, msgspec.json.encode(manifest))
    commit(store, 4, samples_key=manifest_key)
    assert last_valid(store, RUN).checkpoint.iteration == 4
    path = blob(folder, manifest_key if harm.startswith("manifest") else sample_key)
    if harm.endswith("gone"):
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9])
    found = last_valid(store, RUN)
    assert found.checkpoint.iteration == 3
    assert len(found.passed_over) == 1


def test_a_run_that_went_back_and_took_another_way_leaves_no_record_of_the_first(store: TensorStore) -> None:
    again = last_valid(store, RUN, 2).checkpoint
    put_checkpoint(store, msgspec.structs.replace(again, state_json="the same again", made_s=9.0))
    assert last_valid(store, RUN).checkpoint.state_json == "state 3"
    assert last_valid(store, RUN, 2).checkpoint == again
    other = PolicyRef(2, f"runs/{RUN}/policies/2-other", "other")
    for key in (trainer_key(other), other.key):
        store.put(key, {"w": np.ones(1)}, {"policy_digest": other.digest})
    put_checkpoint(store, msgspec.structs.replace(again, policy=other, state_json="another way", made_s=10.0))
    assert last_valid(store, RUN).checkpoint.state_json == "another way"
    assert last_valid(store, RUN, 1).checkpoint.state_json == "state 1"
    assert store.list(f"runs/{RUN}/checkpoints") == [checkpoint_key(RUN, iteration) for iteration in range(3)]


def test_records_behind_a_damaged_one_of_the_way_that_was_left_go_too(store: TensorStore, folder: Path) -> None:
    """Whose they are cannot be told, and the run's own come after the new one."""
    again = last_valid(store, RUN, 2).checkpoint
    blob(folder, checkpoint_key(RUN, 2)).write_bytes(b"torn")
    put_checkpoint(store, msgspec.structs.replace(again, state_json="another way", made_s=10.0))
    assert last_valid(store, RUN).checkpoint.state_json == "another way"
    assert store.list(f"runs/{RUN}/checkpoints") == [checkpoint_key(RUN, iteration) for iteration in range(3)]


def test_a_trainer_object_of_another_policy_is_no_checkpoint(store: TensorStore) -> None:
    store.delete(trainer_key(policy(3)))
    store.put(trainer_key(policy(3)), {"w": np.zeros(1)}, {"policy_digest": "other"})
    assert last_valid(store, RUN).checkpoint.iteration == 2


def test_none_whole_is_an_error_that_says_why(store: TensorStore, folder: Path) -> None:
    for iteration in range(4):
        blob(folder, checkpoint_key(RUN, iteration)).write_bytes(b"torn")
    with pytest.raises(CorruptObjectError, match=f"none of 4 checkpoints of run {RUN} is whole: runs/"):
        last_valid(store, RUN)


def test_a_record_of_another_format_is_passed_over(store: TensorStore) -> None:
    store.delete(checkpoint_key(RUN, 3))
    store.put_bytes(checkpoint_key(RUN, 3), msgspec.json.encode({"run_id": RUN}))
    assert last_valid(store, RUN).checkpoint.iteration == 2


def test_a_run_is_found_by_id_folder_and_uri(store: TensorStore, folder: Path, tmp_path: Path) -> None:
    runs = tmp_path / "spotlight-runs"
    for name in (RUN, str(runs / RUN), f"{folder.as_uri()}/runs/{RUN}", f"{folder}/runs/{RUN}/"):
        assert find_checkpoint(name, folder=runs).checkpoint.iteration == 3, name
    for name in (f"{folder.as_uri()}/{checkpoint_key(RUN, 2)}", f"{folder.as_uri()}/runs/{RUN}/checkpoints/2"):
        assert find_checkpoint(name, folder=runs).checkpoint.iteration == 2, name
    assert find_checkpoint(RUN, store_url=folder.as_uri(), folder=tmp_path).checkpoint.iteration == 3


def test_latest_is_the_newest_whole_one_of_its_lineage(store: TensorStore, tmp_path: Path) -> None:
    runs = tmp_path / "spotlight-runs"
    other = "geneval-20260102-000000-cd34"
    elsewhere = TensorStore((runs / other / "store").as_uri())
    commit(elsewhere, 1, run_id=other, made_s=50.0)
    commit(elsewhere, 2, run_id="nightly-run", lineage="nightly", made_s=99.0)
    assert find_checkpoint("latest", lineage="geneval", folder=runs).checkpoint.run_id == other
    assert find_checkpoint("latest", lineage="nightly", folder=runs).checkpoint.run_id == "nightly-run"
    assert find_checkpoint("latest", lineage="geneval", store_url=store.url, folder=runs).checkpoint.run_id == RUN
    blob(runs / other / "store", checkpoint_key(other, 1)).write_bytes(b"torn")
    assert find_checkpoint("latest", lineage="geneval", folder=runs).checkpoint.run_id == RUN


def test_latest_reads_whole_objects_of_no_more_than_it_must_and_tells_what_it_passed_over(
    store: TensorStore, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(5):
        commit(store, 1, run_id=f"geneval-run-{index}", made_s=100.0 + index)
        commit(store, 2, run_id=f"geneval-run-{index}", made_s=200.0 + index)
    blob(folder, trainer_key(policy(2, "geneval-run-4"))).unlink()
    blob(folder, checkpoint_key("geneval-run-3", 2)).write_bytes(b"torn")
    verified: list[str] = []
    verify = TensorStore.verify
    monkeypatch.setattr(TensorStore, "verify", lambda self, key: (verified.append(key), verify(self, key))[1])
    found = find_checkpoint("latest", lineage="geneval", store_url=store.url, folder=tmp_path)
    assert (found.checkpoint.run_id, found.checkpoint.iteration) == ("geneval-run-2", 2)
    assert {key.split("/")[1] for key in verified} == {"geneval-run-4", "geneval-run-2"}
    assert len(verified) == 3
    keys = [line.split(": ")[0] for line in found.passed_over]
    assert keys == [checkpoint_key("geneval-run-3", 2), checkpoint_key("geneval-run-4", 2)]


def test_a_store_of_another_run_that_cannot_be_read_is_passed_over_by_latest(
    store: TensorStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "spotlight-runs"
    broken = runs / "geneval-broken" / "store"
    broken.mkdir(parents=True)
    listed = TensorStore.list

    def refused(self: TensorStore, prefix: str) -> list[str]:
        if self.url == broken.as_uri():
            raise StoreError("lineages: Permission denied")
        return listed(self, prefix)

    monkeypatch.setattr(TensorStore, "list", refused)
    found = find_checkpoint("latest", lineage="geneval", folder=runs)
    assert (found.checkpoint.run_id, found.passed_over) == (
        RUN,
        (f"{broken.as_uri()}: lineages: Permission denied",),
    )
    with pytest.raises(InputError, match=r"^resume_from = 'latest': lineages: Permission denied$"):
        find_checkpoint("latest", lineage="geneval", store_url=broken.as_uri(), folder=runs)


def test_a_run_in_a_folder_with_a_space_and_an_accent_is_found(tmp_path: Path) -> None:
    runs = tmp_path / "José's runs" / "spotlight-runs"
    commit(TensorStore(str(runs / RUN / "store")), 1)
    for name in ("latest", RUN, str(runs / RUN), f"{(runs / RUN / 'store').as_uri()}/runs/{RUN}"):
        assert find_checkpoint(name, lineage="geneval", folder=runs).checkpoint.iteration == 1, name


def test_a_name_too_long_for_a_file_is_one_short_line(tmp_path: Path) -> None:
    for name in ("a" * 5000, "x/" * 5000, "a\0b"):
        with pytest.raises(InputError, match=r"^resume_from = .*must be 'latest', the id or folder") as caught:
            find_checkpoint(name, folder=tmp_path)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("latest", "no whole checkpoint of lineage 'ocr' in "),
        ("nobody", "must be 'latest', the id or folder of a run that is there, or a URI STORE/runs/RUN"),
        ("../etc", "must be 'latest', the id or folder"),
        ("{store}/runs/geneval-nobody", "has no checkpoint of run geneval-nobody"),
        ("{store}/runs/" + RUN + "/checkpoints/7", f"has no checkpoint of run {RUN} at iteration 7"),
    ],
)
def test_a_bad_name_is_one_line(store: TensorStore, tmp_path: Path, name: str, words: str) -> None:
    asked = name.format(store=store.url)
    with pytest.raises(InputError) as caught:
        find_checkpoint(asked, lineage="ocr", folder=tmp_path / "spotlight-runs")
    assert str(caught.value).startswith(f"resume_from = {asked!r}: ")
    assert words in str(caught.value)
