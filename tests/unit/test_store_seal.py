import hashlib
import struct

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from spot_runtime.errors import CorruptObjectError, ObjectFormatError
from spot_runtime.store.seal import PIECE_BYTES, SEAL_BYTES, Kind, Seal, SealedBody, open_sealed

GOLDEN = (
    "73706f746c69676874cc1f261e500a2d0ebea3894c11494d7eec94ddf02cb1187afb1aa2fce7088a190da3cfa5f8b7fae9def4d324da969d3a3c03b023082b97"
    "c8a840a19482c257600900000000000000010000000000000053504f54535452328a1cd19abdb54293ce073325c59cf9cb"
)
"""b"spotlight" sealed for "a/b"."""


def blob_of(owner: str, payload: bytes, kind: Kind = Kind.BYTES) -> bytes:
    return b"".join(SealedBody(owner, kind, [memoryview(payload)]).pieces())


@given(st.lists(st.binary(max_size=50), max_size=5), st.sampled_from(Kind))
def test_what_was_sealed_opens_to_the_same_bytes_and_digest(chunks, kind):
    payload = b"".join(chunks)
    body = SealedBody("a/b", kind, [memoryview(chunk) for chunk in chunks])
    blob = b"".join(body.pieces())
    seal = body.seal
    assert b"".join(body.pieces()) == blob
    assert seal == Seal(blake3(payload).hexdigest(), len(payload), kind)
    assert body.size_bytes == len(blob) == len(payload) + SEAL_BYTES
    opened, content = open_sealed("a/b", memoryview(blob))
    assert (opened, bytes(content)) == (seal, payload)


@given(st.binary(max_size=40), st.data())
def test_every_single_flipped_bit_is_seen(payload, data):
    blob = bytearray(blob_of("k", payload))
    bit = data.draw(st.integers(0, len(blob) * 8 - 1))
    blob[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptObjectError, match="k: "):
        open_sealed("k", memoryview(blob))


@given(st.binary(max_size=300), st.data())
def test_every_truncation_and_every_addition_is_seen(payload, data):
    blob = blob_of("k", payload)
    torn = blob[: data.draw(st.integers(0, len(blob) - 1))]
    with pytest.raises(CorruptObjectError):
        open_sealed("k", memoryview(torn))
    with pytest.raises(CorruptObjectError):
        open_sealed("k", memoryview(b"\0" + blob))
    with pytest.raises(CorruptObjectError):
        open_sealed("k", memoryview(blob + b"\0"))


def test_zeros_in_place_of_a_blob_are_seen():
    with pytest.raises(CorruptObjectError, match="no intact seal"):
        open_sealed("k", memoryview(bytes(5000)))


def test_a_blob_that_was_copied_to_another_key_is_foreign():
    with pytest.raises(CorruptObjectError, match="b: sealed under another key: foreign"):
        open_sealed("b", memoryview(blob_of("a", b"payload")))


def test_a_blob_is_these_bytes():
    assert blob_of("a/b", b"spotlight").hex() == GOLDEN


def test_a_payload_of_several_pieces_has_the_digest_of_its_bytes():
    payload = bytes(range(256)) * (PIECE_BYTES // 256) * 2 + b"and a bit"
    body = SealedBody("k", Kind.PART, [memoryview(payload)])
    assert len(list(body.pieces())) == 4
    assert body.seal.digest == blake3(payload).hexdigest()


def test_a_blob_of_the_format_before_is_refused_by_its_name():
    """SHA-256 all over, as SPOTSTR1 was: whole, so it is not replaced as a corrupt object would be."""
    fields = struct.pack(
        "<32s32sQB7x8s", hashlib.sha256(b"old").digest(), hashlib.sha256(b"k").digest(), 3, Kind.BYTES, b"SPOTSTR1"
    )
    blob = b"old" + fields + hashlib.sha256(fields).digest()[:16]
    with pytest.raises(ObjectFormatError) as refused:
        open_sealed("k", memoryview(blob))
    assert str(refused.value) == "k: seal of format b'SPOTSTR1', must be b'SPOTSTR2': of another version"
