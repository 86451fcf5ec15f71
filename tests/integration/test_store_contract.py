"""One contract, three places: files, memory and a real S3 server."""

from __future__ import annotations

import fcntl
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import load_file

from benchmarks.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedServer
from spot_runtime.errors import CorruptObjectError, InputError, MissingObjectError, ObjectFormatError, StoreError
from spot_runtime.store.seal import SEAL_BYTES, Kind, SealedBody
from spot_runtime.store.tensors import TensorStore

T = TypeVar("T")

PLACES = ["file", "memory", "s3"]
PART_BYTES = 4096
BUCKET = "contract"
numbers = itertools.count()


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    server = SeaweedServer(tmp_path_factory.mktemp("seaweed"))
    server.start()
    try:
        server.make_bucket(BUCKET)
        yield server
    finally:
        server.kill()


@pytest.fixture(params=PLACES)
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty place of its own for each test."""
    if request.param == "file":
        return f"file://{tmp_path}/store"
    if request.param == "memory":
        return f"memory://contract-{next(numbers)}"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_server").endpoint_url)
    return f"s3://{BUCKET}/test-{next(numbers)}"


@pytest.fixture
def store(url: str) -> TensorStore:
    return TensorStore(url, part_bytes=PART_BYTES)


def latents(seed: int, count: int = 64) -> dict[str, np.ndarray]:
    return {"latents": np.random.default_rng(seed).standard_normal(count, dtype=np.float32)}


def big(seed: int) -> dict[str, np.ndarray]:
    """Five parts and a bit."""
    return latents(seed, 5 * PART_BYTES // 4)


def at_once(count: int, act: Callable[[int], T]) -> list[T]:
    """`act` of 0 … count-1 in threads that start together."""
    barrier = threading.Barrier(count)

    def run(index: int) -> T:
        barrier.wait(10)
        return act(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


class Plain:
    """A body without a seal."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size_bytes = len(data)

    def pieces(self) -> Iterator[memoryview]:
        yield memoryview(self._data)


def raw(store: TensorStore, name: str) -> bytes:
    return bytes(store._blobs.read(name, 2**40).data)


def tamper(store: TensorStore, name: str, data: bytes) -> None:
    """Puts `data` in the place of a blob, past the store."""
    store._blobs.delete(name)
    assert store._blobs.create(name, Plain(data))


def names(store: TensorStore, prefix: str = "") -> list[str]:
    return sorted(info.name for info in store._blobs.list(prefix))


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_what_is_put_is_got_by_another_client(store, url):
    digest = store.put("runs/r/latents", latents(0), {"policy": "3"})
    found = TensorStore(url).get("runs/r/latents", digest=digest)
    np.testing.assert_array_equal(found.tensors["latents"], latents(0)["latents"])
    assert (found.meta, found.digest) == ({"policy": "3"}, digest)


def test_the_first_put_wins_and_its_digest_is_returned_to_all(store):
    first = store.put("a", latents(0))
    assert store.put("a", latents(1)) == first
    assert store.put("a", latents(0)) == first
    np.testing.assert_array_equal(store.get("a").tensors["latents"], latents(0)["latents"])


def test_arrays_that_were_got_are_the_readers_own(store):
    store.put("a", latents(0))
    one = store.get("a").tensors["latents"]
    one[:] = 0
    assert store.get("a").tensors["latents"].any()


def test_bytes_keep_their_blake3_as_digest(store):
    for payload in (b"", b'{"a": 1}', bytes(2 * PART_BYTES)):
        key = f"bytes-{len(payload)}"
        assert store.put_bytes(key, payload) == blake3(payload).hexdigest()
        assert store.get_bytes(key) == payload


