"""Models in a store: pushed once, pulled once, and whole whatever is killed, damaged or in the way."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from spot_runtime import cli
from spot_runtime.config import ClusterConfig, RunSettings, TrainConfig
from spot_runtime.daemons.supervisor import EmbeddedCluster
from spot_runtime.diffusion.geometry import check_model
from spot_runtime.errors import CorruptObjectError, InputError, ModelError, StoreError
from spot_runtime.models.address import find_model, local_model
from spot_runtime.models.cache import COMPLETE, model_cache, pull_model, pull_small_files
from spot_runtime.models.shelf import ModelFile, ModelListing, list_models, push_model, read_listing, remove_model
from spot_runtime.store.objects import Objects
from spot_runtime.store.tensors import TensorStore
from spot_runtime.variables import CACHE, cache_folder

PART_BYTES = 4096
PARTS = 6
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
FILES: dict[str, object] = {
    "model_index.json": {"_class_name": "QwenImagePipeline", "_default_resolution": 64},
    "transformer/config.json": {"in_channels": 16},
    "vae/config.json": {"z_dim": 4, "temperal_downsample": [False, False]},
    "vae/diffusion_pytorch_model.safetensors": None,
    "scheduler/scheduler_config.json": {"shift": 3},
    "text_encoder/config.json": {"width": 7},
    "text_encoder/model.safetensors": None,
    "tokenizer/tokenizer_config.json": {"lower": True},
    "tokenizer/tokenizer.json": {"vocab": [1, 2]},
}


def make_pipeline(folder: Path, seed: int = 0) -> Path:
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(weights(500 + 8 * len(name), len(name)) if content is None else json.dumps(content).encode())
    (folder / WEIGHTS).write_bytes(weights(PARTS * PART_BYTES, seed))
    return folder


def weights(size_bytes: int, seed: int) -> bytes:
    """A safetensors file of exactly so many bytes."""
    count = size_bytes
    while len(data := save({"w": ((np.arange(count) * 7 + seed) % 251).astype(np.uint8)})) > size_bytes:
        count -= len(data) - size_bytes
    assert len(data) == size_bytes
    return data


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    return make_pipeline(tmp_path / "pipeline")


@pytest.fixture
def store(tmp_path: Path) -> TensorStore:
    return TensorStore(f"file://{tmp_path}/store", part_bytes=PART_BYTES)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Indices of the parts that are read from the store."""
    seen: list[int] = []
    original = Objects.part

    def part(self, key, marker, index):
        seen.append(index)
        return original(self, key, marker, index)

    monkeypatch.setattr(Objects, "part", part)
    return seen


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != COMPLETE)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_what_is_pulled_is_what_was_pushed_without_what_is_no_part_of_it(store: TensorStore, pipeline: Path) -> None:
    wanted = content(pipeline)
    (pipeline / ".git").mkdir()
    (pipeline / ".git" / "config.json").write_text("{}")
    (pipeline / "README.md").write_text("read me")
    pushed = push_model(store, "small", pipeline)
    pulled = pull_model(store, "small")
    assert content(Path(pulled.folder)) == wanted
    assert pulled.fetched_bytes == pushed.sent_bytes == sum(map(len, wanted.values()))
    assert check_model(pulled.folder).digest == pushed.listing.digest == check_model(str(pipeline)).digest
    assert pull_model(store, "small").fetched_bytes == 0


