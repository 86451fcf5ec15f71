"""Blobs as files under a folder. Owns temp names, links and the repair lock; never knows what a payload means.

A blob is written under a temp name and link()-ed to its own: readers see it whole, and of several writers one link succeeds. fsspec's
local file system has no such operation, so this speaks to the operating system itself. Nothing is fsync-ed: an object outlives the
death of any process; after a power cut its seal tells whether it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from spot_runtime.errors import MissingObjectError, StoreError
from spot_runtime.store.blobs import Blob, BlobInfo, Body, too_large

TEMP_FOLDER = ".tmp"
_LOCK_FILE = ".repair-lock"
_LOCK_POLL_S = 0.005
_MKDIR_TRIES = 5


class FileBlobs:
    """Blobs of one folder; made on the first write. Needs hard links, which every local file system and NFS have."""

    def __init__(self, root: Path, deadline_s: float) -> None:
        self._root = root
        self._deadline_s = deadline_s

    def create(self, name: str, body: Body) -> bool:
        with _operating_errors(self._root / name, writes=True), self._temp(body) as temp:
            return self._link(temp, self._root / name)

    def replace(self, name: str, body: Body, version: str) -> bool:
        path = self._root / name
        with _operating_errors(path, writes=True), self._temp(body) as temp, self._repair_lock():
            try:
                if _version(path.stat()) != version:
                    return False
            except FileNotFoundError:
                return False
            temp.replace(path)
            return True

    def read(self, name: str, bytes_max: int) -> Blob:
        return self._read(name, 0, bytes_max)

    def read_tail(self, name: str, size_bytes: int) -> Blob:
        return self._read(name, size_bytes, size_bytes)

    def _read(self, name: str, tail_bytes: int, bytes_max: int) -> Blob:
        path = self._root / name
        with _operating_errors(path), path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            size_bytes = min(tail_bytes, status.st_size) if tail_bytes else status.st_size
            if size_bytes > bytes_max:
                raise too_large(name, size_bytes, bytes_max)
            file.seek(status.st_size - size_bytes)
            data = np.empty(size_bytes, np.uint8).data
            done = 0
            while done < size_bytes and (count := file.readinto(data[done:])):
                done += count
            return Blob(data[:done], status.st_size, _version(status))

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        with _operating_errors(self._root / prefix):
            yield from _walk(self._root, (self._root / f"{prefix}x").parent, prefix)

    def delete(self, name: str) -> None:
        with _operating_errors(self._root / name):
            (self._root / name).unlink(missing_ok=True)
            if not name.startswith(TEMP_FOLDER):
                self._prune((self._root / name).parent)

    def now_s(self) -> float:
        return time.time()

    def _prune(self, folder: Path) -> None:
        """Removes folders that have become empty, upward."""
        with contextlib.suppress(OSError):  # not empty, gone, or somebody works in it
            while folder != self._root:
                folder.rmdir()
                folder = folder.parent

    @contextlib.contextmanager
    def _temp(self, body: Body) -> Iterator[Path]:
        folder = self._root / TEMP_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        temp = folder / f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            with temp.open("xb") as file:
                for piece in body.pieces():
                    file.write(piece)
            yield temp
        finally:
            temp.unlink(missing_ok=True)

    def _link(self, temp: Path, path: Path) -> bool:
        for _ in range(_MKDIR_TRIES):  # a collector may remove the empty folder between the two calls
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(temp, path)
                return True
            except FileExistsError:
                return False
            except FileNotFoundError:
                continue
        raise StoreError(f"{path.parent}: vanished {_MKDIR_TRIES} times while a blob was linked into it")

    @contextlib.contextmanager
    def _repair_lock(self) -> Iterator[None]:
        until_s = time.monotonic() + self._deadline_s
        with (self._root / _LOCK_FILE).open("ab") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until_s:
                        raise StoreError(f"{file.name}: locked for more than {self._deadline_s} s") from None
                    time.sleep(_LOCK_POLL_S)
            yield


def _walk(root: Path, folder: Path, prefix: str) -> Iterator[BlobInfo]:
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in entries:
        name = os.path.relpath(entry.path, root)
        if entry.is_dir(follow_symlinks=False):
            if (name + "/").startswith(prefix) or prefix.startswith(name + "/"):
                yield from _walk(root, Path(entry.path), prefix)
        elif name.startswith(prefix):
            try:
                status = entry.stat()
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ELOOP):  # gone meanwhile, or a link to itself: no blob
                    continue
                raise
            yield BlobInfo(name, status.st_size, status.st_mtime)


def _version(status: os.stat_result) -> str:
    return f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"


@contextlib.contextmanager
def _operating_errors(path: Path, *, writes: bool = False) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not writes:
            raise MissingObjectError(f"{path}: no such object") from error
        hint = "; the file system must allow hard links" if error.errno in (errno.EPERM, errno.EOPNOTSUPP) else ""
        raise StoreError(f"{path}: {os.strerror(error.errno or 0)}{hint}") from error
