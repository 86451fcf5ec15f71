import json

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from spot_runtime.errors import CorruptObjectError
from spot_runtime.store.parts import Marker, cut, part_name, spans, upload_of
from spot_runtime.store.seal import Kind

MARKER = Marker(Kind.TENSORS, 25, 10, "0123456789abcdef", tuple(blake3(bytes([i])).hexdigest() for i in range(3)))


@given(st.lists(st.binary(max_size=30), max_size=6), st.integers(1, 20))
def test_cutting_at_part_bounds_loses_and_repeats_nothing(chunks, part_bytes):
    whole = b"".join(chunks)
    views = [memoryview(chunk) for chunk in chunks]
    bounds = list(spans(len(whole), part_bytes))
    assert [b"".join(cut(views, start, stop)) for start, stop in bounds] == [
        whole[start:stop] for start, stop in bounds
    ]
    assert b"".join(whole[start:stop] for start, stop in bounds) == whole
    assert all(0 < stop - start <= part_bytes for start, stop in bounds)


def test_a_marker_comes_back_and_its_digest_is_that_of_the_part_digests():
    assert Marker.unpack("k", memoryview(MARKER.pack())) == MARKER
    assert MARKER.digest == blake3(b"".join(bytes.fromhex(part) for part in MARKER.parts)).hexdigest()


def test_the_upload_id_does_not_enter_the_digest():
    other = Marker(MARKER.kind, MARKER.size_bytes, MARKER.part_bytes, "f" * 16, MARKER.parts)
    assert other.digest == MARKER.digest


@pytest.mark.parametrize(
    "change", [{"format": 2}, {"kind": 9}, {"parts": ["00"]}, {"size_bytes": 31}, {"extra": 1}, {"part_bytes": "10"}]
)
def test_a_marker_that_does_not_add_up_is_corrupt(change):
    fields = json.loads(MARKER.pack()) | change
    with pytest.raises(CorruptObjectError, match="k: not a marker"):
        Marker.unpack("k", memoryview(json.dumps(fields).encode()))


def test_a_part_knows_its_key_and_upload():
    assert upload_of(part_name("runs/a/policy", "0123456789abcdef", 7)) == ("runs/a/policy", "0123456789abcdef")
    assert upload_of("runs/a/policy.obj") is None
    assert upload_of(".parts/stray") is None
