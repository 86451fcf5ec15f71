"""Weights in the memory of a GPU, for the other workers of its machine. Owns how their handles travel; never keeps a peer's memory.

The same use and the same descriptor as `SharedWeights`, with one difference: they live as long as their publisher does. A reader copies
them into its own GPU's memory while the publisher lives, and checks the digest of the copy. Where the publisher is gone nothing can be
read, and the next seeded worker that publishes takes its place.

    [0:8] bytes of the table, 0 until sealed   [8:] JSON: pid of the publisher, digest, and for each tensor dtype, shape, stride and handle
"""

from __future__ import annotations

import base64
import json
import os
import struct
from typing import Any, Final

import torch
from torch import Tensor

from spot_runtime.errors import UnseededError
from spot_runtime.parallel.shared import SharedWeights, sole_writer, write_all
from spot_runtime.parallel.weights import Weights

_HEADER: Final = struct.Struct("<Q")


class DeviceWeights:
    """The handles behind `fd`, as a worker on `device` sees them."""

    def __init__(self, fd: int, device: torch.device) -> None:
        self._fd = fd
        self._device = device

    def publish(self, weights: Weights) -> None:
        """Puts the handles of seeded weights down, unless those of another living process are there.

        Raises UnseededError where `weights` are unseeded. The memory behind them must stay for as long as this process lives.
        """
        tensors = {name: _handle(tensor) for name, tensor in weights.tensors.items()}
        table = json.dumps({"pid": os.getpid(), "digest": weights.digest, "tensors": tensors}).encode()
        with sole_writer(self._fd) as is_mine:
            if is_mine and not _lives(self._table().get("pid", 0)):
                write_all(self._fd, _HEADER.pack(0), 0)
                write_all(self._fd, table, _HEADER.size)
                write_all(self._fd, _HEADER.pack(len(table)), 0)

    def read(self) -> tuple[dict[str, Tensor], str]:
        """Copies on this device and the digest that their publisher found. Raises UnseededError where no living worker has published."""
        table = self._table()
        if not _lives(table.get("pid", 0)):
            raise UnseededError("device weights are empty: no living worker of this machine has published any")
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            copies = {name: _open(entry).to(self._device, copy=True) for name, entry in table["tensors"].items()}
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise UnseededError(f"device weights of process {table['pid']} cannot be opened: {error}") from error
        return copies, table["digest"]

    def _table(self) -> dict[str, Any]:
        header = os.pread(self._fd, _HEADER.size, 0)
        size = _HEADER.unpack(header)[0] if len(header) == _HEADER.size else 0
        try:
            table: dict[str, Any] = json.loads(os.pread(self._fd, size, _HEADER.size)) if size else {}
        except ValueError:  # another process writes just now
            return {}
        return table


def machine_weights(fd: int, device: torch.device) -> SharedWeights | DeviceWeights:
    """The weights that workers of this machine give each other behind `fd`."""
    return DeviceWeights(fd, device) if device.type == "cuda" else SharedWeights(fd)


def _handle(tensor: Tensor) -> list[Any]:
    """What another process needs to open it; bytes as base64."""
    shared: Any = tensor.untyped_storage()
    handle = [_text(part) for part in shared._share_cuda_()]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [dtype, list(tensor.shape), list(tensor.stride()), tensor.storage_offset(), handle]


def _open(entry: list[Any]) -> Tensor:
    """A view of the publisher's memory; it must not outlive the copy that is made of it."""
    dtype, shape, stride, offset, handle = entry
    kind: Any = torch.UntypedStorage
    storage = kind._new_shared_cuda(*(_bytes(part) for part in handle))
    view: Tensor = torch.empty(0, dtype=getattr(torch, dtype), device=storage.device)
    return view.set_(storage, offset, shape, stride)


def _text(part: Any) -> Any:
    return {"base64": base64.b64encode(part).decode()} if isinstance(part, bytes) else part


def _bytes(part: Any) -> Any:
    return base64.b64decode(part["base64"]) if isinstance(part, dict) else part


def _lives(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
