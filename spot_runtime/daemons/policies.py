"""Policies on this machine: pulled from the store once a node, whatever the number of its workers and requests.

Owns the folder, how many files stay in it, and who waits for which; workers check a policy's digest when they bind it. Never loads one.
Belongs to the loop's thread: one pull a policy runs on a thread of the loop, and whoever waits for it keeps no thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from spot_runtime.daemons.loop import EventLoop, Timer
from spot_runtime.errors import StoreError
from spot_runtime.store.copies import PARTIAL_SUFFIX
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import PolicyRef

FILES_MAX = 16
"""Fetched policies that stay on disk; an older one is fetched again."""
PULL_DEADLINE_S = 1800.0
"""For one policy: 40 GB of full weights at 25 MB/s. Each of its parts has the store's own deadline besides."""

Then = Callable[[Future[Path]], object]


@dataclass
class _Waiting:
    """One who was promised a file, until the timer says that it is late."""

    then: Then
    late: Timer


class PolicyFiles:
    """safetensors files of policies in `folder`."""

    def __init__(
        self, folder: Path, store: TensorStore, loop: EventLoop, *, deadline_s: float = PULL_DEADLINE_S
    ) -> None:
        self._folder, self._store, self._loop, self._deadline_s = folder, store, loop, deadline_s
        self._waiting: dict[Path, list[_Waiting]] = {}

    def path(self, policy: PolicyRef) -> Path:
        return self._folder / f"{policy.version}-{policy.digest[:16]}.safetensors"

    def fetch(self, policy: PolicyRef, then: Then) -> None:
        """Hands `then` the file of `policy`, at once where it is here, else once it was pulled in parallel parts.

        The future raises as `TensorStore.get_file`, and StoreError where the file is not here within the deadline; the pull goes on then,
        and who asks again finds it or waits for it.
        """
        path = self.path(policy)
        if path.exists():
            then(_settled(path))
            return
        pulls = path in self._waiting
        one = _Waiting(then, self._loop.call_later(self._deadline_s, lambda: self._late(policy, one)))
        self._waiting.setdefault(path, []).append(one)
        if not pulls:
            self._loop.submit(self._pull, policy.key, path, then=partial(self._pulled, path))

    def _pull(self, key: str, path: Path) -> Path:
        self._store.get_file(key, path)
        return path

    def _pulled(self, path: Path, done: Future[Path]) -> None:
        if not done.exception():
            self._drop_old(path)
        for one in self._waiting.pop(path):
            one.late.cancel()
            one.then(done)

    def _late(self, policy: PolicyRef, one: _Waiting) -> None:
        self._waiting[self.path(policy)].remove(one)
        error = StoreError(f"{policy.key}: not here within {self._deadline_s:g} s of the request")
        one.then(_settled(error))

    def _drop_old(self, newest: Path) -> None:
        """Also what failed pulls have left."""
        pulling = [newest, *(path.with_name(path.name + PARTIAL_SUFFIX) for path in self._waiting)]
        files = [file for file in self._folder.glob("*.safetensors*") if file not in pulling]
        files.sort(key=lambda file: file.stat().st_mtime)
        for file in files[: max(0, len(files) + 1 - FILES_MAX)]:
            file.unlink(missing_ok=True)


def _settled(outcome: Path | StoreError) -> Future[Path]:
    future: Future[Path] = Future()
    if isinstance(outcome, StoreError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
    return future
