"""How connections fail before a message passes. Owns the reading of ZeroMQ's handshake events; never decides what follows from one."""

from __future__ import annotations

import struct
import uuid
from collections import Counter
from enum import StrEnum

import zmq

_EVENTS_MAX = 1000
_EVENT = struct.Struct("=Hi")
_OTHER_MECHANISM = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
_KINDS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Failure(StrEnum):
    """Why a handshake failed, as far as this end can tell."""

    NOT_ALLOWED = "not allowed"
    """The other end knows the key and does not want it."""
    ONE_SIDED = "one-sided"
    """One end has keys and the other has none."""
    UNREADABLE = "unreadable"
    """A frame of the handshake could not be decrypted, or was none."""
    BROKEN_OFF = "broken off"
    """The other end hung up without a word."""


class Handshakes:
    """Counts the failed handshakes of one socket, from its creation on; made before the socket binds or connects.

    To be looked at now and then: what is not read waits, `_EVENTS_MAX` at most, and then holds up the socket's handshakes.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._failures: Counter[Failure] = Counter()
        address = f"inproc://handshakes-{uuid.uuid4().hex}"
        socket.monitor(address, _KINDS | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._events: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.RCVHWM, _EVENTS_MAX)
        self._events.connect(address)
        self.succeeded = 0
        """Handshakes that went through."""

    def failures(self) -> Counter[Failure]:
        """All so far, by kind."""
        while True:
            try:
                head = self._events.recv_multipart(zmq.NOBLOCK)[0]
            except zmq.Again:
                return self._failures
            kind, value = _EVENT.unpack(head)
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.succeeded += 1
            else:
                self._failures[_failure(kind, value)] += 1

    def close(self) -> None:
        """Before the socket is closed."""
        self._socket.disable_monitor()
        self._events.close(linger=0)


def _failure(kind: int, value: int) -> Failure:
    if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Failure.NOT_ALLOWED
    if kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return Failure.BROKEN_OFF
    return Failure.ONE_SIDED if value == _OTHER_MECHANISM else Failure.UNREADABLE
