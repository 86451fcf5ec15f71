"""Loopback ports. Owns which one is taken next; never serves on it."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

from spot_runtime.errors import ClusterError, InputError, PortInUseError

HOST = "127.0.0.1"

_PORT_MIN = 20_000
_PORT_TRIES = 200
_RANGE_PATH = Path("/proc/sys/net/ipv4/ip_local_port_range")
_OUTGOING_PORT_MIN = 32_768


def listening_socket(host: str, port: int) -> socket.socket:
    """A listener that sends small answers at once. Raises PortInUseError for a taken port, InputError for a host that is not ours."""
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(f"{host}:{port} is taken: another process answers there") from error
        raise InputError(f"host = {host}, port = {port}: {error.strerror}") from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def free_port() -> int:
    """A port that nobody listens on, below those that the system hands to outgoing connections.

    Of those, one could be taken while its daemon restarts, by the very peers that try to reconnect to it.
    """
    entropy = random.SystemRandom()
    for _ in range(_PORT_TRIES):
        port = entropy.randrange(_PORT_MIN, outgoing_port_min())
        try:
            listening_socket(HOST, port).close()
        except PortInUseError:
            continue
        return port
    raise ClusterError(f"no free port found in {_PORT_TRIES} tries from {_PORT_MIN} up")


def outgoing_port_min() -> int:
    """The lowest port that the system gives to an outgoing connection."""
    try:
        lowest = int(_RANGE_PATH.read_text().split()[0])
    except OSError:
        lowest = _OUTGOING_PORT_MIN
    return max(lowest, _PORT_MIN + 1000)
