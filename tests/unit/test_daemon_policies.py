"""A node pulls a policy once, however many of its requests ask for it at the same time."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from spot_runtime.daemons.policies import FILES_MAX, PolicyFiles
from spot_runtime.errors import MissingObjectError
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import PolicyRef


def put_policy(store: TensorStore, version: int) -> PolicyRef:
    policy = PolicyRef(version, f"runs/r/policies/{version}", f"{version:016x}")
    store.put(policy.key, {"lora_A": np.full(3000, version, np.float32)}, {"policy_version": str(version)})
    return policy


@pytest.fixture
def store(tmp_path: Path) -> TensorStore:
    return TensorStore(f"file://{tmp_path}/store", part_bytes=4096)


def test_of_many_who_ask_at_once_one_pulls(store: TensorStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = put_policy(store, 3)
    pulls: list[str] = []
    get_file = store.get_file
    monkeypatch.setattr(store, "get_file", lambda key, path: (pulls.append(key), get_file(key, path))[1])
    files, together = PolicyFiles(tmp_path / "policies", store), threading.Barrier(8)

    def ask(_: int) -> Path:
        together.wait(10)
        return files.fetch(policy)

    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(ask, range(8)))
    assert pulls == [policy.key]
    (path,) = paths
    assert path == files.path(policy)
    assert load_file(path)["lora_A"].tolist() == [3.0] * 3000


def test_old_policies_leave_the_disk_and_are_pulled_again(store: TensorStore, tmp_path: Path) -> None:
    files = PolicyFiles(tmp_path / "policies", store)
    policies = [put_policy(store, version) for version in range(1, FILES_MAX + 2)]
    for place, policy in enumerate(policies):
        os.utime(files.fetch(policy), (place, place))
    kept = sorted((tmp_path / "policies").glob("*.safetensors"))
    assert len(kept) == FILES_MAX
    assert not files.path(policies[0]).exists()
    assert load_file(files.fetch(policies[0]))["lora_A"][0] == 1.0


def test_a_policy_that_is_not_there_leaves_no_file(store: TensorStore, tmp_path: Path) -> None:
    files = PolicyFiles(tmp_path / "policies", store)
    with pytest.raises(MissingObjectError):
        files.fetch(PolicyRef(1, "runs/r/policies/none", "d"))
    assert list((tmp_path).glob("policies/*.safetensors")) == []
