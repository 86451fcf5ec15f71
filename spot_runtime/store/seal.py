"""The seal behind every blob's payload: what makes a torn, altered or foreign blob visible. Pure bytes; never does I/O.

A blob is `payload + seal`. The seal is 104 bytes, little-endian:

    payload digest (32) | owner digest (of the blob's key, 32) | payload size (u64) | kind (u8) | zeros (7) |
    format (8) | check (first 16 bytes of the digest of all fields before it)

The format names the digest too: SPOTSTR2 is BLAKE3 (`store.digest`); SPOTSTR1 was SHA-256, and is refused.

It stands behind the payload, so that a PNG or a safetensors file still begins like one, and so that hashing and writing are one pass.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from spot_runtime.errors import CorruptObjectError, ObjectFormatError
from spot_runtime.store.digest import content_hash

FORMAT = b"SPOTSTR2"
_EARLIER = frozenset({b"SPOTSTR1"})
_FIELDS = struct.Struct("<32s32sQB7x8s")
_CHECK_BYTES = 16
SEAL_BYTES = _FIELDS.size + _CHECK_BYTES
PIECE_BYTES = 1024 * 1024
"""Within a core's own cache, and few: of 256 KB to 2 MB, and all at once, this took the least processor time with eight writers."""


class Kind(IntEnum):
    """What a payload is."""

    BYTES = 1
    TENSORS = 2
    MARKER = 3
    PART = 4


@dataclass(frozen=True)
class Seal:
    """What a seal says of its payload. `digest` is hex."""

    digest: str
    size_bytes: int
    kind: Kind


def pack_seal(owner: str, seal: Seal) -> bytes:
    """The 104 bytes to put behind the payload of `owner`."""
    fields = _FIELDS.pack(bytes.fromhex(seal.digest), _digest(owner.encode()), seal.size_bytes, seal.kind, FORMAT)
    return fields + _digest(fields)[:_CHECK_BYTES]


def unpack_seal(owner: str, tail: bytes | memoryview, blob_bytes: int) -> Seal:
    """Reads the last 104 bytes of a blob of `blob_bytes`.

    Raises CorruptObjectError for anything that is not `owner`'s own seal, as ObjectFormatError where it is of an earlier version.
    """
    tail = bytes(tail)
    fields, check = tail[: _FIELDS.size], tail[_FIELDS.size :]
    found = fields[-len(FORMAT) :]
    if found in _EARLIER:
        raise ObjectFormatError(f"{owner}: seal of format {found!r}, must be {FORMAT!r}: of another version")
    if len(tail) != SEAL_BYTES or found != FORMAT or _digest(fields)[:_CHECK_BYTES] != check:
        raise CorruptObjectError(f"{owner}: no intact seal at its end: torn, altered or foreign")
    digest, owner_digest, size_bytes, kind, _ = _FIELDS.unpack(fields)
    if kind not in set(Kind):
        raise CorruptObjectError(f"{owner}: seal of kind {kind}, must be one of {', '.join(map(str, Kind))}")
    if owner_digest != _digest(owner.encode()):
        raise CorruptObjectError(f"{owner}: sealed under another key: foreign")
    if size_bytes != blob_bytes - SEAL_BYTES:
        raise CorruptObjectError(f"{owner}: {blob_bytes - SEAL_BYTES} bytes, must be {size_bytes}")
    return Seal(digest.hex(), size_bytes, Kind(kind))


class SealedBody:
    """The blob to write for `owner`: the chunks' concatenation, hashed while it is first taken, and its seal.

    Hashing piece by piece beside the writing halves what a put costs: a piece that was just hashed is copied from the cache.
    """

    def __init__(self, owner: str, kind: Kind, chunks: Sequence[memoryview]) -> None:
        self._owner, self._kind, self._chunks = owner, kind, chunks
        self._payload_bytes = sum(len(chunk) for chunk in chunks)
        self._sealed: tuple[Seal, memoryview] | None = None

    @property
    def size_bytes(self) -> int:
        return self._payload_bytes + SEAL_BYTES

    @property
    def seal(self) -> Seal:
        if self._sealed is None:  # nobody has taken all pieces yet
            for _ in self.pieces():
                pass
        assert self._sealed is not None
        return self._sealed[0]

    def pieces(self) -> Iterator[memoryview]:
        if self._sealed is not None:
            yield from self._chunks
            yield self._sealed[1]
            return
        state = content_hash()
        for chunk in self._chunks:
            for start in range(0, len(chunk), PIECE_BYTES):
                piece = chunk[start : start + PIECE_BYTES]
                state.update(piece)
                yield piece
        seal = Seal(state.hexdigest(), self._payload_bytes, self._kind)
        tail = memoryview(pack_seal(self._owner, seal))
        self._sealed = seal, tail
        yield tail


def open_sealed(owner: str, blob: memoryview) -> tuple[Seal, memoryview]:
    """Splits a whole blob into its verified seal and payload. Raises CorruptObjectError."""
    cut = max(0, len(blob) - SEAL_BYTES)
    seal = unpack_seal(owner, blob[cut:], len(blob))
    payload = blob[:cut]
    found = content_hash(payload).hexdigest()
    if found != seal.digest:
        raise CorruptObjectError(f"{owner}: digest {found[:16]}…, must be {seal.digest[:16]}…")
    return seal, payload


def _digest(data: bytes) -> bytes:
    return content_hash(data).digest()
