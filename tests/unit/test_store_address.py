import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spot_runtime.errors import InputError, StoreError
from spot_runtime.store.address import check_shared, folders_to_make, local_folder, recorded, remove_empty, same_store
from spot_runtime.store.tensors import TensorStore


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("", "must name a folder"),
        ("file://relative/folder", "must name an absolute folder"),
        ("file:relative", "must name an absolute folder"),
        ("gs://bucket/prefix", "must be file:///folder, a path or s3://bucket/prefix"),
        ("data:,hello", "must be file:///folder, a path or s3://bucket/prefix"),
        ("memory:x", "must be file:///folder, a path or s3://bucket/prefix"),
        ("s3:/bucket/prefix", "must be file:///folder, a path or s3://bucket/prefix"),
        ("simplecache::s3://bucket/prefix", "must be file:///folder, a path or s3://bucket/prefix"),
        ("memory://../x", "component '..'"),
        ("s3://", "bucket '' must be 3 to 63"),
        ("s3://ab/prefix", "bucket 'ab' must be 3 to 63"),
        ("s3://Bucket", "bucket 'Bucket' must be"),
        ("s3://bucket/a/../b", "component '..'"),
        ("s3://[bad", "Invalid IPv6 URL"),
        ("~nobody-of-that-name/x", "Could not determine home directory"),
        ("/tmp/" + "a" * 5000, "File name too long"),
        ("a\0b", "must name a folder"),
        ("s3://bucket/a?secret=hush", "option 'secret' must be one of endpoint_url, region"),
    ],
)
def test_a_url_that_cannot_be_a_store_is_refused_in_one_line(url, complaint):
    for opens in (TensorStore, check_shared):
        with pytest.raises(InputError) as caught:
            opens(url)
        assert str(caught.value).startswith("store = ")
        if not (url.startswith("memory:") and opens is check_shared):
            assert complaint in str(caught.value)
        assert "hush" not in str(caught.value)


def test_a_store_in_memory_is_none_for_several_processes():
    with pytest.raises(
        InputError, match=r"^store = 'memory://x': must be file:///folder, a path or s3://bucket/prefix: no"
    ):
        check_shared("memory://x")


@pytest.mark.parametrize("url", ["store", "./a:b", "~/store", "/a b/ü", "file:///a/b", "s3://bucket/a?region=x"])
def test_a_url_for_several_processes_is_taken_as_it_is_and_nothing_is_made(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_shared(url) == url
    assert list(tmp_path.iterdir()) == []


def test_only_folders_that_were_made_and_are_empty_go_again(tmp_path):
    (tmp_path / "kept").mkdir()
    url = f"file://{tmp_path}/kept/new/store"
    made = folders_to_make(url)
    assert made == (tmp_path / "kept/new/store/.tmp", tmp_path / "kept/new/store", tmp_path / "kept/new")
    store = TensorStore(url)
    store.put_bytes("a/b", b"1")
    remove_empty(made)
    assert store.get_bytes("a/b") == b"1"
    store.delete("a/b")
    remove_empty(made)
    assert [path.name for path in tmp_path.rglob("*")] == ["kept"]
    assert folders_to_make("s3://bucket/a") == folders_to_make("memory://a") == ()


def test_a_folder_that_cannot_be_made_is_named_with_the_systems_reason():
    with pytest.raises(StoreError, match=r"^/proc/nope/a\.obj: No such file or directory$"):
        TensorStore("/proc/nope").put_bytes("a", b"1")


def test_a_file_is_no_store(tmp_path):
    (tmp_path / "note.txt").write_text("hello")
    with pytest.raises(InputError, match=r"note\.txt is not a folder"):
        TensorStore(str(tmp_path / "note.txt"))


@pytest.mark.parametrize(
    ("deadline_s", "part_bytes"), [(0, 4096), (-1, 4096), (1e9, 4096), (float("nan"), 4096), (1, 10), (1, 2**40)]
)
def test_bounds_of_the_settings_are_checked(deadline_s, part_bytes):
    with pytest.raises(StoreError, match=r"(deadline_s|part_bytes) = .*: must be"):
        TensorStore("memory://bounds", deadline_s=deadline_s, part_bytes=part_bytes)


@pytest.mark.parametrize("name", ["store", "my runs", "José", "100%", "a%20b", "a?b#c"])
def test_a_plain_path_and_its_file_url_are_the_same_store(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    digest = TensorStore(name).put("a", {"x": np.ones(2)})
    assert TensorStore((tmp_path / name).as_uri()).get("a").digest == digest
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_url_that_is_not_encoded_is_taken_as_it_is(tmp_path):
    TensorStore(f"file://{tmp_path}/my runs/é").put_bytes("a", b"1")
    assert (tmp_path / "my runs" / "é" / "a.obj").exists()


def test_stores_of_one_memory_url_share_objects_and_others_do_not():
    TensorStore("memory://one").put_bytes("a", b"1")
    assert TensorStore("memory://one").get_bytes("a") == b"1"
    assert not TensorStore("memory://other").exists("a")
    assert TensorStore("memory://on").list("") == []


def test_importing_and_using_files_brings_in_neither_torch_nor_the_s3_client(tmp_path):
    program = (
        "import sys, numpy; from spot_runtime.store.tensors import TensorStore;"
        f"TensorStore({str(tmp_path)!r}).put('a', {{'x': numpy.ones(1)}});"
        "print([name for name in ('torch', 's3fs', 'aiobotocore', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_forked_child_is_refused():
    store = TensorStore("memory://forked")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store.exists("a")
        except StoreError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    assert b"must not be used in a forked child" in os.read(reader, 1000)
    os.close(reader)


def test_a_full_or_forbidden_folder_is_one_clear_error(tmp_path, monkeypatch):
    def full(*_args: object, **_more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(StoreError, match=r"a\.obj: No space left on device"):
        TensorStore(str(tmp_path)).put_bytes("a", b"1")
    assert list((Path(tmp_path) / ".tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("/a/b", "file:///a/b/", True),
        ("/a/b/", "/a/c/../b", True),
        ("/a/b", "/a/c", False),
        ("s3://bucket/prefix", "s3://bucket/prefix/", True),
        ("s3://bucket/prefix", "s3://bucket/other", False),
        ("s3://bucket/prefix", "/bucket/prefix", False),
    ],
)
def test_spellings_of_a_store_are_one_store(one: str, other: str, same: bool) -> None:
    assert same_store(one, other) is same


def test_an_s3_store_is_the_same_however_its_options_and_slashes_are_spelt() -> None:
    options = ("endpoint_url=http://h:1", "region=r")
    assert same_store(f"s3://bucket/p?{'&'.join(options)}", f"s3://bucket/p/?{'&'.join(reversed(options))}")
    assert not same_store("s3://bucket/p?region=r", "s3://bucket/p?region=other")
    assert not same_store("s3://bucket/p", "s3://bucket/q")


def test_a_plain_path_is_recorded_absolute_and_a_url_as_it_is(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert recorded("rel/store") == str(tmp_path / "rel/store")
    assert recorded("s3://bucket/p") == "s3://bucket/p"
    assert recorded("file:///a/b") == "file:///a/b"


def test_only_a_file_store_has_a_folder() -> None:
    assert local_folder("file:///a/b/") == Path("/a/b")
    assert local_folder("s3://bucket/prefix") is None
