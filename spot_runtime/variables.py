"""Environment variables that people set, and the one way each is read. Imports nothing heavy: `--help` needs their names."""

from __future__ import annotations

import os

ENDPOINT = "SPOTLIGHT_ENDPOINT"
TRACEBACK = "SPOTLIGHT_TRACEBACK"


def given_endpoint() -> str:
    """Where control answers, or "" where nothing is said."""
    return os.environ.get(ENDPOINT, "").strip()


def wants_traceback() -> bool:
    """Whether an error is shown in full too: anything but "" and 0 says yes."""
    return os.environ.get(TRACEBACK, "").strip() not in ("", "0")
