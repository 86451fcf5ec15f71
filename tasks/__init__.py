"""Flyte tasks: unpack, call once, return."""
