"""Keeps the blocks of a transformer in host memory, for a GPU that cannot hold all. Owns where their parameters lie; never computes.

A block comes to the device just before its forward, on a stream of its own while the block before it computes, and its copy there is given
up after it: the device holds two blocks. The host's copies are pinned, because unpinned memory travels at a tenth of the speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


class BlockOffload:
    """Of `blocks` that compute on `device`, in this order. Off at first."""

    def __init__(self, blocks: nn.ModuleList, device: torch.device) -> None:
        self._blocks = list(blocks)
        self._device = device
        self._hooks: list[Any] = []
        self._stream: Any = None
        self._on_device: dict[int, list[tuple[nn.Parameter, Tensor]]] = {}

    @property
    def is_on(self) -> bool:
        return bool(self._hooks)

    def turn_on(self) -> None:
        """Moves the parameters to the host."""
        if self.is_on:
            return
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for parameter in self._parameters():
            parameter.data = self._on_host(parameter.data)
        for place, block in enumerate(self._blocks):
            self._hooks.append(block.register_forward_pre_hook(lambda *_, place=place: self._enter(place)))
            self._hooks.append(block.register_forward_hook(lambda *_, place=place: self._leave(place)))

    def turn_off(self) -> None:
        """Moves the parameters to the device again, for good."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.settle()
        for parameter in self._parameters():
            parameter.data = parameter.data.to(self._device)

    def settle(self) -> None:
        """Gives up what a forward that did not end left on the device."""
        for place in list(self._on_device):
            self._leave(place)

    def _enter(self, place: int) -> None:
        if place not in self._on_device:
            self._fetch(place)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        if place + 1 < len(self._blocks):
            self._fetch(place + 1)

    def _leave(self, place: int) -> None:
        for parameter, host in self._on_device.pop(place, []):
            if self._stream is not None:
                parameter.data.record_stream(
                    torch.cuda.current_stream(self._device)
                )  # its memory is free after this block
            parameter.data = host

    def _fetch(self, place: int) -> None:
        moved = [(parameter, parameter.data) for parameter in self._blocks[place].parameters()]
        with self._copying():
            for parameter, host in moved:
                parameter.data = host.to(self._device, non_blocking=True)
        self._on_device[place] = moved

    def _copying(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _on_host(self, data: Tensor) -> Tensor:
        host = torch.empty(data.shape, dtype=data.dtype, pin_memory=self._device.type == "cuda")
        return host.copy_(data)

    def _parameters(self) -> Iterator[nn.Parameter]:
        for block in self._blocks:
            yield from block.parameters()
