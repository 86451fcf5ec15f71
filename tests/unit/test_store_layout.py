import json
import struct

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from spot_runtime.errors import CorruptObjectError, StoreError
from spot_runtime.store.layout import pack_tensors, unpack_tensors

DTYPES = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?", "c8", ">f4", ">i8"]
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(np.dtype(dtype), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)


def pack(tensors, meta=None) -> bytes:
    return b"".join(pack_tensors(tensors, meta or {}))


@settings(max_examples=40)
@given(
    st.dictionaries(st.text(min_size=1, max_size=8), arrays, max_size=4),
    st.dictionaries(st.text(), st.text(), max_size=3),
)
def test_arrays_come_back_with_shape_type_and_every_bit(tensors, meta):
    found, found_meta = unpack_tensors("k", memoryview(pack(tensors, meta)))
    assert found_meta == meta
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        assert found[name].shape == array.shape
        assert found[name].dtype == array.dtype.newbyteorder("=")
        assert found[name].tobytes() == array.astype(array.dtype.newbyteorder("=")).tobytes()


def test_the_safetensors_package_reads_what_is_packed_and_the_reverse():
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([True, False]),
        "c": np.array(7),
    }
    theirs = safetensors.numpy.load(pack(tensors, {"policy": "3"}))
    ours, meta = unpack_tensors("k", memoryview(safetensors.numpy.save(tensors, {"policy": "3"})))
    assert meta == {"policy": "3"}
    for name, array in tensors.items():
        np.testing.assert_array_equal(theirs[name], array)
        np.testing.assert_array_equal(ours[name], array)


def test_a_transposed_or_strided_array_is_stored_by_value():
    array = np.arange(12).reshape(3, 4)
    found, _ = unpack_tensors("k", memoryview(pack({"t": array.T, "s": array[:, ::2]})))
    np.testing.assert_array_equal(found["t"], array.T)
    np.testing.assert_array_equal(found["s"], array[:, ::2])


def test_equal_content_has_equal_bytes_in_whatever_order_it_comes():
    one, two = np.ones(3), np.zeros(2, np.uint8)
    assert pack({"a": one, "b": two}, {"x": "1", "y": "2"}) == pack({"b": two, "a": one}, {"y": "2", "x": "1"})


@pytest.mark.parametrize(
    "array", [np.array(["x"]), np.array([None]), np.zeros(2, "f4,i4"), np.zeros(2, "c16"), np.zeros(1, "M8[s]")]
)
def test_a_type_without_a_place_in_the_layout_is_refused_by_name(array):
    with pytest.raises(StoreError, match=r"tensor 'latents' of dtype .*: dtype must be one of F64, F32"):
        pack({"latents": array})


def test_the_metadata_name_is_no_tensor_name():
    with pytest.raises(StoreError, match="__metadata__"):
        pack({"__metadata__": np.zeros(1)})


def layout(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"short",
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        struct.pack("<Q", 4) + b"nope",
        layout([1, 2]),
        layout({"__metadata__": 5}),
        layout({"__metadata__": {"version": 5}}),
        struct.pack("<Q", 200_000) + b"[" * 200_000,
        layout({"a": 3}),
        layout({"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}, b"xx"),
        layout({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"xxxx"),
        layout({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"xx"),
        layout({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, b"xxxx"),
        layout({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, b"xxxx"),
        layout({"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}, b"xxxx"),
        layout({"a": {"dtype": "F32", "shape": [1]}}, b"xxxx"),
    ],
)
def test_bytes_that_are_no_tensor_file_are_corrupt(payload):
    with pytest.raises(CorruptObjectError, match="k: not in the safetensors layout"):
        unpack_tensors("k", memoryview(payload))