@pytest.mark.parametrize("content", [latents, big], ids=["small", "in parts"])
def test_an_object_of_an_earlier_format_is_refused_by_its_name_and_left_as_it_is(store, content):
    store.put("folder/a", content(0))
    earlier = raw(store, "folder/a.obj").replace(b"SPOTSTR2", b"SPOTSTR1")
    tamper(store, "folder/a.obj", earlier)
    parts = [blob.name for blob in store._objects._blobs.list(".parts/")]
    for act in (store.get, lambda key: store.put(key, content(0))):
        with pytest.raises(
            ObjectFormatError, match=r"^folder/a: seal of format b'SPOTSTR1', must be b'SPOTSTR2': of another version$"
        ):
            act("folder/a")
    assert not store.exists("folder/a")
    store.collect("folder", 0.0, {"folder/a"})
    assert raw(store, "folder/a.obj") == earlier
    assert [blob.name for blob in store._objects._blobs.list(".parts/")] == parts
    assert bool(parts) is (content is big)
    store.delete("folder/a")
    with pytest.raises(MissingObjectError):
        store.get("folder/a")


def test_what_is_not_there_is_missing(store):
    with pytest.raises(MissingObjectError, match="a"):
        store.get("a")
    with pytest.raises(MissingObjectError):
        store.get_range("a", 0, 1)
    assert not store.exists("a")
    store.delete("a")
    assert store.list("") == []


def test_another_digest_than_asked_is_corrupt(store):
    digest = store.put("a", latents(0))
    assert store.get("a", digest=digest).digest == digest
    with pytest.raises(CorruptObjectError, match=r"a: digest .*, must be 0000"):
        store.get("a", digest="0" * 64)


def test_tensors_are_no_bytes_and_bytes_no_tensors(store):
    store.put("t", latents(0))
    store.put_bytes("b", b"x")
    with pytest.raises(CorruptObjectError, match="t: holds tensors, must be bytes"):
        store.get_bytes("t")
    with pytest.raises(CorruptObjectError, match="b: holds bytes, must be tensors"):
        store.get("b")


def test_a_deleted_key_can_be_put_anew(store):
    first = store.put("a", latents(0))
    store.delete("a")
    assert not store.exists("a")
    assert store.put("a", latents(1)) != first


def test_an_object_and_a_folder_may_have_one_name(store):
    store.put_bytes("a", b"object")
    store.put_bytes("a/b", b"below")
    store.put_bytes("a/b/c", b"deeper")
    assert store.get_bytes("a") == b"object"
    assert store.get_bytes("a/b") == b"below"
    store.delete("a/b/c")
    assert store.list("a") == ["a", "a/b"]


def test_a_list_holds_a_folder_and_nothing_beside_it(store):
    for key in ("runs/r1/x", "runs/r1/y/z", "runs/r10/x", "runs/r1", "other"):
        store.put_bytes(key, b"1")
    store.put("runs/r1/big", big(0))
    assert store.list("runs/r1") == ["runs/r1", "runs/r1/big", "runs/r1/x", "runs/r1/y/z"]
    assert store.list("runs/r1/") == store.list("runs/r1")
    assert store.list("runs/r") == []
    assert store.list("") == ["other", "runs/r1", "runs/r1/big", "runs/r1/x", "runs/r1/y/z", "runs/r10/x"]


def test_stores_beside_each_other_do_not_meet(store, url):
    store.put_bytes("a", b"1")
    assert TensorStore(f"{url}-other").list("") == []
    assert TensorStore(f"{url}/sub").list("") == []


def test_a_list_of_several_pages_is_whole(store, monkeypatch):
    monkeypatch.setattr("spot_runtime.store.s3.PAGE_KEYS", 7)
    for index in range(24):
        store.put_bytes(f"many/{index:02d}", b"x")
    assert store.list("many") == [f"many/{index:02d}" for index in range(24)]


def test_a_large_object_lies_in_parts_and_comes_back_whole(store, url):
    digest = store.put("policy", big(0), {"version": "7"})
    assert len(names(store, ".parts/policy/")) == 6
    found = TensorStore(url).get("policy", digest=digest)
    np.testing.assert_array_equal(found.tensors["latents"], big(0)["latents"])
    assert found.meta == {"version": "7"}
    assert store.exists("policy")
    assert store.list("") == ["policy"]
    assert store.put("policy", big(1)) == digest
    assert len(names(store, ".parts/")) == 6


