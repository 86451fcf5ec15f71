"""Addresses to bind and connect. Owns which are allowed without keys and how they are written; never opens a ZeroMQ socket."""

from __future__ import annotations

import ipaddress
import re
import sys
import uuid

from spot_runtime.errors import InputError

_ABSTRACT = re.compile(r"^ipc://@[^\s@]+$")  # not a file: that would outlive a killed process
_TCP = re.compile(r"^tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[^:/\[\]]+):(?P<port>\d{1,5}|\*)$")


def local_address(name: str) -> str:
    """A fresh address that only this machine can reach and that leaves no file behind: what a node binds for its workers."""
    if sys.platform == "linux":
        return f"ipc://@spotlight-{name}-{uuid.uuid4().hex[:12]}"
    return "tcp://127.0.0.1:0"


def check_bind(address: str, *, has_keys: bool = False) -> str:
    """The address as ZeroMQ binds it. Raises InputError unless it is loopback or ipc: elsewhere peers need keys."""
    if _ABSTRACT.match(address):
        return address
    host, port = _tcp_parts("bind", address)
    if not has_keys and not _is_loopback(host):
        raise InputError(
            f"bind = {address}: must be a loopback or ipc address: peers elsewhere are not authenticated without keys"
        )
    return f"tcp://{host}:{'*' if port == 0 else port}"


def check_endpoint(address: str) -> str:
    """An address that can be connected to. Raises InputError."""
    if _ABSTRACT.match(address):
        return address
    _, port = _tcp_parts("endpoint", address)
    if port == 0:
        raise InputError(f"endpoint = {address}: must name a port between 1 and 65535")
    return address


def _tcp_parts(field: str, address: str) -> tuple[str, int]:
    match = _TCP.match(address)
    if match is None:
        raise InputError(f"{field} = {address!r}: must look like tcp://HOST:PORT or ipc://@NAME")
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
