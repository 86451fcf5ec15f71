"""The bound end of a wire. Owns a ROUTER socket, its peers' bounds and its refusals; never decides what a message means."""

from __future__ import annotations

import errno
import logging
import math
import time
from typing import Generic, TypeVar

import zmq
from zmq.auth.thread import ThreadAuthenticator

from spot_runtime.errors import InputError, PortInUseError, ProtocolError
from spot_runtime.messages import FRAME_BYTES_MAX, Codec, Message, Refused
from spot_runtime.transport.address import check_bind
from spot_runtime.transport.channel import QUEUE_MAX, RECEIVE_MAX, Channel, ZmqContext
from spot_runtime.transport.handshakes import Failure, Handshakes
from spot_runtime.transport.keys import AllowList, ServerKeys

M = TypeVar("M")

_LOG_EVERY_S = 1.0
_log = logging.getLogger(__name__)


class Router(Channel, Generic[M]):
    """Receives from many peers and sends to each by its identity. One thread at a time.

    A second peer with the identity of a first takes its place: a node that restarted before its old connection was found dead.

    Args:
        bind: `tcp://127.0.0.1:0` (a free port), `tcp://127.0.0.1:PORT`, `ipc://@NAME`.
        codec: decodes what peers may send.
        keys: CURVE; needed for any address but loopback and ipc. A peer whose key is not allowed, or that has none, is refused, counted and
            logged; `refused_peers` must be looked at now and then.
        receive_max: frames that one receive takes; fewer make for shorter turns.

    Raises:
        InputError: the address is malformed, not this machine's, or neither loopback nor ipc.
        PortInUseError: the address is taken.
    """

    def __init__(
        self,
        bind: str,
        codec: Codec[M],
        *,
        context: ZmqContext | None = None,
        queue_max: int = QUEUE_MAX,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        receive_max: int = RECEIVE_MAX,
        keys: ServerKeys | None = None,
    ) -> None:
        address = check_bind(bind, has_keys=keys is not None)
        super().__init__(zmq.ROUTER, address, context=context, queue_max=queue_max, frame_bytes_max=frame_bytes_max)
        self._codec = codec
        self._receive_max = receive_max
        self._allow_list: AllowList | None = None
        self._authenticator: ThreadAuthenticator | None = None
        self._handshakes: Handshakes | None = None
        self._keyless = 0
        self._keyless_logged_at_s = -math.inf
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if keys is not None:
            self._authenticate(keys)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(f"{bind} is taken: another process answers there") from error
            raise InputError(f"bind = {bind}: {error.strerror}") from error
        self.endpoint: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where peers connect: the address bound, with its real port."""

    @property
    def refused_peers(self) -> int:
        """Connections that never showed an allowed key: another one, none, or nothing at all."""
        if self._allow_list is None or self._handshakes is None:
            return 0
        failures = self._handshakes.failures()
        keyless = failures.total() - failures[Failure.NOT_ALLOWED]
        now_s = time.monotonic()
        if keyless > self._keyless and now_s - self._keyless_logged_at_s >= _LOG_EVERY_S:
            self._keyless_logged_at_s = now_s
            _log.warning("peer refused", extra={"reason": "no key was shown", "refused": keyless})
        self._keyless = keyless
        return self._allow_list.refused + keyless

    def close(self) -> None:
        if self._handshakes is not None:
            self._handshakes.close()
            self._handshakes = None
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        super().close()

    def _authenticate(self, keys: ServerKeys) -> None:
        """Before the bind. The authenticator's thread answers for every socket of this context."""
        self._allow_list = AllowList(keys.allowed)
        self._handshakes = Handshakes(self.socket)
        self._authenticator = ThreadAuthenticator(self.socket.context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", self._allow_list)
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public)

    def receive(self, timeout_s: float, limit: int = 0) -> list[tuple[bytes, M]]:
        """Waits up to `timeout_s` for the first frame and returns (peer, message) of those that are there, `limit` at most (0: what the
        Router was made with).

        A frame that cannot be read is counted, logged, answered with Refused where the peer takes an answer, and left out.
        """
        received: list[tuple[bytes, M]] = []
        for parts in self._frames(timeout_s, limit or self._receive_max):
            try:
                received.append((parts[0], self._read(self._codec, parts[1:])))
            except ProtocolError as error:
                self._count_refusal(parts[0].hex(), error)
                self.send(parts[0], Refused(error_class=type(error).__name__, error=str(error)))
        return received

    def send(self, peer: bytes, message: Message) -> bool:
        """Queues a message and says whether it was taken: not for an unknown or vanished peer, nor for one whose queue is full."""
        try:
            self.socket.send_multipart([peer, self._codec.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True
