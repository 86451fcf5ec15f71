"""Sockets: the only user of zmq."""
