"""Blobs in this process's memory, through fsspec's memory file system: what one TensorStore puts, another of the same URL sees.

Owns atomicity by single dictionary operations; never outlives the process and never crosses it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from spot_runtime.errors import MissingObjectError
from spot_runtime.store.blobs import Blob, BlobInfo, Body, too_large


class MemoryBlobs:
    """Blobs under `/root` of fsspec's process-wide memory file system. Tests and single-process runs only."""

    def __init__(self, root: str) -> None:
        self._fs: Any = MemoryFileSystem()
        self._files: dict[str, Any] = self._fs.store
        self._root = f"/{root}/" if root else "/"

    def create(self, name: str, body: Body) -> bool:
        mine = self._file(name, body)
        return self._files.setdefault(mine.path, mine) is mine

    def replace(self, name: str, body: Body, version: str) -> bool:
        mine = self._file(name, body)
        seen = self._files.get(mine.path)
        if seen is None or _version(seen) != version:
            return False
        taken = self._files.pop(mine.path, None)
        if taken is not None and taken is not seen:  # somebody was quicker: put back what they wrote
            self._files.setdefault(mine.path, taken)
            return False
        return self._files.setdefault(mine.path, mine) is mine

    def read(self, name: str, bytes_max: int) -> Blob:
        blob = self.read_tail(name, 0)
        if blob.size_bytes > bytes_max:
            raise too_large(name, blob.size_bytes, bytes_max)
        return blob

    def read_tail(self, name: str, size_bytes: int) -> Blob:
        file = self._files.get(self._root + name)
        if file is None:
            raise MissingObjectError(f"memory:/{self._root}{name}: no such object")
        whole = file.getvalue()
        return Blob(memoryview(whole)[-size_bytes:], len(whole), _version(file))

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        start = self._root + prefix
        for path, file in list(self._files.items()):
            if path.startswith(start):
                yield BlobInfo(path.removeprefix(self._root), len(file.getvalue()), file.modified.timestamp())

    def delete(self, name: str) -> None:
        self._files.pop(self._root + name, None)

    def now_s(self) -> float:
        return time.time()

    def _file(self, name: str, body: Body) -> Any:
        return MemoryFile(self._fs, self._root + name, b"".join(body.pieces()))


def _version(file: Any) -> str:
    return f"{id(file)}-{file.modified.timestamp()}"