@pytest.mark.parametrize("size", [100, 5 * PART_BYTES + 7])
def test_any_range_of_an_object_can_be_read(store, size):
    payload = np.random.default_rng(3).bytes(size)
    digest = store.put_bytes("a", payload)
    for start, stop in [
        (0, 0),
        (0, 1),
        (0, size),
        (10, 90),
        (size - 1, size),
        (4095, 4097),
        (4096, 12288),
        (50, 10**9),
        (10**9, 10**9),
    ]:
        assert store.get_range("a", start, stop, digest=digest) == payload[start:stop]
    with pytest.raises(StoreError, match="a: range -1:3 must be"):
        store.get_range("a", -1, 3)


def test_a_range_reads_only_the_parts_that_hold_it(store):
    store.put("policy", big(0))
    parts = names(store, ".parts/")
    for name in parts[:2] + parts[3:]:
        store._blobs.delete(name)
    assert len(store.get_range("policy", 2 * PART_BYTES + 5, 3 * PART_BYTES)) == PART_BYTES - 5
    with pytest.raises(CorruptObjectError, match="policy: part 1 of 6 is missing"):
        store.get_range("policy", 2 * PART_BYTES - 1, 3 * PART_BYTES)


@pytest.mark.parametrize("size", [0, 100, 5 * PART_BYTES + 7])
def test_a_file_goes_in_and_out_whole(store, tmp_path, size):
    source, copy = tmp_path / "source.bin", tmp_path / "cache" / "copy.bin"
    source.write_bytes(np.random.default_rng(5).bytes(size))
    digest = store.put_file("weights/shard-1", source)
    assert store.put_bytes("weights/same", source.read_bytes()) == digest
    assert store.get_file("weights/shard-1", copy, digest=digest) == digest
    assert copy.read_bytes() == source.read_bytes()
    assert [path.name for path in copy.parent.iterdir()] == ["copy.bin"]
    with pytest.raises(CorruptObjectError, match="weights/shard-1: digest"):
        store.get_file("weights/shard-1", copy, digest="0" * 64)


