"""Sockets. The only user of ZeroMQ; never decides what a message means."""

from spot_runtime.transport.address import local_address
from spot_runtime.transport.channel import Channel
from spot_runtime.transport.dealer import Dealer
from spot_runtime.transport.poller import Poller
from spot_runtime.transport.router import Router

__all__ = ["Channel", "Dealer", "Poller", "Router", "local_address"]
