"""Policies on this machine: pulled from the store once a node, whatever the number of its workers and requests.

Owns the folder and how many files stay in it; workers check a policy's digest when they bind it. Never loads one.
"""

from __future__ import annotations

import threading
from pathlib import Path

from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import PolicyRef

FILES_MAX = 16
"""Fetched policies that stay on disk; an older one is fetched again."""


class PolicyFiles:
    """safetensors files of policies in `folder`. `fetch` may be called from several threads: the first one pulls, the others wait."""

    def __init__(self, folder: Path, store: TensorStore) -> None:
        self._folder, self._store = folder, store
        self._lock = threading.Lock()

    def path(self, policy: PolicyRef) -> Path:
        return self._folder / f"{policy.version}-{policy.digest[:16]}.safetensors"

    def fetch(self, policy: PolicyRef) -> Path:
        """The file of `policy`, pulled in parallel parts where it is not here. Raises as `TensorStore.get_file`."""
        path = self.path(policy)
        with self._lock:
            if not path.exists():
                self._store.get_file(policy.key, path)
                self._drop_old()
        return path

    def _drop_old(self) -> None:
        files = sorted(self._folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
        for file in files[:-FILES_MAX]:
            file.unlink(missing_ok=True)
