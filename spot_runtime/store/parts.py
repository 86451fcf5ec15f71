"""Large objects in parts: the marker that commits them and where the parts lie. Pure values; never does I/O.

Each writer uploads its parts under an upload id of its own, then tries to create the marker; parts without a marker that names their
upload were never committed. The object's digest is that of its parts' digests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from spot_runtime.errors import CorruptObjectError
from spot_runtime.store.digest import content_hash
from spot_runtime.store.seal import Kind

PART_BYTES = 16 * 1024 * 1024
PARTS_FOLDER = ".parts"
_FORMAT = 1


@dataclass(frozen=True)
class Marker:
    """What a committed multi-part object is: its kind, size, part size, upload id and the hex digest of each part in order."""

    kind: Kind
    size_bytes: int
    part_bytes: int
    upload: str
    parts: tuple[str, ...]

    @property
    def digest(self) -> str:
        return content_hash(b"".join(bytes.fromhex(part) for part in self.parts)).hexdigest()

    def pack(self) -> bytes:
        return json.dumps({"format": _FORMAT, **asdict(self)}, separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, key: str, payload: memoryview) -> Marker:
        """Reads what `pack` wrote. Raises CorruptObjectError naming `key`."""
        try:
            fields = json.loads(bytes(payload))
            if fields.pop("format") != _FORMAT:
                raise ValueError("another format")
            marker = cls(**fields | {"kind": Kind(fields["kind"]), "parts": tuple(fields["parts"])})
            if len(marker.parts) != len(list(spans(marker.size_bytes, marker.part_bytes))):
                raise ValueError(f"{len(marker.parts)} parts for {marker.size_bytes} bytes")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptObjectError(f"{key}: not a marker: {error}") from error
        return marker


def part_name(key: str, upload: str, index: int) -> str:
    """Blob name of one part."""
    return f"{PARTS_FOLDER}/{key}/{upload}/{index:06d}"


def upload_of(name: str) -> tuple[str, str] | None:
    """(key, upload id) of a part's blob name; None for any other name."""
    folder, _, rest = name.partition("/")
    pieces = rest.rsplit("/", 2)
    return (pieces[0], pieces[1]) if folder == PARTS_FOLDER and len(pieces) == 3 else None


def spans(size_bytes: int, part_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of each part."""
    for start in range(0, size_bytes, part_bytes):
        yield start, min(start + part_bytes, size_bytes)


def cut(chunks: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """The views that make up bytes [start, stop) of the chunks' concatenation."""
    views, offset = [], 0
    for chunk in chunks:
        view = chunk[max(0, start - offset) : max(0, stop - offset)]
        if len(view):
            views.append(view)
        offset += len(chunk)
    return views
