"""The connecting end of a wire. Owns a DEALER socket that finds its peer again by itself; never decides what a message means."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Generic, TypeVar

import zmq

from spot_runtime.errors import InputError, ProtocolError
from spot_runtime.messages import FRAME_BYTES_MAX, Codec, Message
from spot_runtime.transport.address import check_endpoint
from spot_runtime.transport.channel import QUEUE_MAX, RECEIVE_MAX, Channel, ZmqContext
from spot_runtime.transport.handshakes import Failure, Handshakes
from spot_runtime.transport.keys import ClientKeys

M = TypeVar("M")

_log = logging.getLogger(__name__)

_IDENTITY_BYTES_MAX = 255
_BROKEN_OFF_MAX = 4
"""Handshakes in a row that end without a word; fewer may be a peer that dies and comes back."""


class Dealer(Channel, Generic[M]):
    """Talks to one Router. One thread at a time.

    Nobody need answer yet: it connects in the background, and again whenever the connection breaks. Messages sent meanwhile wait, up to
    `queue_max`; those on the wire when it breaks are lost, so whoever needs an answer asks again.

    Args:
        endpoint: `tcp://HOST:PORT` or `ipc://@NAME`.
        codec: decodes what the peer may send.
        identity: the name the Router answers to, at most 255 bytes; two living Dealers must not share one.
        keys: CURVE, where the Router has keys.

    Raises:
        InputError: a malformed endpoint or identity.
    """

    def __init__(
        self,
        endpoint: str,
        codec: Codec[M],
        identity: str,
        *,
        context: ZmqContext | None = None,
        queue_max: int = QUEUE_MAX,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        keys: ClientKeys | None = None,
    ) -> None:
        check_endpoint(endpoint)
        name = identity.encode()
        if not 1 <= len(name) <= _IDENTITY_BYTES_MAX or name.startswith(b"\0"):
            raise InputError(
                f"identity = {identity!r}: must have 1 to {_IDENTITY_BYTES_MAX} bytes and not begin with zero"
            )
        super().__init__(zmq.DEALER, endpoint, context=context, queue_max=queue_max, frame_bytes_max=frame_bytes_max)
        self._codec = codec
        self.endpoint = endpoint
        self.socket.setsockopt(zmq.IDENTITY, name)
        self._has_keys = keys is not None
        self._refusal = ""
        self._handshakes: Handshakes | None = Handshakes(self.socket)
        if keys is not None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public)
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise InputError(f"endpoint = {endpoint}: {error.strerror}") from error

    def refusal(self) -> str:
        """Why the Router will never take this connection as it is, in words; "" where nothing says so."""
        if self._handshakes is not None:
            failures = self._handshakes.failures()
            if self._handshakes.succeeded:
                self._stop_watching()
            elif (found := _refusal(failures, has_keys=self._has_keys)) != self._refusal:
                self._refusal = found
                _log.warning("connection refused", extra={"peer": self.endpoint, "reason": found})
        return self._refusal

    def _stop_watching(self) -> None:
        """From the first handshake that went through, later ones fail with the connection, not for their keys."""
        if self._handshakes is not None:
            self._handshakes.close()
        self._handshakes, self._refusal = None, ""

    def close(self) -> None:
        """Closes at once: what is still queued is dropped. May be called again."""
        self._stop_watching()
        super().close()

    def receive(self, timeout_s: float, limit: int = RECEIVE_MAX) -> list[M]:
        """Waits up to `timeout_s` for the first frame and returns the messages that are there, `limit` at most.

        A frame that cannot be read is counted, logged and left out.
        """
        received: list[M] = []
        for parts in self._frames(timeout_s, limit):
            try:
                received.append(self._read(self._codec, parts))
            except ProtocolError as error:
                self._count_refusal(self.endpoint, error)
        return received

    def send(self, message: Message) -> bool:
        """Queues a message and says whether there was room."""
        if self._handshakes is not None:
            self.refusal()
        try:
            self.socket.send(self._codec.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


def _refusal(failures: Counter[Failure], *, has_keys: bool) -> str:
    if failures[Failure.NOT_ALLOWED]:
        return "it does not allow this key: its .public file must be in the folder of allowed keys there"
    if failures[Failure.ONE_SIDED]:
        return "it has no keys, so none may be shown to it" if has_keys else "it wants a key and none was shown"
    if failures[Failure.BROKEN_OFF] >= _BROKEN_OFF_MAX:
        question = "is its public key the one that was given?" if has_keys else "does it want a key, and is it control?"
        return f"it breaks off every handshake: {question}"
    return ""
