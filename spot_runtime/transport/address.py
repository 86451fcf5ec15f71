"""Addresses to bind and connect. Owns which are allowed without keys and how they are written; never opens a ZeroMQ socket."""

from __future__ import annotations

import ipaddress
import re
import socket
import sys
import uuid
from pathlib import Path

from spot_runtime.errors import InputError, PortInUseError

_TCP = re.compile(r"^tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[^:/\[\]]+):(?P<port>\d{1,5}|\*)$")


def local_address(name: str) -> str:
    """A fresh address that only this machine can reach and that leaves no file behind: what a node binds for its workers."""
    if sys.platform == "linux":
        return f"ipc://@spotlight-{name}-{uuid.uuid4().hex[:12]}"
    return "tcp://127.0.0.1:0"


def check_bind(address: str) -> str:
    """The address as ZeroMQ binds it. Raises InputError unless it is loopback or ipc: elsewhere peers are not authenticated."""
    if address.startswith("ipc://") and len(address) > len("ipc://"):
        _check_socket_file(address)
        return address
    host, port = _tcp_parts("bind", address)
    if not _is_loopback(host):
        raise InputError(f"bind = {address}: must be a loopback or ipc address: peers elsewhere are not authenticated")
    return f"tcp://{host}:{'*' if port == 0 else port}"


def check_endpoint(address: str) -> str:
    """An address that can be connected to. Raises InputError."""
    if address.startswith("ipc://") and len(address) > len("ipc://"):
        return address
    _, port = _tcp_parts("endpoint", address)
    if port == 0:
        raise InputError(f"endpoint = {address}: must name a port between 1 and 65535")
    return address


def _tcp_parts(field: str, address: str) -> tuple[str, int]:
    match = _TCP.match(address)
    if match is None:
        raise InputError(f"{field} = {address!r}: must look like tcp://HOST:PORT or ipc://NAME")
    port = 0 if match["port"] == "*" else int(match["port"])
    if port > 65535:
        raise InputError(f"{field} = {address}: must name a port <= 65535")
    return match["host"], port


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _check_socket_file(address: str) -> None:
    """ZeroMQ unlinks an existing socket file before it binds and so would take a live one over."""
    path = Path(address.removeprefix("ipc://"))
    if str(path).startswith("@") or not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        if probe.connect_ex(str(path)) == 0:
            raise PortInUseError(f"{address} is taken: another process answers there")
