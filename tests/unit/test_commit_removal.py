"""Which commits control removes once a job has ended: of requests that have ended, and of no other."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from spot_runtime.daemons.control import Control
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import RunId

RUN = RunId("r")


class World:
    """Control's records by request, and a store with two commits of each."""

    def __init__(self, folder: Path) -> None:
        self.store = TensorStore(f"file://{folder}/store")
        for request in ("done", "flying", "unknown"):
            for step in (2, 4):
                self.store.put_bytes(self.key(request, step), b"latents")
        self.store.put_bytes("runs/r/samples/done", b"sample")
        self.store.put_bytes("runs/other/commits/done.1.2", b"of another run")
        self.records = {"done": SimpleNamespace(is_final=True), "flying": SimpleNamespace(is_final=False)}
        self._core = SimpleNamespace(queue=SimpleNamespace(records=self.records))
        self._store = self.store

    @staticmethod
    def key(request: str, step: int) -> str:
        return f"runs/r/commits/{request}.1.{step}"

    def _may_be_needed(self, key: str) -> bool:
        return Control._may_be_needed(self, key)  # type: ignore[arg-type]

    def remove(self) -> int:
        return Control._remove_commits(self, RUN)  # type: ignore[arg-type]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_only_commits_of_requests_that_have_ended_go(world: World) -> None:
    before = set(world.store.list(""))
    assert world.remove() == 2
    assert before - set(world.store.list("")) == {world.key("done", 2), world.key("done", 4)}


def test_a_request_that_begins_again_while_commits_are_removed_keeps_what_is_left(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job was submitted again after the first of its commits went: each is asked about just before it goes."""
    delete = world.store._objects.delete

    def deleted(key: str) -> None:
        delete(key)
        world.records["done"].is_final = False

    monkeypatch.setattr(world.store._objects, "delete", deleted)
    assert world.remove() == 1
    assert len(world.store.list("runs/r/commits")) == 5


def test_a_commit_that_is_written_while_others_are_removed_stays(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    delete = world.store._objects.delete

    def deleted(key: str) -> None:
        delete(key)
        world.store.put_bytes(world.key("new", 3), b"latents")

    monkeypatch.setattr(world.store._objects, "delete", deleted)
    assert world.remove() == 2
    assert world.key("new", 3) in world.store.list("runs/r/commits")
