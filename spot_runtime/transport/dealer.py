"""The connecting end of a wire. Owns a DEALER socket that finds its peer again by itself; never decides what a message means."""

from __future__ import annotations

from typing import Generic, TypeVar

import zmq

from spot_runtime.errors import InputError, ProtocolError
from spot_runtime.messages import FRAME_BYTES_MAX, Codec, Message
from spot_runtime.transport.address import check_endpoint
from spot_runtime.transport.channel import QUEUE_MAX, RECEIVE_MAX, Channel, ZmqContext
from spot_runtime.transport.keys import ClientKeys

M = TypeVar("M")

_IDENTITY_BYTES_MAX = 255


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
        super().__init__(zmq.DEALER, context=context, queue_max=queue_max, frame_bytes_max=frame_bytes_max)
        self._codec = codec
        self.endpoint = endpoint
        self.socket.setsockopt(zmq.IDENTITY, name)
        if keys is not None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public)
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise InputError(f"endpoint = {endpoint}: {error.strerror}") from error

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
        try:
            self.socket.send(self._codec.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
