"""Weights that leave a device and come back. Owns the check that they came back as they went; never decides when.

A model that shares its device with another gives the memory back while the other one works. What wakes up is compared with what fell
asleep, by sums over the bits of each tensor, on the device and so at its memory's speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from spot_runtime.errors import PolicyMismatchError

Fingerprint = dict[str, tuple[int, int]]


class Sleeper:
    """A model and the device that it computes on. What woke up otherwise than it fell asleep never computes again."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._asleep: Fingerprint | None = None

    @property
    def is_asleep(self) -> bool:
        return self._asleep is not None

    def sleep(self) -> None:
        """Moves all weights to the host and gives their memory back. Asleep already is no error."""
        if self._asleep is None:
            self._asleep = fingerprint(self._model)
            self._model.to("cpu")
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def wake(self) -> None:
        """Moves them back. Raises PolicyMismatchError that names the first tensor which is not what it was; awake already is no error."""
        if self._asleep is None:
            return
        before = self._asleep
        self._model.to(self._device)
        after = fingerprint(self._model)
        odd = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        if odd:
            raise PolicyMismatchError(f"{len(odd)} tensors woke up other than they fell asleep, the first {odd[0]}")
        self._asleep = None


def fingerprint(model: nn.Module) -> Fingerprint:
    """Two sums over the bits of each parameter and buffer: of all its words, and of every other one."""
    return {name: _sums(tensor) for name, tensor in _tensors(model)}


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def _sums(tensor: Tensor) -> tuple[int, int]:
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.detach().contiguous()
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    bits = flat.flatten().view(words if not tensor.is_complex() else torch.int32)
    return int(bits.sum(dtype=torch.int64)), int(bits[::2].sum(dtype=torch.int64))
