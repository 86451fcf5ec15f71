"""Weights in the memory of GPUs, for the other workers of their machine. Owns how their handles travel; never keeps a peer's memory.

The same use and the same descriptor as `SharedWeights`, with one difference: weights live as long as their publisher does. So every seeded
worker puts its handles down, beside those of the others that live. A reader copies the first of them into its own GPU's memory, and the
digest of the copy is checked. Where no publisher lives nothing can be read.

    [0:8] bytes of the table, 0 while it is written   [8:] JSON: for each publisher its process, digest, and for each tensor dtype, shape,
    stride, offset and handle
"""

from __future__ import annotations

import base64
import json
import os
import struct
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from spot_runtime.errors import UnseededError
from spot_runtime.parallel.shared import SharedWeights, sole_writer, write_all
from spot_runtime.parallel.weights import Weights

_HEADER: Final = struct.Struct("<Q")
WRITE_DEADLINE_S: Final = 10.0
POLL_S: Final = 0.01


class DeviceWeights:
    """The handles behind `fd`, as a worker on `device` sees them."""

    def __init__(self, fd: int, device: torch.device) -> None:
        self._fd = fd
        self._device = device

    def publish(self, weights: Weights) -> None:
        """Puts the handles of seeded weights down in place of those of workers that are gone.

        Raises UnseededError where `weights` are unseeded. The memory behind them must stay for as long as this process lives. Where others
        write for longer than WRITE_DEADLINE_S it gives up: a worker that comes later takes the weights of one of them.
        """
        tensors = {name: _handle(tensor) for name, tensor in weights.tensors.items()}
        mine = {"process": _process(os.getpid()), "digest": weights.digest, "tensors": tensors}
        deadline_s = time.monotonic() + WRITE_DEADLINE_S
        while time.monotonic() < deadline_s:
            with sole_writer(self._fd) as is_mine:
                if is_mine:
                    self._write([*self._living(), mine])
                    return
            time.sleep(POLL_S)

    def read(self) -> tuple[dict[str, Tensor], str]:
        """Copies on this device and the digest that their publisher found. Raises UnseededError where no living worker has published."""
        for entry in self._living():
            try:
                torch.cuda.init()  # type: ignore[no-untyped-call]
                copies = {name: _open(of_it).to(self._device, copy=True) for name, of_it in entry["tensors"].items()}
                torch.cuda.synchronize(self._device)
            except RuntimeError as error:
                raise UnseededError(f"device weights of {entry['process']} cannot be opened: {error}") from error
            return copies, entry["digest"]
        raise UnseededError("device weights are empty: no living worker of this machine has published any")

    def _living(self) -> list[dict[str, Any]]:
        """What living workers have published, the first to do so first."""
        header = os.pread(self._fd, _HEADER.size, 0)
        size = _HEADER.unpack(header)[0] if len(header) == _HEADER.size else 0
        try:
            table: list[dict[str, Any]] = json.loads(os.pread(self._fd, size, _HEADER.size)) if size else []
        except ValueError:  # another process writes just now
            return []
        return [entry for entry in table if entry["process"] == _process(int(entry["process"].split()[0]))]

    def _write(self, entries: list[dict[str, Any]]) -> None:
        table = json.dumps(entries).encode()
        write_all(self._fd, _HEADER.pack(0), 0)
        write_all(self._fd, table, _HEADER.size)
        write_all(self._fd, _HEADER.pack(len(table)), 0)


def machine_weights(fd: int, device: torch.device, *, stay: bool = True) -> SharedWeights | DeviceWeights:
    """The weights that workers of this machine give each other behind `fd`; all of them ask in the same way.

    `stay`: a worker's weights lie in one place for as long as it lives. Those that move to the host between denoising steps do not, and are
    given on through the host's memory.
    """
    return DeviceWeights(fd, device) if stay and device.type == "cuda" else SharedWeights(fd)


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


def _process(pid: int) -> str:
    """Names a process for good: pids are used again, but not with the same start. Empty where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    state, started = fields[0], fields[19]
    return "" if state in "ZX" else f"{pid} {started}"
