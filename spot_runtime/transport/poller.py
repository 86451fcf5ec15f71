"""Waits for several channels and file descriptors at once. Owns the registration; never reads from any of them."""

from __future__ import annotations

import math

import zmq

from spot_runtime.transport.channel import Channel


class Poller:
    """Level-triggered: what was not drained is ready again. One thread at a time."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._sources: dict[zmq.Socket[bytes] | int, Channel | int] = {}

    def add(self, source: Channel | int) -> None:
        """Watches a channel, or a file descriptor, for something to read."""
        key = _key(source)
        self._sources[key] = source
        self._poller.register(key, zmq.POLLIN)

    def remove(self, source: Channel | int) -> None:
        key = _key(source)
        del self._sources[key]
        self._poller.unregister(key)

    def ready(self, timeout_s: float) -> list[Channel | int]:
        """The sources that have something to read, after `timeout_s` at the latest."""
        return [self._sources[key] for key, _ in self._poller.poll(math.ceil(max(timeout_s, 0.0) * 1000))]


def _key(source: Channel | int) -> zmq.Socket[bytes] | int:
    return source if isinstance(source, int) else source.socket
