"""A node pulls a policy once, however many of its requests wait for it, and none of those keeps a thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from spot_runtime.daemons.loop import EventLoop
from spot_runtime.daemons.policies import FILES_MAX, PolicyFiles
from spot_runtime.errors import MissingObjectError, StoreError
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import PolicyRef

DEADLINE_S = 60.0


def put_policy(store: TensorStore, version: int) -> PolicyRef:
    policy = PolicyRef(version, f"runs/r/policies/{version}", f"{version:016x}")
    store.put(policy.key, {"lora_A": np.full(3000, version, np.float32)}, {"policy_version": str(version)})
    return policy


@pytest.fixture
def store(tmp_path: Path) -> TensorStore:
    return TensorStore(f"file://{tmp_path}/store", part_bytes=4096)


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop(threads=2, urgent_threads=1)
    yield loop
    loop.close()


def until(loop: EventLoop, happened: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < limit_s
        loop.run_once(0.1)


def fetched(loop: EventLoop, files: PolicyFiles, policy: PolicyRef) -> Path:
    done: list[Future[Path]] = []
    files.fetch(policy, done.append)
    until(loop, lambda: bool(done))
    return done[0].result()


class SlowStore:
    """Pulls that wait for the test: `get_file` of a key in `held` ends once `release` is set."""

    def __init__(self, store: TensorStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pulls: list[str] = []
        self.held: set[str] = set()
        self.release = threading.Event()
        self._get_file = store.get_file
        monkeypatch.setattr(store, "get_file", self._pull)

    def _pull(self, key: str, path: Path) -> str:
        self.pulls.append(key)
        if key in self.held:
            assert self.release.wait(DEADLINE_S)
        return self._get_file(key, path)


@pytest.fixture
def slow(store: TensorStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowStore]:
    slow = SlowStore(store, monkeypatch)
    yield slow
    slow.release.set()


def test_of_many_who_ask_at_once_one_pulls(
    store: TensorStore, slow: SlowStore, loop: EventLoop, tmp_path: Path
) -> None:
    policy, done = put_policy(store, 3), []
    files = PolicyFiles(tmp_path / "policies", store, loop)
    slow.held = {policy.key}
    for _ in range(20):
        files.fetch(policy, done.append)
    assert loop.calls_open == 1
    slow.release.set()
    until(loop, lambda: len(done) == 20)
    assert slow.pulls == [policy.key]
    assert {each.result() for each in done} == {files.path(policy)}
    assert load_file(files.path(policy))["lora_A"].tolist() == [3.0] * 3000


def test_a_pull_that_hangs_holds_up_no_other_policy_and_no_commit(
    store: TensorStore, slow: SlowStore, loop: EventLoop, tmp_path: Path
) -> None:
    hung, other, here = (put_policy(store, version) for version in (1, 2, 3))
    files = PolicyFiles(tmp_path / "policies", store, loop)
    fetched(loop, files, here)
    slow.held = {hung.key}
    waiting: list[Future[Path]] = []
    for _ in range(20):
        files.fetch(hung, waiting.append)
    assert load_file(fetched(loop, files, other))["lora_A"][0] == 2.0
    at_once: list[Future[Path]] = []
    files.fetch(here, at_once.append)
    assert [each.result() for each in at_once] == [files.path(here)]

    loop.submit(slow.release.wait, DEADLINE_S, then=lambda _: None)  # no thread is free now but the urgent one
    committed: list[Future[str]] = []
    loop.submit(store.put_bytes, "commit", b"latents", then=committed.append, urgent=True)
    until(loop, lambda: bool(committed))
    assert store.get_bytes("commit") == b"latents"
    assert waiting == []


def test_who_waits_too_long_is_told_and_the_next_finds_what_was_pulled(
    store: TensorStore, slow: SlowStore, loop: EventLoop, tmp_path: Path
) -> None:
    policy, told = put_policy(store, 1), []
    files = PolicyFiles(tmp_path / "policies", store, loop, deadline_s=0.05)
    slow.held = {policy.key}
    files.fetch(policy, told.append)
    until(loop, lambda: bool(told))
    with pytest.raises(StoreError, match=r"^runs/r/policies/1: not here within 0\.05 s of the request$"):
        told[0].result()
    slow.release.set()
    until(loop, lambda: loop.calls_open == 0)
    assert fetched(loop, files, policy) == files.path(policy)
    assert (len(told), slow.pulls) == (1, [policy.key])


def test_old_policies_leave_the_disk_and_are_pulled_again(store: TensorStore, loop: EventLoop, tmp_path: Path) -> None:
    files = PolicyFiles(tmp_path / "policies", store, loop)
    policies = [put_policy(store, version) for version in range(1, FILES_MAX + 2)]
    failed = tmp_path / "policies" / "0-0.safetensors.partial"
    failed.parent.mkdir()
    failed.write_bytes(b"half")
    os.utime(failed, (0, 0))
    for place, policy in enumerate(policies):
        os.utime(fetched(loop, files, policy), (place, place))
    kept = sorted((tmp_path / "policies").glob("*.safetensors"))
    assert len(kept) == FILES_MAX
    assert not failed.exists()
    assert not files.path(policies[0]).exists()
    assert load_file(fetched(loop, files, policies[0]))["lora_A"][0] == 1.0


def test_a_policy_that_is_not_there_leaves_no_file(store: TensorStore, loop: EventLoop, tmp_path: Path) -> None:
    files = PolicyFiles(tmp_path / "policies", store, loop)
    with pytest.raises(MissingObjectError):
        fetched(loop, files, PolicyRef(1, "runs/r/policies/none", "d"))
    assert list((tmp_path).glob("policies/*.safetensors")) == []
