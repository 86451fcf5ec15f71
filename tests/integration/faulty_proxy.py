"""A TCP proxy on loopback that misbehaves on demand, one HTTP request at a time. Owns faults; never knows what S3 is."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from enum import StrEnum

_METHODS = (b"GET ", b"PUT ", b"HEAD ", b"POST ", b"DELETE ")
_SLOW_S = 0.3


class Fault(StrEnum):
    """What happens to one request."""

    NONE = "none"
    RESET = "reset"
    """The connection closes before the server has seen the request."""
    UNAVAILABLE = "unavailable"
    """503, and the server has not seen the request."""
    BROKEN = "broken"
    """500, and the server has not seen the request."""
    STALL = "stall"
    """No answer, ever."""
    LOSE_ANSWER = "lose_answer"
    """The server does it; its answer never arrives."""
    CUT = "cut"
    """The answer ends in the middle."""
    HANG = "hang"
    """The answer stops in the middle, and the connection stays open."""
    FLIP = "flip"
    """The last byte of the first piece of the answer has one bit flipped."""
    SLOW = "slow"
    """Every piece of the answer comes late."""


class FaultyProxy:
    """Relays to `port`. `plan(method, path)` says what happens to each request; set it at any time."""

    def __init__(self, port: int) -> None:
        self.plan: Callable[[str, str], Fault] = lambda method, path: Fault.NONE
        self.requests = 0
        self._upstream_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._closed = threading.Event()
        threading.Thread(target=self._accept, daemon=True, name="faulty-proxy").start()

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._closed.set()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(
                    target=self._serve, args=(client,), daemon=True, name="faulty-proxy-connection"
                ).start()

    def _serve(self, client: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            client,
            socket.create_connection(("127.0.0.1", self._upstream_port), 5) as server,
        ):
            fault = Fault.NONE
            while not self._closed.is_set():
                ready, _, _ = select.select([client, server], [], [], 0.2)
                if client in ready:
                    data = client.recv(1 << 16)
                    if data.startswith(_METHODS):
                        self.requests += 1
                        method, path = data.split(b" ", 2)[:2]
                        fault = self.plan(method.decode(), path.decode())
                    if not data or not self._forward(data, client, server, fault):
                        return
                if server in ready:
                    data = server.recv(1 << 16)
                    if not data or not _answer(data, client, fault):
                        if fault is Fault.HANG:
                            self._closed.wait(60)
                        return

    def _forward(self, data: bytes, client: socket.socket, server: socket.socket, fault: Fault) -> bool:
        if fault is Fault.RESET:
            return False
        if fault in (Fault.UNAVAILABLE, Fault.BROKEN):
            status = b"503 Slow Down" if fault is Fault.UNAVAILABLE else b"500 Internal Server Error"
            client.sendall(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return False
        if fault is Fault.STALL:
            self._closed.wait(60)
            return False
        server.sendall(data)
        return True


def _answer(data: bytes, client: socket.socket, fault: Fault) -> bool:
    if data.startswith(b"HTTP/1.1 100"):
        client.sendall(data)
        return True
    if fault is Fault.LOSE_ANSWER:
        return False
    if fault in (Fault.CUT, Fault.HANG):
        client.sendall(data[: len(data) - 10])
        return False
    if fault is Fault.SLOW:
        time.sleep(_SLOW_S)
    client.sendall(data[:-1] + bytes([data[-1] ^ 4]) if fault is Fault.FLIP else data)
    return True
