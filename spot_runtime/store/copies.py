"""Whole files in and out of the store, in bounded memory. Owns resume and the space check; never knows what a file means."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from spot_runtime.errors import CorruptObjectError, InputError, StoreError
from spot_runtime.store.digest import content_hash
from spot_runtime.store.objects import Objects, in_parallel
from spot_runtime.store.parts import Marker, spans
from spot_runtime.store.seal import Kind

PARTIAL_SUFFIX = ".partial"


def put_file(objects: Objects, key: str, path: Path) -> str:
    """Stores the file's bytes under `key` unless it is taken; its pages are read as they are sent.

    A file that somebody cuts short meanwhile ends the process (SIGBUS), as it does every reader of a mapped file.

    Returns the digest of what is there afterwards. Raises InputError where the file cannot be read.
    """
    try:
        size_bytes = path.stat().st_size
        data = np.memmap(path, np.uint8, "r") if size_bytes else np.empty(0, np.uint8)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    return objects.put(key, Kind.BYTES, [data.data])


def get_file(objects: Objects, key: str, path: Path, digest: str, on_bytes: Callable[[int], None]) -> str:
    """Copies an object's payload to `path`, which appears whole or not at all; with `digest`, exactly that one. Returns its digest.

    `on_bytes` hears of each part, from several threads. An interrupted copy goes on where it was: parts that `path.partial` already holds
    are verified, not read again. One caller a path at a time. Raises MissingObjectError, CorruptObjectError, and StoreError where the
    disk has no room.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    marker = objects.marker(key)
    stored = None if marker else objects.get(key)
    found = marker or stored
    assert found is not None
    if digest and found.digest != digest:
        raise CorruptObjectError(f"{key}: digest {found.digest[:16]}…, must be {digest[:16]}…")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if marker:
            _check_space(partial, marker.size_bytes)
            _fill(objects, key, marker, partial, on_bytes)
        elif stored:
            _check_space(partial, len(stored.payload))
            with partial.open("wb") as file:
                file.write(stored.payload)
                os.fsync(file.fileno())
            on_bytes(len(stored.payload))
        partial.replace(path)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error
    return found.digest


def _check_space(partial: Path, size_bytes: int) -> None:
    held_bytes = partial.stat().st_blocks * 512 if partial.exists() else 0
    free_bytes = shutil.disk_usage(partial.parent).free
    if size_bytes - held_bytes > free_bytes:
        raise StoreError(
            f"{partial.parent}: {free_bytes} bytes free, must be >= {size_bytes - held_bytes} for {partial.name}"
        )


def _fill(objects: Objects, key: str, marker: Marker, partial: Path, on_bytes: Callable[[int], None]) -> None:
    bounds = list(spans(marker.size_bytes, marker.part_bytes))
    resumed = partial.exists()
    file = os.open(partial, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        os.truncate(file, marker.size_bytes)

        def fetch(index: int) -> None:
            start, stop = bounds[index]
            if not (resumed and content_hash(os.pread(file, stop - start, start)).hexdigest() == marker.parts[index]):
                data, place = objects.part(key, marker, index), start
                while len(data):
                    count = os.pwrite(file, data, place)
                    data, place = data[count:], place + count
            on_bytes(stop - start)

        in_parallel(fetch, len(bounds))
        os.fsync(file)
    finally:
        os.close(file)
