"""Weights in memory that the processes of one machine share. Owns its layout and its seal; never says who may read or when.

The node makes it before any worker and hands its descriptor to each, as it does with the latent arena:

    fd = os.memfd_create("weights")                  # node, once; inherited by every worker
    SharedWeights(fd).publish(engine.weights)        # a worker that loaded from the model folder; later calls do nothing
    tensors, digest = SharedWeights(fd).read()       # a worker that comes later; raises UnseededError where nobody published
    weights.seed(tensors, digest)                    # checks, and computes with them as they lie: there is no copy

A reader's tensors are a private mapping: pages are shared until somebody writes to them, and a write is seen by nobody else. The memory has
no name and outlives the workers: it goes with the last process that holds the descriptor. On a GPU the same descriptor serves
`cuda_ipc.DeviceWeights`; `cuda_ipc.machine_weights` picks by device.

    [0:8] offset of the table, 0 until sealed   [8:72] digest   [128:offset] tensors, each at a multiple of 64   [offset:] table as JSON
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from torch import Tensor

from spot_runtime.errors import UnseededError
from spot_runtime.parallel.weights import Weights

_HEADER: Final = struct.Struct("<Q64s")
_ALIGNMENT: Final = 64
_FIRST: Final = 128


class SharedWeights:
    """One view of the shared memory behind `fd`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def is_sealed(self) -> bool:
        """Whether whole weights were published."""
        return self._header()[0] > 0

    def publish(self, weights: Weights) -> None:
        """Puts seeded weights down; what is sealed stays, and so does what another process is about to write.

        Raises UnseededError where `weights` are unseeded. A publisher that dies half-way leaves nothing: the next one begins anew.
        """
        tensors, digest = weights.tensors, weights.digest
        with sole_writer(self._fd) as is_mine:
            if is_mine and not self.is_sealed:
                self._write(tensors, digest)

    def read(self) -> tuple[dict[str, Tensor], str]:
        """Tensors as a private mapping and the digest that their publisher found. Raises UnseededError where nothing is sealed."""
        offset, digest = self._header()
        if not offset:
            raise UnseededError("shared weights are empty: no worker of this machine has published any")
        size = os.fstat(self._fd).st_size
        table = json.loads(os.pread(self._fd, size - offset, offset))
        memory = mmap.mmap(self._fd, offset, access=mmap.ACCESS_COPY)
        return {name: _view(memory, *entry) for name, entry in table.items()}, digest

    def _write(self, tensors: Mapping[str, Tensor], digest: str) -> None:
        table: dict[str, tuple[int, str, list[int]]] = {}
        end = _FIRST
        os.ftruncate(self._fd, 0)  # what a publisher that died has left
        for name, tensor in tensors.items():
            offset = -(-end // _ALIGNMENT) * _ALIGNMENT
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            write_all(self._fd, data, offset)
            table[name] = (offset, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            end = offset + data.nbytes
        write_all(self._fd, json.dumps(table).encode(), end)
        write_all(self._fd, _HEADER.pack(end, digest.encode()), 0)

    def _header(self) -> tuple[int, str]:
        header = os.pread(self._fd, _HEADER.size, 0)
        if len(header) < _HEADER.size:
            return 0, ""
        offset, digest = _HEADER.unpack(header)
        return offset, digest.decode()


@contextmanager
def sole_writer(fd: int) -> Iterator[bool]:
    """Whether this process alone may write to `fd` within. The kernel takes the lock back from a process that dies."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        yield False
        return
    try:
        yield True
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """All of `data`, for the kernel may take a part at a time."""
    left = memoryview(data).cast("B")
    while left:
        written = os.pwrite(fd, left, offset)
        left, offset = left[written:], offset + written


def _view(memory: mmap.mmap, offset: int, dtype: str, shape: list[int]) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    count = int(np.prod(shape, dtype=np.int64))
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=offset).view(shape)
