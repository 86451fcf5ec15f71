import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot_runtime.errors import CorruptObjectError
from spot_runtime.store.seal import SEAL_BYTES, Kind, Seal, SealedBody, open_sealed


def blob_of(owner: str, payload: bytes, kind: Kind = Kind.BYTES) -> bytes:
    return b"".join(SealedBody(owner, kind, [memoryview(payload)]).pieces())


@given(st.lists(st.binary(max_size=50), max_size=5), st.sampled_from(Kind))
def test_what_was_sealed_opens_to_the_same_bytes_and_digest(chunks, kind):
    payload = b"".join(chunks)
    body = SealedBody("a/b", kind, [memoryview(chunk) for chunk in chunks])
    blob = b"".join(body.pieces())
    seal = body.seal
    assert b"".join(body.pieces()) == blob
    assert seal == Seal(hashlib.sha256(payload).hexdigest(), len(payload), kind)
    assert body.size_bytes == len(blob) == len(payload) + SEAL_BYTES
    assert body.sha256 == hashlib.sha256(blob).digest()
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
