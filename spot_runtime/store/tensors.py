"""The tensor store: named, immutable, sealed objects at a URL. Owns put-if-absent and verification; never imports torch.

Every object is written once. `put` of a key that is taken leaves the first object in place and returns its digest; an object that is
torn, altered or foreign counts as not committed: `get` raises and `put` replaces it. A store may be called from several threads, never in
a forked child.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spot_runtime.errors import CorruptObjectError, MissingObjectError, StoreError
from spot_runtime.store.address import open_blobs
from spot_runtime.store.blobs import Blob
from spot_runtime.store.keys import blob_name, check_key, check_prefix, key_of
from spot_runtime.store.layout import pack_tensors, unpack_tensors
from spot_runtime.store.seal import SEAL_BYTES, Kind, Seal, digest_of, open_sealed, pack_seal, unpack_seal

_PUT_TRIES = 8


@dataclass(frozen=True)
class StoredTensors:
    """One object as read back: arrays by name (private to the reader), its meta, and its digest in hex."""

    tensors: dict[str, np.ndarray]
    meta: dict[str, str]
    digest: str


class TensorStore:
    """Objects by key at `url`: `file:///folder`, a plain path, `memory://name` or `s3://bucket/prefix`.

    Args:
        url: Where the objects are.
        deadline_s: Bound on every request, its retries included.

    Every method raises StoreError where the place refuses or fails, or where a key is not valid (`keys.check_key`).
    """

    def __init__(self, url: str, *, deadline_s: float = 30.0) -> None:
        self.url = url
        self._blobs = open_blobs(url, deadline_s)
        self._pid = os.getpid()

    def put(self, key: str, tensors: Mapping[str, np.ndarray], meta: Mapping[str, str] = {}) -> str:
        """Stores arrays and meta under `key` unless it is taken. Returns the digest of what is there afterwards."""
        return self._put(key, Kind.TENSORS, pack_tensors(tensors, meta))

    def get(self, key: str, *, digest: str = "") -> StoredTensors:
        """Reads and verifies an object that `put` stored; with `digest`, exactly that one.

        Raises MissingObjectError or CorruptObjectError.
        """
        seal, payload = self._get(key, Kind.TENSORS, digest)
        tensors, meta = unpack_tensors(key, payload)
        return StoredTensors(tensors, meta, seal.digest)

    def put_bytes(self, key: str, payload: bytes) -> str:
        """As `put`, for bytes: JSON, a picture. The digest is the sha256 of the payload."""
        return self._put(key, Kind.BYTES, [memoryview(payload)])

    def get_bytes(self, key: str, *, digest: str = "") -> bytes:
        """As `get`, for an object that `put_bytes` stored."""
        return bytes(self._get(key, Kind.BYTES, digest)[1])

    def exists(self, key: str) -> bool:
        """Whether an object with an intact seal is there. Only `get` verifies its payload."""
        name = self._name(key)
        try:
            tail = self._blobs.read_tail(name, SEAL_BYTES)
            unpack_seal(key, tail.data, tail.size_bytes)
        except (MissingObjectError, CorruptObjectError):
            return False
        return True

    def list(self, prefix: str) -> list[str]:
        """Sorted keys that are `prefix` or lie below it as a folder: `runs/a` has `runs/a/b` but not `runs/ab`; "" has all."""
        self._check_process()
        bare = check_prefix(prefix)
        found = (key_of(info.name) for info in self._blobs.list(bare))
        return sorted(key for key in found if key and (not bare or key == bare or key.startswith(bare + "/")))

    def delete(self, key: str) -> None:
        """Removes the object if it is there."""
        self._blobs.delete(self._name(key))

    def _put(self, key: str, kind: Kind, chunks: Sequence[memoryview]) -> str:
        name = self._name(key)
        seal = Seal(digest_of(chunks), sum(len(chunk) for chunk in chunks), kind)
        sealed = [*chunks, memoryview(pack_seal(key, seal))]
        for _ in range(_PUT_TRIES):
            if self._blobs.create(name, sealed):
                return seal.digest
            try:
                there = self._blobs.read(name)
            except MissingObjectError:
                continue
            winner = _intact(key, there)
            if winner is not None:
                return winner.digest
            if self._blobs.replace(name, sealed, there.version):
                return seal.digest
        raise StoreError(f"{key}: came and went {_PUT_TRIES} times while it was put")

    def _get(self, key: str, kind: Kind, digest: str) -> tuple[Seal, memoryview]:
        seal, payload = open_sealed(key, self._blobs.read(self._name(key)).data)
        if seal.kind != kind:
            raise CorruptObjectError(f"{key}: holds {seal.kind.name.lower()}, must be {kind.name.lower()}")
        if digest and seal.digest != digest:
            raise CorruptObjectError(f"{key}: digest {seal.digest[:16]}…, must be {digest[:16]}…")
        return seal, payload

    def _name(self, key: str) -> str:
        self._check_process()
        return blob_name(check_key(key))

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError(f"store = {self.url!r}: opened in process {self._pid}, must not be used in a forked child")


def _intact(key: str, blob: Blob) -> Seal | None:
    try:
        return open_sealed(key, blob.data)[0]
    except CorruptObjectError:
        return None