def test_a_push_that_was_cut_off_is_not_there_and_goes_on_with_what_is_missing(
    store: TensorStore, pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        put, left = store.put_file, [4]

        def cut_off(key: str, path: Path) -> str:
            left[0] -= 1
            if left[0] < 0:
                raise StoreError("the line is cut")
            return put(key, path)

        patch.setattr(store, "put_file", cut_off)
        with pytest.raises(StoreError, match="the line is cut"):
            push_model(store, "small", pipeline)
    assert list_models(store) == []
    with pytest.raises(ModelError, match=r"model = 'small': not in the store, which has: none"):
        pull_model(store, "small")
    sent: list[str] = []
    original = store.put_file
    monkeypatch.setattr(store, "put_file", lambda key, path: (sent.append(path.name), original(key, path))[1])
    push_model(store, "small", pipeline)
    assert len(sent) == len(FILES) + 1 - 4
    assert content(Path(pull_model(store, "small").folder)) == content(pipeline)


def test_a_push_that_goes_on_sends_again_what_was_damaged_meanwhile(
    store: TensorStore, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(key: str, payload: bytes) -> str:
        raise StoreError("the line is cut")

    with monkeypatch.context() as patch:
        patch.setattr(store, "put_bytes", cut_off)
        with pytest.raises(StoreError, match="the line is cut"):
            push_model(store, "small", pipeline)
    next((tmp_path / "store" / ".parts").rglob("000002")).unlink()
    assert push_model(store, "small", pipeline).sent_bytes == PARTS * PART_BYTES
    assert content(Path(pull_model(store, "small").folder)) == content(pipeline)


def test_a_name_is_given_once(store: TensorStore, pipeline: Path, tmp_path: Path) -> None:
    push_model(store, "small", pipeline)
    assert push_model(store, "small", pipeline).sent_bytes == 0
    other = make_pipeline(tmp_path / "other", seed=1)
    with pytest.raises(InputError, match=r"name = 'small': the store has another model of this name"):
        push_model(store, "small", other)
    push_model(store, "other", other)
    assert [model.name for model in list_models(store)] == ["other", "small"]
    assert remove_model(store, "small").name == "small"
    assert [model.name for model in list_models(store)] == ["other"]
    assert store.list("models/small") == []
    push_model(store, "small", other)
    assert content(Path(pull_model(store, "small").folder)) == content(other)


def test_of_two_models_pushed_under_one_name_at_once_the_second_is_told(
    store: TensorStore, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, put = make_pipeline(tmp_path / "other", seed=1), store.put_bytes

    def second(key: str, payload: bytes) -> str:
        monkeypatch.setattr(store, "put_bytes", put)
        push_model(store, "small", other)
        return put(key, payload)

    monkeypatch.setattr(store, "put_bytes", second)
    with pytest.raises(InputError, match=r"name = 'small': the store has another model of this name"):
        push_model(store, "small", pipeline)
    assert content(Path(pull_model(store, "small").folder)) == content(other)


def test_a_folder_that_changes_while_it_is_pushed_is_refused_and_leaves_nothing_wrong(
    store: TensorStore, pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, put = pipeline / "text_encoder" / "config.json", store.put_file

    def edited(key: str, path: Path) -> str:
        if path == config:
            config.write_text(config.read_text().replace("7", "8"))
        return put(key, path)

    with monkeypatch.context() as patch:
        patch.setattr(store, "put_file", edited)
        with pytest.raises(InputError, match=r"changed while it was pushed: text_encoder/config\.json$"):
            push_model(store, "small", pipeline)
    config.write_text(config.read_text().replace("8", "7"))
    push_model(store, "small", pipeline)
    assert content(Path(pull_model(store, "small").folder)) == content(pipeline)


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "sp ace", "x" * 200])
def test_a_name_that_is_no_part_of_a_key_is_refused(store: TensorStore, pipeline: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"^name = "):
        push_model(store, name, pipeline)


def test_a_folder_that_is_no_pipeline_is_refused_before_anything_is_sent(store: TensorStore, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is missing"):
        push_model(store, "small", tmp_path)
    assert store.list("") == []


KILLED_PULL = """
import sys, time
from spot_runtime.store.objects import Objects
from spot_runtime.store import copies
from spot_runtime.store.tensors import TensorStore
from spot_runtime.models.cache import pull_model

copies.in_parallel = lambda act, count: [act(index) for index in range(count)]
read, seen = Objects.part, [0]

def part(self, key, marker, index):
    if seen[0] == 3:
        print("midway", flush=True)
        time.sleep(600)
    seen[0] += 1
    return read(self, key, marker, index)

Objects.part = part
pull_model(TensorStore(sys.argv[1]), "small")
"""


def test_kill_9_in_the_middle_of_a_pull_costs_only_what_was_not_there_yet(
    store: TensorStore, pipeline: Path, fetched: list[int]
) -> None:
    push_model(store, "small", pipeline)
    child = subprocess.Popen([sys.executable, "-c", KILLED_PULL, store.url], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "midway\n"
    child.kill()
    child.wait(10)
    child.stdout.close()
    folder = model_cache(read_listing(store, "small"))
    assert not (folder / COMPLETE).exists()
    assert not (folder / WEIGHTS).exists()
    fetched.clear()
    pulled = pull_model(store, "small")
    assert sorted(fetched) == [3, 4, 5]
    assert content(Path(pulled.folder)) == content(pipeline)


PULL = """
import sys, time
from spot_runtime.store.tensors import TensorStore
from spot_runtime.models.cache import pull_model
print("ready", flush=True)
sys.stdin.readline()
print(pull_model(TensorStore(sys.argv[1]), "small").fetched_bytes, flush=True)
"""


def test_of_processes_that_pull_at_once_one_downloads_and_all_have_it(store: TensorStore, pipeline: Path) -> None:
    size_bytes = push_model(store, "small", pipeline).listing.size_bytes
    pipe = subprocess.PIPE
    children = [
        subprocess.Popen([sys.executable, "-c", PULL, store.url], stdin=pipe, stdout=pipe, text=True) for _ in range(3)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    outputs = []
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        out, _ = child.communicate(timeout=60)
        assert child.returncode == 0
        outputs.append(int(out))
    assert sorted(outputs) == [0, 0, size_bytes]
    assert content(model_cache(read_listing(store, "small"))) == content(pipeline)


def test_a_pull_that_does_not_fit_the_disk_is_refused_before_it_starts(
    store: TensorStore, pipeline: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size_bytes = push_model(store, "small", pipeline).listing.size_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size_bytes - 1))
    with pytest.raises(StoreError, match=rf"{size_bytes - 1} bytes free, must be >= {size_bytes} for small-"):
        pull_model(store, "small")
    assert content(model_cache(read_listing(store, "small"))) == {}


def test_progress_begins_with_what_is_here_and_ends_with_all(store: TensorStore, pipeline: Path) -> None:
    listing = push_model(store, "small", pipeline).listing
    small = pull_small_files(store, "small").fetched_bytes
    seen: list[tuple[int, int]] = []
    pull_model(store, "small", on_progress=lambda done, whole: seen.append((done, whole)))
    assert seen[0][0] > small
    assert seen[-1] == (listing.size_bytes, listing.size_bytes)
    assert seen == sorted(seen)


def test_a_damaged_copy_here_is_found_and_pulled_again(store: TensorStore, pipeline: Path) -> None:
    push_model(store, "small", pipeline)
    folder = Path(pull_model(store, "small").folder)
    (folder / WEIGHTS).write_bytes(bytes(PARTS * PART_BYTES))
    assert pull_model(store, "small").fetched_bytes == 0
    assert pull_model(store, "small", verify=True).fetched_bytes == PARTS * PART_BYTES
    assert content(folder) == content(pipeline)


def test_a_damaged_copy_in_the_store_is_refused_and_pushing_again_repairs_it(
    store: TensorStore, pipeline: Path, tmp_path: Path
) -> None:
    push_model(store, "small", pipeline)
    part = next((tmp_path / "store" / ".parts").rglob("000002"))
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(CorruptObjectError, match="pushing small again repairs it"):
        pull_model(store, "small")
    push_model(store, "small", pipeline)
    assert content(Path(pull_model(store, "small").folder)) == content(pipeline)


def test_other_content_of_the_same_size_is_not_what_the_listing_names(store: TensorStore, pipeline: Path) -> None:
    listing = push_model(store, "small", pipeline).listing
    (file,) = (file for file in listing.files if file.path == "vae/config.json")
    store.delete(listing.key(file))
    store.put_bytes(listing.key(file), bytes(file.size_bytes))
    for verify in (False, True):
        with pytest.raises(CorruptObjectError, match="not the content that the listing names"):
            pull_model(store, "small", verify=verify)
    assert not (model_cache(listing) / COMPLETE).exists()


def test_a_file_that_is_gone_from_the_cache_is_pulled_again(store: TensorStore, pipeline: Path) -> None:
    push_model(store, "small", pipeline)
    folder = Path(pull_model(store, "small").folder)
    (folder / "vae/config.json").unlink()
    assert pull_model(store, "small").fetched_bytes == (pipeline / "vae/config.json").stat().st_size
    assert content(folder) == content(pipeline)


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "a/../../b", ".hidden", "", "a\0b"])
def test_a_listing_that_leads_out_of_the_folder_is_refused(store: TensorStore, path: str, cache: Path) -> None:
    store.put_bytes("models/evil/files/aa", b"x")
    files = (ModelFile(path=path, size_bytes=1, sha256="aa"),)
    store.put_bytes("models/evil/model.json", msgspec.json.encode(ModelListing(name="evil", digest="d", files=files)))
    with pytest.raises(ModelError, match=r"model = 'evil': its listing has the path"):
        pull_model(store, "evil")
    assert not cache.exists()


def test_a_model_in_the_store_is_checked_by_its_small_files_alone(
    store: TensorStore, pipeline: Path, fetched: list[int]
) -> None:
    push_model(store, "small", pipeline)
    fetched.clear()
    found = find_model("store:small", store.url, 128)
    assert fetched == []
    wanted = check_model(str(pipeline), 128)
    assert (found.digest, found.geometry) == (wanted.digest, wanted.geometry)
    assert content(Path(local_model("store:small", store.url))) == content(pipeline)
    assert local_model("tiny", store.url) == "tiny"


def test_a_model_in_the_store_needs_a_store() -> None:
    with pytest.raises(InputError, match=r"^model = 'store:small': needs --store"):
        find_model("store:small", "")


def test_the_cache_lies_where_its_variable_says_else_where_caches_lie(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv(CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "spotlight"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "spotlight"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `spotlight ARGV`."""
    try:
        cli.main(list(argv))
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_commands_say_in_json_what_they_did(
    store: TensorStore, pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size_bytes = sum(map(len, content(pipeline).values()))
    code, out, err = run(capsys, "models", "push", str(pipeline), "--store", store.url, "--name", "small", "--json")
    pushed = json.loads(out)
    assert (code, err, pushed["name"], pushed["bytes"], pushed["sent_bytes"]) == (
        0,
        "",
        "small",
        size_bytes,
        size_bytes,
    )
    code, out, _ = run(capsys, "models", "list", "--store", store.url, "--json")
    assert [row["digest"] for row in json.loads(out)] == [pushed["digest"]]
    code, out, _ = run(capsys, "models", "pull", "small", "--store", store.url, "--json")
    pulled = json.loads(out)
    assert (code, pulled["fetched_bytes"], content(Path(pulled["folder"]))) == (0, size_bytes, content(pipeline))
    code, out, _ = run(capsys, "models", "pull", "small", "--store", store.url)
    assert (code, out) == (0, f"{pulled['folder']}\n")
    assert run(capsys, "models", "remove", "small", "--store", store.url)[0] == 0


def test_one_listing_that_cannot_be_read_is_left_out_with_a_line(
    store: TensorStore, pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    push_model(store, "small", pipeline)
    store.put_bytes("models/odd/model.json", b"{}")
    evil = ModelListing(name="evil", digest="d", files=(ModelFile(path="x", size_bytes=1, sha256="../../../a"),))
    store.put_bytes("models/evil/model.json", msgspec.json.encode(evil))
    code, out, err = run(capsys, "models", "list", "--store", store.url, "--json")
    assert (code, [row["name"] for row in json.loads(out)]) == (0, ["small"])
    said = err.splitlines()
    assert said[0].startswith("left out: model = 'evil': its listing has sha256 '../../../a' of x: must be 64 hex")
    assert said[1].startswith("left out: model = 'odd': its listing in the store cannot be read")
    with pytest.raises(ModelError, match=r"model = 'none': not in the store, which has: small;"):
        read_listing(store, "none")


def test_a_mistake_is_one_line_and_an_exit_code(store: TensorStore, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "models", "pull", "none", "--store", store.url)
    assert (code, out, err.count("\n")) == (ModelError.exit_code, "", 1)
    assert err.startswith("error: model = 'none': not in the store")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_runs_on_a_model_from_its_store_that_was_pulled_once(tmp_path: Path, cache: Path) -> None:
    url = f"file://{tmp_path}/store"
    push_model(TensorStore(url), "base", check_model("tiny").path)
    checked = find_model("store:base", url)
    settings = RunSettings(
        run_id="run-1",
        iterations=1,
        resolution=64,
        model="store:base",
        model_digest=checked.digest,
        store=url,
        train_prompts_key="train",
        validation_prompts_key="validation",
        config=TrainConfig(cluster=ClusterConfig(spot_nodes=1, slots_per_spot_node=2, start_deadline_s=400.0)),
    )
    with EmbeddedCluster(settings, tmp_path / "cluster"):
        pass  # every worker and the trainer has loaded by then
    (folder,) = (path for path in (cache / "models").iterdir() if path.is_dir())
    assert (folder / COMPLETE).exists()
    assert not list(folder.rglob("*.partial"))
