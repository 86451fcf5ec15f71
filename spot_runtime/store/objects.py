"""Sealed objects over blobs. Owns put-if-absent, repair, parts and verification; never knows tensors, places or retries."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from spot_runtime.errors import CorruptObjectError, MissingObjectError, ObjectFormatError, StoreError
from spot_runtime.store.blobs import Blobs, Body, too_large
from spot_runtime.store.keys import blob_name
from spot_runtime.store.parts import Marker, cut, part_name, spans
from spot_runtime.store.seal import SEAL_BYTES, Kind, Seal, SealedBody, open_sealed, unpack_seal

T = TypeVar("T")

PARALLEL_REQUESTS = 8
"""Parts in flight of one object."""
SINGLE_PARTS = 2
"""An object of at most so many part sizes is one blob."""
_PUT_TRIES = 8
_READ_TRIES = 2


@dataclass(frozen=True)
class Stored:
    """A verified object. `payload` is what was asked of it, perhaps read-only; `upload` is "" for an object in one blob."""

    kind: Kind
    digest: str
    payload: memoryview
    upload: str = ""


@dataclass(frozen=True)
class _Loaded:
    """A blob that was read: its version, and its seal and payload or why they cannot be trusted."""

    version: str
    content: tuple[Seal, memoryview] | None
    flaw: CorruptObjectError | None = None

    def verified(self) -> tuple[Seal, memoryview]:
        if self.content is None:
            assert self.flaw is not None
            raise self.flaw
        return self.content


class Objects:
    """Objects by key in `blobs`; one of more than two `part_bytes` lies in parts behind a marker.

    Reads of more than `read_bytes_max` raise StoreError instead.
    """

    def __init__(self, blobs: Blobs, part_bytes: int, read_bytes_max: int) -> None:
        self._blobs = blobs
        self._part_bytes = part_bytes
        self._read_bytes_max = read_bytes_max

    def put(self, key: str, kind: Kind, chunks: Sequence[memoryview]) -> str:
        """Commits the chunks' concatenation unless an intact object is there. Returns the digest of what is there afterwards."""
        size_bytes = sum(len(chunk) for chunk in chunks)
        if size_bytes > SINGLE_PARTS * self._part_bytes:
            return self._put_parts(key, kind, chunks, size_bytes)
        body = SealedBody(key, kind, chunks)
        winner = self._commit(key, body)
        return winner.digest if winner else body.seal.digest

    def get(self, key: str, start: int = 0, stop: int | None = None, bytes_max: int | None = None) -> Stored:
        """The object's bytes [start, stop), verified; of one in parts `bytes_max` at most, where it is given.

        Raises MissingObjectError or CorruptObjectError.
        """
        return self._open(key, self._load(key, blob_name(key)), start, stop, bytes_max)

    def verify(self, key: str) -> Stored:
        """Reads all of the object, part by part, and keeps nothing: `payload` is empty. Raises as `get`."""
        return self._verified(key, self._load(key, blob_name(key)))

    def head(self, key: str) -> Seal:
        """The seal of the object's own blob, checked against the blob's size but not its content. Raises as `get`."""
        for _ in range(_READ_TRIES):  # as `_load`
            tail = self._blobs.read_tail(blob_name(key), SEAL_BYTES)
            try:
                return unpack_seal(key, tail.data, tail.size_bytes)
            except CorruptObjectError as error:
                flaw = error
            if not len(tail.data):
                break
        raise flaw

    def marker(self, key: str) -> Marker | None:
        """The marker of a multi-part object, its parts unread; None where it is in one blob or not there. Raises CorruptObjectError."""
        try:
            if self.head(key).kind is not Kind.MARKER:
                return None
            return Marker.unpack(key, self._load(key, blob_name(key)).verified()[1])
        except MissingObjectError:
            return None

    def part(self, key: str, marker: Marker, index: int) -> memoryview:
        """One verified part. Raises CorruptObjectError, also where it is missing."""
        name = part_name(key, marker.upload, index)
        try:
            seal, payload = self._load(name, name).verified()
        except MissingObjectError as error:
            raise CorruptObjectError(f"{key}: part {index} of {len(marker.parts)} is missing: torn") from error
        if seal.kind is not Kind.PART or seal.digest != marker.parts[index]:
            raise CorruptObjectError(f"{key}: part {index} is not the one that was committed: foreign")
        return payload

    def delete(self, key: str) -> None:
        """Removes the object, its marker before its parts; those of a marker that cannot be read are then nobody's, and are collected."""
        marker = None
        with suppress(CorruptObjectError):
            marker = self.marker(key)
        self._blobs.delete(blob_name(key))
        if marker:
            self._delete_parts(key, marker.upload, len(marker.parts))

    def _put_parts(self, key: str, kind: Kind, chunks: Sequence[memoryview], size_bytes: int) -> str:
        there = self._intact(key)
        if isinstance(there, Stored):
            return there.digest
        upload = secrets.token_hex(8)
        bounds = list(spans(size_bytes, self._part_bytes))
        try:
            digests = in_parallel(
                lambda index: self._put_part(key, upload, index, cut(chunks, *bounds[index])), len(bounds)
            )
        except StoreError:
            self._delete_parts(key, upload, len(bounds))
            raise
        marker = Marker(kind, size_bytes, self._part_bytes, upload, tuple(digests))
        # From here on the marker may be there even if its request fails: only a marker of another upload makes these parts waste.
        winner = self._commit(key, SealedBody(key, Kind.MARKER, [memoryview(marker.pack())]))
        if winner and winner.upload != upload:
            self._delete_parts(key, upload, len(bounds))
        return winner.digest if winner else marker.digest

    def _put_part(self, key: str, upload: str, index: int, chunks: Sequence[memoryview]) -> str:
        name = part_name(key, upload, index)
        body = SealedBody(name, Kind.PART, chunks)
        self._blobs.create(name, body)  # False: an earlier try got through, nobody else knows this upload id
        return body.seal.digest

    def _commit(self, key: str, body: Body) -> Stored | None:
        """None where `body` has become the object, else the intact object that was there first. A damaged one is replaced."""
        name = blob_name(key)
        for _ in range(_PUT_TRIES):
            if self._blobs.create(name, body):
                return None
            there = self._intact(key)
            if isinstance(there, Stored):
                return there
            if there is not None and self._blobs.replace(name, body, there.version):
                return None
        raise StoreError(f"{key}: came and went {_PUT_TRIES} times while it was put")

    def _intact(self, key: str) -> Stored | _Loaded | None:
        """What is there: an intact object, a damaged blob, or nothing."""
        try:
            loaded = self._load(key, blob_name(key))
        except MissingObjectError:
            return None
        try:
            return self._verified(key, loaded)
        except ObjectFormatError:
            raise
        except CorruptObjectError:
            return loaded

    def _verified(self, key: str, loaded: _Loaded) -> Stored:
        """The object without its payload, each part of it read and verified."""
        seal, payload = loaded.verified()
        if seal.kind is not Kind.MARKER:
            return self._open(key, loaded, 0, 0)
        marker = Marker.unpack(key, payload)
        in_parallel(lambda index: len(self.part(key, marker, index)), len(marker.parts))
        return Stored(marker.kind, marker.digest, memoryview(b""), marker.upload)

    def _load(self, owner: str, name: str) -> _Loaded:
        """Reads a blob, once more where it is flawed: that tells a flaw of the transfer from one of the blob."""
        for _ in range(_READ_TRIES):
            blob = self._blobs.read(name, self._read_bytes_max)
            try:
                seal, payload = open_sealed(owner, blob.data)
                return _Loaded(blob.version, (seal, payload))
            except CorruptObjectError as error:
                flaw = error
            if len(blob.data) < blob.size_bytes:  # its content is lost: the place has tried for a whole deadline
                break
        return _Loaded(blob.version, None, flaw)

    def _open(self, key: str, loaded: _Loaded, start: int, stop: int | None, bytes_max: int | None = None) -> Stored:
        seal, payload = loaded.verified()
        if seal.kind is Kind.PART:
            raise CorruptObjectError(f"{key}: holds a part: foreign")
        if seal.kind is not Kind.MARKER:
            return Stored(seal.kind, seal.digest, payload[start:stop])
        marker = Marker.unpack(key, payload)
        stop = marker.size_bytes if stop is None else min(stop, marker.size_bytes)
        bytes_max = self._read_bytes_max if bytes_max is None else bytes_max
        if stop - start > bytes_max:
            raise too_large(key, stop - start, bytes_max)
        return Stored(marker.kind, marker.digest, self._assemble(key, marker, start, stop), marker.upload)

    def _assemble(self, key: str, marker: Marker, start: int, stop: int) -> memoryview:
        first, past = start // marker.part_bytes, -(-stop // marker.part_bytes)
        whole = np.empty(max(0, stop - start), np.uint8).data

        def fetch(index: int) -> None:
            offset = (first + index) * marker.part_bytes
            data = self.part(key, marker, first + index)[max(0, start - offset) : stop - offset]
            whole[max(0, offset - start) :][: len(data)] = data

        in_parallel(fetch, max(0, past - first))
        return whole

    def _delete_parts(self, key: str, upload: str, count: int) -> None:
        in_parallel(lambda index: self._blobs.delete(part_name(key, upload, index)), count)


def in_parallel(act: Callable[[int], T], count: int) -> list[T]:
    """`act` of 0 … count-1 in a few threads. The first error ends it; what is running ends by its own deadline."""
    if count <= 1:
        return [act(index) for index in range(count)]
    with ThreadPoolExecutor(min(PARALLEL_REQUESTS, count), thread_name_prefix="store") as pool:
        return list(pool.map(act, range(count)))
