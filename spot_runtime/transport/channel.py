"""A ZeroMQ socket with every bound set. Owns queue, size and heartbeat limits; never decides what a message means.

A channel may be used by one thread at a time: whoever hands it to another thread must stop using it first.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from typing import TypeVar

import zmq

from spot_runtime.errors import ProtocolError
from spot_runtime.messages import Codec

QUEUE_MAX = 4096
"""Messages that wait in one direction for one peer before a send is turned away."""
RECEIVE_MAX = 1024
"""Frames that one receive takes, so that a flood cannot keep its caller."""
OVERSIZE_MARGIN_BYTES = 64 * 1024
"""Frames above the bound by less than this are counted; a larger one costs its sender the connection."""

_HEARTBEAT_S = 2.0
_HEARTBEAT_TIMEOUT_S = 10.0
_HANDSHAKE_S = 5.0
_RECONNECT_S = 0.1
_RECONNECT_MAX_S = 2.0
_LOG_EVERY_S = 1.0

ZmqContext = zmq.Context[zmq.Socket[bytes]]

M = TypeVar("M")

_log = logging.getLogger(__name__)


class Channel:
    """Base of Router and Dealer.

    Args:
        kind: zmq.ROUTER or zmq.DEALER.
        context: shared by the caller; None: the channel has its own and ends it with itself.
        queue_max: bound of each queue, in messages a peer.
        frame_bytes_max: larger frames are refused.
        address: where it binds or connects. On one machine (ipc) nobody is taken for dead: a peer that was only stopped for a while still
            gets what it was sent, and the end of a process closes its connection anyway.
    """

    def __init__(
        self, kind: int, address: str, *, context: ZmqContext | None, queue_max: int, frame_bytes_max: int
    ) -> None:
        self.refused_frames = 0
        """Frames that could not be read since the channel was made."""
        self._frame_bytes_max = frame_bytes_max
        self._own_context = zmq.Context() if context is None else None
        self._logged_at_s = -math.inf
        self.socket: zmq.Socket[bytes] = (context or self._own_context or zmq.Context()).socket(kind)
        _set_bounds(self.socket, queue_max, frame_bytes_max)
        if not address.startswith("ipc://"):
            _set_heartbeat(self.socket)

    def close(self) -> None:
        """Closes at once: what is still queued is dropped. May be called again."""
        self.socket.close(linger=0)
        if self._own_context is not None:
            self._own_context.term()

    def _frames(self, timeout_s: float, limit: int) -> Iterator[list[bytes]]:
        """Waits up to `timeout_s` for the first message, then yields the parts of those that are there, `limit` at most."""
        if not self.socket.poll(math.ceil(max(timeout_s, 0.0) * 1000)):
            return
        for _ in range(limit):
            try:
                yield self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _read(self, codec: Codec[M], parts: list[bytes]) -> M:
        """The message of one frame. Raises ProtocolError, whatever the frame holds."""
        if len(parts) != 1:
            raise ProtocolError(f"message of {len(parts)} frames: must be 1")
        if len(parts[0]) > self._frame_bytes_max:
            raise ProtocolError(f"frame of {len(parts[0])} bytes: must be <= {self._frame_bytes_max}")
        return codec.decode(parts[0])

    def _count_refusal(self, peer: str, error: ProtocolError) -> None:
        """Counts a bad frame; logs it, one a second at most, because whoever sends one may send a million."""
        self.refused_frames += 1
        now_s = time.monotonic()
        if now_s - self._logged_at_s >= _LOG_EVERY_S:
            self._logged_at_s = now_s
            _log.warning("frame refused", extra={"peer": peer, "reason": str(error), "refused": self.refused_frames})


def _set_bounds(socket: zmq.Socket[bytes], queue_max: int, frame_bytes_max: int) -> None:
    values: dict[int, int] = {
        zmq.LINGER: 0,
        zmq.SNDHWM: queue_max,
        zmq.RCVHWM: queue_max,
        zmq.MAXMSGSIZE: frame_bytes_max + OVERSIZE_MARGIN_BYTES,
        zmq.HANDSHAKE_IVL: _milliseconds(_HANDSHAKE_S),
        zmq.CONNECT_TIMEOUT: _milliseconds(_HANDSHAKE_S),
        zmq.RECONNECT_IVL: _milliseconds(_RECONNECT_S),
        zmq.RECONNECT_IVL_MAX: _milliseconds(_RECONNECT_MAX_S),
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: 30,
        zmq.TCP_KEEPALIVE_INTVL: 10,
        zmq.TCP_KEEPALIVE_CNT: 3,
    }
    for option, value in values.items():
        socket.setsockopt(option, value)


def _set_heartbeat(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, _milliseconds(_HEARTBEAT_S))
    for option in (zmq.HEARTBEAT_TIMEOUT, zmq.HEARTBEAT_TTL):
        socket.setsockopt(option, _milliseconds(_HEARTBEAT_TIMEOUT_S))


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
