"""Sockets. The only user of ZeroMQ; never decides what a message means."""

from spot_runtime.transport.address import local_address
from spot_runtime.transport.channel import Channel
from spot_runtime.transport.dealer import Dealer
from spot_runtime.transport.keys import (
    ClientKeys,
    KeyPair,
    ServerKeys,
    new_pair,
    read_allowed,
    read_pair,
    read_public,
    write_pair,
)
from spot_runtime.transport.poller import Poller
from spot_runtime.transport.router import Router

__all__ = [
    "Channel",
    "ClientKeys",
    "Dealer",
    "KeyPair",
    "Poller",
    "Router",
    "ServerKeys",
    "local_address",
    "new_pair",
    "read_allowed",
    "read_pair",
    "read_public",
    "write_pair",
]
