"""What the store asks of a place that keeps blobs. Owns the protocol; never knows what a payload means.

A blob becomes visible whole or not at all, and `create` lets exactly one of several writers win.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from spot_runtime.errors import StoreError


@dataclass(frozen=True)
class BlobInfo:
    """One stored blob: its name, size, and when it was written, in seconds of the place's own clock."""

    name: str
    size_bytes: int
    modified_s: float


@dataclass(frozen=True)
class Blob:
    """What a read found. `version` changes whenever the blob does. Content that the place has lost reads as empty."""

    data: memoryview
    size_bytes: int
    version: str


class Body(Protocol):
    """What to write: pieces in order, and their size together. May be taken again, where a try has failed."""

    @property
    def size_bytes(self) -> int: ...

    def pieces(self) -> Iterator[memoryview]:
        """Each is to be written before the next is taken: it has just been hashed and lies in the processor's cache."""


def too_large(name: str, size_bytes: int, bytes_max: int) -> StoreError:
    """What a read of too much raises."""
    return StoreError(f"{name}: {size_bytes} bytes, must be <= {bytes_max} to be read at once")


class Blobs(Protocol):
    """Blobs by name under one root. Safe to call from several threads.

    Every method ends within the deadline that its maker was given, and raises StoreError where the place fails.
    """

    def create(self, name: str, body: Body) -> bool:
        """Writes the body; False where `name` is there already."""

    def replace(self, name: str, body: Body, version: str) -> bool:
        """Puts the body in the place of the blob that was read as `version`; False where it has changed or gone since."""

    def read(self, name: str, bytes_max: int) -> Blob:
        """The whole blob. Raises MissingObjectError, and StoreError (`too_large`) before it reads one of more than `bytes_max`."""

    def read_tail(self, name: str, size_bytes: int) -> Blob:
        """The last `size_bytes` of the blob (all of a smaller one). Raises MissingObjectError."""

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        """Blobs whose name begins with `prefix`, in no order; what comes or goes meanwhile may be left out."""

    def delete(self, name: str) -> None:
        """Removes the blob if it is there."""

    def now_s(self) -> float:
        """The place's clock, to compare with `modified_s`."""
