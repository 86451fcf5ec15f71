"""Time that goes on across restarts and never runs backwards within one process."""

from __future__ import annotations

import time


class Clock:
    """Wall-clock seconds since the epoch at the start, then the monotonic clock: a wall clock that is set back cannot move a deadline."""

    def __init__(self) -> None:
        self._base_s = time.time() - time.monotonic()

    def now_s(self) -> float:
        return self._base_s + time.monotonic()