def test_an_interrupted_copy_reads_only_what_it_lacks(store, tmp_path):
    payload = np.random.default_rng(6).bytes(5 * PART_BYTES)
    digest = store.put_bytes("weights", payload)
    parts = names(store, ".parts/")
    blob = raw(store, parts[3])
    store._blobs.delete(parts[3])
    with pytest.raises(CorruptObjectError, match="part 3 of 5 is missing"):
        store.get_file("weights", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    partial = tmp_path / "copy.partial"
    partial.write_bytes(flipped(payload[: 3 * PART_BYTES], 7) + bytes(PART_BYTES) + payload[4 * PART_BYTES :])
    tamper(store, parts[3], blob)
    for name in (parts[1], parts[2], parts[4]):  # what the partial copy holds intact is not read again
        store._blobs.delete(name)
    assert store.get_file("weights", tmp_path / "copy") == digest
    assert (tmp_path / "copy").read_bytes() == payload


def test_a_copy_that_does_not_fit_the_disk_is_refused_before_it_starts(store, tmp_path, monkeypatch):
    store.put_bytes("weights", bytes(5 * PART_BYTES))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(StoreError, match=r"1000 bytes free, must be >= 20480 for copy\.partial"):
        store.get_file("weights", tmp_path / "copy")
    assert list(tmp_path.glob("copy*")) == []


def test_tensors_come_out_as_a_safetensors_file(store, tmp_path):
    for tensors in (latents(1), big(1)):
        path = tmp_path / "adapter.safetensors"
        store.put(f"policy-{len(tensors['latents'])}", tensors, {"version": "3"})
        digest = store.get_file(f"policy-{len(tensors['latents'])}", path)
        assert digest == store.get(f"policy-{len(tensors['latents'])}").digest
        assert load_file(path)["latents"].tolist() == tensors["latents"].tolist()


def test_a_copy_says_how_far_it_is(store, tmp_path):
    data = bytes(range(256)) * 80
    store.put_bytes("weights", data)
    seen: list[int] = []
    store.get_file("weights", tmp_path / "copy", on_bytes=seen.append)
    assert sum(seen) == len(data)
    assert max(seen) == PART_BYTES


@pytest.mark.parametrize("size", [4000, 5 * PART_BYTES + 7])
def test_nothing_larger_than_the_bound_is_read_into_memory(store, url, tmp_path, size):
    careful = TensorStore(url, part_bytes=PART_BYTES, read_bytes_max=2 * PART_BYTES)
    tight = TensorStore(url, part_bytes=PART_BYTES, read_bytes_max=3000)
    data = bytes(size)
    store.put_bytes("x", data)
    with pytest.raises(StoreError, match=r"bytes, must be <= 3000 to be read at once"):
        tight.get_bytes("x")
    assert careful.put_bytes("x", data) == store.put_bytes("x", data)
    assert careful.get_range("x", 1000, 3000) == data[1000:3000]
    careful.get_file("x", tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == data


@pytest.mark.parametrize("size", [40, 5 * PART_BYTES + 7])
def test_meta_and_wholeness_of_an_object_of_any_size_are_told_without_holding_it(store, url, size):
    small = TensorStore(url, part_bytes=PART_BYTES, read_bytes_max=PART_BYTES * 2 + SEAL_BYTES)
    digest = store.put("k", {"x": np.zeros(size, np.uint8)}, {"policy": "é 7"})
    small.verify("k", digest=digest)
    assert small.get_meta("k") == {"policy": "é 7"}
    with pytest.raises(CorruptObjectError, match="digest"):
        small.verify("k", digest="0" * 64)
    store.put_bytes("text", b"no header at all")
    with pytest.raises(CorruptObjectError, match="not in the safetensors layout"):
        store.get_meta("text")
    with pytest.raises(MissingObjectError):
        store.verify("none")


def test_a_file_that_cannot_be_read_is_the_callers_error(store, tmp_path):
    with pytest.raises(InputError, match="nothing: No such file"):
        store.put_file("weights", tmp_path / "nothing")


def test_deleting_a_large_object_leaves_nothing(store):
    store.put("policy", big(0))
    store.delete("policy")
    assert names(store) == []


DAMAGES = {
    "truncated": lambda blob: blob[:-1],
    "torn": lambda blob: blob[: len(blob) // 2],
    "emptied": lambda blob: b"",
    "zeroed": lambda blob: bytes(len(blob)),
    "payload bit": lambda blob: flipped(blob, 0),
    "seal bit": lambda blob: flipped(blob, len(blob) - 40),
    "foreign": lambda blob: b"not of this store" * 20,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_object_is_not_committed_and_the_next_put_replaces_it(store, damage):
    store.put("a", latents(0))
    tamper(store, "a.obj", DAMAGES[damage](raw(store, "a.obj")))
    with pytest.raises(CorruptObjectError, match="a: "):
        store.get("a")
    digest = store.put("a", latents(1))
    assert store.get("a").digest == digest
    np.testing.assert_array_equal(store.get("a").tensors["latents"], latents(1)["latents"])


def test_one_at_a_time_repairs_a_folder(tmp_path):
    store = TensorStore(str(tmp_path), deadline_s=0.2)
    store.put("a", latents(0))
    (tmp_path / "a.obj").write_bytes(b"torn")
    with (tmp_path / ".repair-lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match=r"\.repair-lock: locked for more than 0\.2 s$"):
            store.put("a", latents(1))
    assert (tmp_path / "a.obj").read_bytes() == b"torn"
    digest = store.put("a", latents(1))
    assert store.get("a").digest == digest


def test_a_link_to_itself_is_no_object(tmp_path):
    store = TensorStore(str(tmp_path))
    store.put_bytes("folder/a", b"1")
    (tmp_path / "folder" / "loop.obj").symlink_to(tmp_path / "folder" / "loop.obj")
    assert store.list("") == ["folder/a"]


def test_an_object_that_was_moved_to_another_key_is_foreign(store):
    store.put("a", latents(0))
    tamper(store, "b.obj", raw(store, "a.obj"))
    with pytest.raises(CorruptObjectError, match="b: sealed under another key"):
        store.get("b")
    assert not store.exists("b")


def test_a_blob_is_replaced_only_while_it_is_what_was_read(store):
    blobs = store._blobs
    store.put_bytes("a", b"first")
    seen = blobs.read("a.obj", 2**40).version
    other = Plain(b"other")
    assert blobs.replace("a.obj", other, seen)
    assert raw(store, "a.obj") == b"other"
    store.delete("a")
    store.put_bytes("a", b"second")
    assert not blobs.replace("a.obj", other, seen)
    assert store.get_bytes("a") == b"second"
    assert not blobs.replace("none.obj", other, seen)
    assert not store.exists("none")


def test_a_part_that_is_whole_but_not_the_committed_one_is_foreign(store):
    store.put("policy", big(0))
    part = names(store, ".parts/")[2]
    tamper(store, part, b"".join(SealedBody(part, Kind.PART, [memoryview(bytes(PART_BYTES))]).pieces()))
    with pytest.raises(CorruptObjectError, match="policy: part 2 is not the one that was committed: foreign"):
        store.get("policy")


def test_a_part_that_poses_as_an_object_is_foreign(store):
    store.put("policy", big(0))
    store.put("other", big(1))
    part = names(store, ".parts/policy/")[0]
    tamper(store, part, raw(store, names(store, ".parts/other/")[0]))
    with pytest.raises(CorruptObjectError, match="foreign"):
        store.get("policy")


@pytest.mark.parametrize("damage", ["missing", "flipped", "truncated"])
def test_damage_of_one_part_is_seen_and_repaired_by_the_next_put(store, damage):
    digest = store.put("policy", big(0))
    part = names(store, ".parts/")[3]
    blob = raw(store, part)
    store._blobs.delete(part)
    if damage != "missing":
        tamper(store, part, flipped(blob, 9) if damage == "flipped" else blob[:100])
    with pytest.raises(CorruptObjectError, match=r"part 3|000003"):
        store.get("policy")
    assert store.put("policy", big(0)) == digest
    np.testing.assert_array_equal(store.get("policy").tensors["latents"], big(0)["latents"])


def test_of_eight_writers_exactly_one_wins_every_time(store):
    for key in ("a", "b"):
        digests = at_once(8, lambda index, key=key: store.put(key, latents(index)))
        assert len(set(digests)) == 1
        assert store.get(key).digest == digests[0]


def test_of_four_writers_of_a_large_object_one_wins_and_the_rest_leave_nothing(store):
    digests = at_once(4, lambda index: store.put("policy", big(index)))
    assert len(set(digests)) == 1
    assert store.get("policy").digest == digests[0]
    assert len(names(store, ".parts/")) == 6


def test_of_eight_repairers_exactly_one_wins(store):
    store.put("a", latents(99))
    tamper(store, "a.obj", b"torn")
    digests = at_once(8, lambda index: store.put("a", latents(index)))
    assert len(set(digests)) == 1
    assert store.get("a").digest == digests[0]


def test_a_reader_beside_writers_sees_nothing_or_the_whole(store):
    done = threading.Event()
    seen: set[str] = set()

    def read() -> None:
        while not done.is_set():
            try:
                seen.add(store.get("a").digest)
            except MissingObjectError:
                continue

    reader = threading.Thread(target=read)
    reader.start()
    try:
        time.sleep(0.02)
        digests = at_once(4, lambda index: store.put("a", latents(index, 1500)))
        assert store.get("a").digest == digests[0]
    finally:
        done.set()
        reader.join(10)
    assert seen <= set(digests)


WRITER = """
import sys
import numpy as np
from spot_runtime.store.seal import SEAL_BYTES, Kind, SealedBody
from spot_runtime.store.tensors import TensorStore
store = TensorStore(sys.argv[1])
sys.stdin.readline()
print([store.put(f"race/{key}", {"x": np.full(4000, int(sys.argv[2]))}) for key in range(2)])
"""


@pytest.mark.parametrize("url", ["file", "s3"], indirect=True)
def test_of_writers_in_other_processes_exactly_one_wins(store, url):
    command = [sys.executable, "-c", WRITER, url]
    writers = [
        subprocess.Popen([*command, str(index)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for index in range(3)
    ]
    time.sleep(1.0)
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    outputs = [writer.communicate(timeout=60)[0].strip() for writer in writers]
    assert outputs == [str([store.get(f"race/{key}").digest for key in range(2)])] * 3


ENDLESS_WRITER = """
import sys
import numpy as np
from spot_runtime.store.seal import SEAL_BYTES, Kind, SealedBody
from spot_runtime.store.tensors import TensorStore
store = TensorStore(sys.argv[1], part_bytes=65536)
for index in range(100_000):
    store.put(f"w/{index}", {"x": np.full(100_000, index)})
    print(index, flush=True)
"""


@pytest.mark.parametrize("url", ["file", "s3"], indirect=True)
def test_kill_9_of_a_writer_leaves_whole_objects_and_waste_that_is_collected(store, url, monkeypatch):
    writer = subprocess.Popen([sys.executable, "-c", ENDLESS_WRITER, url], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    acknowledged = [int(writer.stdout.readline()) for _ in range(3)]
    time.sleep(0.05)
    writer.kill()
    acknowledged += [int(line) for line in writer.stdout]
    writer.wait(10)
    writer.stdout.close()
    keys = store.list("w")
    assert set(keys) >= {f"w/{index}" for index in acknowledged}
    for key in keys:
        assert set(store.get(key).tensors["x"].tolist()) == {int(key.removeprefix("w/"))}
    monkeypatch.setattr(store, "_deadline_s", 0.2)
    time.sleep(1.9 if url.startswith("s3") else 0.9)
    store.collect("", 0, set(keys))
    assert names(store, ".tmp/") == []
    assert len(names(store, ".parts/")) == 13 * len(keys)


def test_collection_spares_what_is_referenced_young_or_outside(store):
    for key in ("runs/a/x", "runs/a/y", "runs/ab/z"):
        store.put(key, latents(0))
    store.put("runs/a/policy", big(0))
    store.put("runs/a/old-policy", big(1))
    assert store.collect("runs/a", 3600, set()).keys == ()
    collected = store.collect("runs/a", 0, {"runs/a/x", "runs/a/policy"})
    assert collected.keys == ("runs/a/old-policy", "runs/a/y")
    assert store.list("") == ["runs/a/policy", "runs/a/x", "runs/ab/z"]
    assert store.get("runs/a/policy").digest
    assert len(names(store, ".parts/")) == 6


def test_collection_asks_about_every_key_that_would_go(store):
    store.put_bytes("a", b"1")
    store.put_bytes("b", b"1")
    asked: list[str] = []

    def referenced(key: str) -> bool:
        asked.append(key)
        return key == "a"

    store.collect("", 0, referenced)
    assert sorted(asked) == ["a", "b"]
    assert store.list("") == ["a"]
    with pytest.raises(StoreError, match="older_than_s = -1: must be >= 0"):
        store.collect("", -1, referenced)


def test_parts_of_a_writer_that_died_are_collected_and_those_of_a_living_one_are_not(store, url, monkeypatch):
    store.put("policy", big(0))
    marker = raw(store, "policy.obj")
    store._blobs.delete("policy.obj")  # as if its writer had died before the marker
    store.put("other", big(1))
    assert store.collect("", 0, {"other"}).orphans == 0  # the newest part is younger than a living writer's next
    tamper(store, "policy.obj", marker)
    assert store.get("policy").digest
    store._blobs.delete("policy.obj")
    monkeypatch.setattr(store, "_deadline_s", 0.2)
    time.sleep(1.9 if url.startswith("s3") else 0.9)  # four deadlines, and S3 dates are whole seconds
    assert store.collect("", 0, {"other"}).orphans == 6
    assert store.get("other").digest
    assert len(names(store, ".parts/")) == 6
