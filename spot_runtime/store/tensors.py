"""The tensor store: named, immutable, sealed objects at a URL. Owns the API; never imports torch.

Every object is written once. `put` of a key that is taken leaves the first object in place and returns its digest; an object that is
torn, altered or foreign counts as not committed: `get` raises and `put` replaces it. A store may be called from several threads, never in
a forked child: open a new one in a spawned process.

Layout under the URL: `KEY.obj` is an object or the marker of a large one, whose parts are `.parts/KEY/UPLOAD/INDEX`; `.tmp/` holds files
that are being written. Each of these ends in a seal (`store.seal`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spot_runtime.errors import CorruptObjectError, MissingObjectError, StoreError
from spot_runtime.store.address import open_blobs
from spot_runtime.store.copies import get_file, put_file
from spot_runtime.store.garbage import Collected, collect
from spot_runtime.store.keys import check_key, check_prefix, in_folder, key_of
from spot_runtime.store.layout import PREFIX_BYTES, header_bytes, pack_tensors, unpack_meta, unpack_tensors
from spot_runtime.store.objects import Objects, Stored
from spot_runtime.store.parts import PART_BYTES
from spot_runtime.store.seal import Kind

PART_BYTES_MIN = 1024
PART_BYTES_MAX = 1024**3
READ_BYTES_MAX = 8 * 1024**3
_UPLOAD_DEADLINES = 4
"""A writer of parts that has added none for so many deadlines is dead."""


@dataclass(frozen=True)
class StoredTensors:
    """One object as read back: arrays by name (private to the reader), its meta, and its digest in hex."""

    tensors: dict[str, np.ndarray]
    meta: dict[str, str]
    digest: str


class TensorStore:
    """Objects by key at `url`: `file:///folder`, a plain path, `memory://name` or `s3://bucket/prefix`.

    S3 takes credentials and endpoint from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL and AWS_REGION; `?endpoint_url=`
    and `?region=` of the URL come first.

    Args:
        url: Where the objects are.
        deadline_s: Bound on every request, its retries included; an object in parts is one request a part, a few at a time.
        part_bytes: Objects of more than twice this lie in parts of this size. Their digest depends on it.
        read_bytes_max: Nothing larger is read into memory unless a `get` says so; `get_file`, `get_range` and `verify` read what is
            larger in pieces.

    Every method raises StoreError where the place refuses or does not answer in time, or where a key is not valid (`keys.check_key`).
    """

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float = 30.0,
        part_bytes: int = PART_BYTES,
        read_bytes_max: int = READ_BYTES_MAX,
    ) -> None:
        if not PART_BYTES_MIN <= part_bytes <= PART_BYTES_MAX:
            raise StoreError(f"part_bytes = {part_bytes}: must be {PART_BYTES_MIN} to {PART_BYTES_MAX}")
        self.url = url
        self._deadline_s = deadline_s
        self._blobs = open_blobs(url, deadline_s)
        self._objects = Objects(self._blobs, part_bytes, read_bytes_max)
        self._pid = os.getpid()

    def put(self, key: str, tensors: Mapping[str, np.ndarray], meta: Mapping[str, str] = {}) -> str:
        """Stores arrays and meta under `key` unless it is taken. Returns the digest of what is there afterwards.

        Equal arrays and meta give equal digests. numpy has no bfloat16: store its uint16 view and say so in `meta`.
        """
        return self._put(key, Kind.TENSORS, pack_tensors(tensors, meta))

    def get(self, key: str, *, digest: str = "", bytes_max: int | None = None) -> StoredTensors:
        """Reads and verifies an object that `put` stored; with `digest`, exactly that one.

        `bytes_max` goes before the store's own `read_bytes_max`. Raises MissingObjectError or CorruptObjectError.
        """
        stored = self._get(key, Kind.TENSORS, digest, bytes_max)
        payload = stored.payload
        tensors, meta = unpack_tensors(key, memoryview(bytearray(payload)) if payload.readonly else payload)
        return StoredTensors(tensors, meta, stored.digest)

    def put_bytes(self, key: str, payload: bytes) -> str:
        """As `put`, for bytes: JSON, a picture. The digest of an object in one blob is the payload's own (`store.digest`)."""
        return self._put(key, Kind.BYTES, [memoryview(payload)])

    def get_bytes(self, key: str, *, digest: str = "") -> bytes:
        """As `get`, for an object that `put_bytes` stored."""
        return bytes(self._get(key, Kind.BYTES, digest).payload)

    def get_meta(self, key: str) -> dict[str, str]:
        """The meta of an object that `put` stored, of any size; only the parts that hold it are read. Raises as `get`."""
        size_bytes = header_bytes(key, self.get_range(key, 0, PREFIX_BYTES))
        return unpack_meta(key, self.get_range(key, 0, size_bytes))

    def verify(self, key: str, *, digest: str = "") -> None:
        """Reads an object of either kind and any size, a few parts at a time, and keeps nothing of it. Raises as `get`."""
        self._check(key)
        _demand(key, digest, self._objects.verify(key))

    def get_range(self, key: str, start: int, stop: int, *, digest: str = "") -> bytes:
        """Bytes [start, stop) of an object of either kind, as far as it goes; of one in parts, only the parts that hold them are read.

        What is returned is verified. Raises as `get`.
        """
        if not 0 <= start <= stop:
            raise StoreError(f"{key}: range {start}:{stop} must be 0 <= start <= stop")
        self._check(key)
        return bytes(_demand(key, digest, self._objects.get(key, start, stop)).payload)

    def put_file(self, key: str, path: Path) -> str:
        """As `put_bytes`, for a file of any size in bounded memory. Raises InputError where it cannot be read."""
        self._check(key)
        return put_file(self._objects, key, path)

    def get_file(
        self, key: str, path: Path, *, digest: str = "", on_bytes: Callable[[int], None] = lambda _: None
    ) -> str:
        """The payload of an object of either kind as a file that appears whole or not at all; tensors make a safetensors file.

        An interrupted copy goes on where it was: what it has is in `path.partial`; one caller a path at a time. `on_bytes` hears of each
        part that is there. Returns the digest. Raises as `get`, and StoreError where the disk has no room.
        """
        self._check(key)
        return get_file(self._objects, key, path, digest, on_bytes)

    def exists(self, key: str) -> bool:
        """Whether an object with an intact seal is there. Only reading verifies its payload."""
        self._check(key)
        try:
            self._objects.head(key)
        except (MissingObjectError, CorruptObjectError):
            return False
        return True

    def list(self, prefix: str) -> list[str]:
        """Sorted keys that are `prefix` or lie below it as a folder: `runs/a` has `runs/a/b` but not `runs/ab`; "" has all."""
        self._check_process()
        bare = check_prefix(prefix)
        keys = (key_of(info.name) for info in self._blobs.list(bare))
        return sorted(key for key in keys if key and in_folder(key, bare))

    def ages_s(self, prefix: str) -> dict[str, float]:
        """Keys as `list`, with how long ago each was written, on the place's own clock."""
        self._check_process()
        bare, now_s = check_prefix(prefix), self._blobs.now_s()
        found = ((key_of(info.name), info.modified_s) for info in self._blobs.list(bare))
        return {key: now_s - modified_s for key, modified_s in found if key and in_folder(key, bare)}

    def delete(self, key: str) -> None:
        """Removes the object if it is there."""
        self._check(key)
        self._objects.delete(key)

    def collect(self, prefix: str, older_than_s: float, referenced: Callable[[str], bool] | Set[str]) -> Collected:
        """Removes what lies in the folder `prefix`, is older than `older_than_s` and not referenced; also parts and temp files of
        writers that died.

        `referenced` is asked for each key just before it goes. `older_than_s` must exceed the time between a put and its reference.
        """
        self._check_process()
        keep = referenced if callable(referenced) else referenced.__contains__
        upload_s_max = _UPLOAD_DEADLINES * self._deadline_s
        return collect(self._blobs, self._objects, check_prefix(prefix), older_than_s, keep, upload_s_max)

    def _put(self, key: str, kind: Kind, chunks: Sequence[memoryview]) -> str:
        self._check(key)
        return self._objects.put(key, kind, chunks)

    def _get(self, key: str, kind: Kind, digest: str, bytes_max: int | None = None) -> Stored:
        self._check(key)
        stored = _demand(key, digest, self._objects.get(key, bytes_max=bytes_max))
        if stored.kind is not kind:
            raise CorruptObjectError(f"{key}: holds {stored.kind.name.lower()}, must be {kind.name.lower()}")
        return stored

    def _check(self, key: str) -> None:
        self._check_process()
        check_key(key)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError(f"store = {self.url!r}: opened in process {self._pid}, must not be used in a forked child")


def _demand(key: str, digest: str, stored: Stored) -> Stored:
    if digest and stored.digest != digest:
        raise CorruptObjectError(f"{key}: digest {stored.digest[:16]}…, must be {digest[:16]}…")
    return stored
