"""The safetensors layout over numpy arrays, without copies. Owns bytes <-> arrays; never does I/O and never imports torch.

The safetensors package reads what this writes and the reverse. It is not used here because its numpy writer stores the bytes of a
non-contiguous array in the wrong order and orders metadata at random, so that equal content has no equal digest.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from spot_runtime.errors import CorruptObjectError, StoreError

HEADER_BYTES_MAX = 64 * 1024 * 1024
_LENGTH = struct.Struct("<Q")
PREFIX_BYTES = _LENGTH.size
_META = "__metadata__"
_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
    "C64": np.dtype("<c8"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def pack_tensors(tensors: Mapping[str, np.ndarray], meta: Mapping[str, str]) -> list[memoryview]:
    """Chunks whose concatenation is a safetensors file: one header, then a view of each array (copied only where not contiguous).

    Equal names, dtypes, shapes, values and meta give equal bytes, in whatever order they come. Raises StoreError for a dtype that
    safetensors or numpy lacks (bfloat16: store its uint16 view and note the dtype in `meta`).
    """
    header: dict[str, Any] = {_META: dict(sorted(meta.items()))} if meta else {}
    chunks: list[memoryview] = []
    offset = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        array, code = _plain(name, tensors[name])
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
        if array.nbytes:
            chunks.append(array.reshape(-1).view(np.uint8).data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [memoryview(_LENGTH.pack(len(text)) + text), *chunks]


def _plain(name: str, array: np.ndarray) -> tuple[np.ndarray, str]:
    little = array.dtype.newbyteorder("<")
    code = _CODES.get(little)
    if code is None or name == _META:
        raise StoreError(f"tensor {name!r} of dtype {array.dtype}: dtype must be one of {', '.join(_CODES.values())}")
    shape = array.shape  # ascontiguousarray makes a 0-d array 1-d
    return np.ascontiguousarray(array, dtype=little).reshape(shape), code


def header_bytes(owner: str, prefix: bytes) -> int:
    """Size of the header from a safetensors file's first PREFIX_BYTES, those included. Raises CorruptObjectError naming `owner`."""
    if len(prefix) != PREFIX_BYTES or (length := _LENGTH.unpack(prefix)[0]) > HEADER_BYTES_MAX:
        raise CorruptObjectError(f"{owner}: not in the safetensors layout: header of {prefix.hex()}")
    return int(PREFIX_BYTES + length)


def unpack_meta(owner: str, header: bytes) -> dict[str, str]:
    """The meta of a safetensors file from its header alone. Raises CorruptObjectError naming `owner`."""
    try:
        return _plain_meta(json.loads(header[PREFIX_BYTES:]).get(_META, {}))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptObjectError(f"{owner}: not in the safetensors layout: {error}") from error


def unpack_tensors(owner: str, payload: memoryview) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays (views of `payload`) and meta of a safetensors file. Raises CorruptObjectError naming `owner`."""
    try:
        (length,) = _LENGTH.unpack_from(payload)
        if length > min(HEADER_BYTES_MAX, len(payload) - _LENGTH.size):
            raise ValueError(f"header of {length} bytes")
        header = json.loads(bytes(payload[_LENGTH.size : _LENGTH.size + length]))
        meta = _plain_meta(header.pop(_META, {}))
        data = payload[_LENGTH.size + length :]
        return {name: _view(name, entry, data) for name, entry in header.items()}, meta
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise CorruptObjectError(f"{owner}: not in the safetensors layout: {error}") from error


def _plain_meta(meta: Mapping[str, str]) -> dict[str, str]:
    if not all(isinstance(value, str) for value in meta.values()):
        raise ValueError(f"{_META} must have texts only")
    return dict(meta)


def _view(name: str, entry: Mapping[str, Any], data: memoryview) -> np.ndarray:
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    count = math.prod(shape)
    if not 0 <= start <= stop <= len(data) or stop - start != count * dtype.itemsize:
        raise ValueError(f"tensor {name!r}: bytes {start}:{stop} of {len(data)} for {shape} {dtype}")
    return np.frombuffer(data[start:stop], dtype=dtype).reshape(shape)
