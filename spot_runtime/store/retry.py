"""Retries with back-off inside one deadline. Owns when to try again; never knows what is tried."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_DOUBLINGS_MAX = 30


class TransientError(Exception):
    """This try failed in a way that the next may not. `str` is the reason."""


class ExhaustedError(Exception):
    """Every try that the deadline allowed has failed. `str` says what was tried and why the last try failed."""


@dataclass(frozen=True)
class Retry:
    """How patient a request is.

    A try may take half of the time that is left, so that a hung one leaves room for others, and the last quarter whole; between
    tries the pause doubles from `backoff_first_s` to `backoff_max_s`, times a random factor in [.5, 1] so that clients that failed
    together do not return together. No pause takes more than half of what is left, so that the last try comes late.
    """

    deadline_s: float
    backoff_first_s: float = 0.05
    backoff_max_s: float = 2.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def run(self, what: str, attempt: Callable[[float], T]) -> T:
        """Calls `attempt(timeout_s)` until it returns. Its TransientError leads to another try, anything else goes through.

        Raises ExhaustedError naming `what`, the tries and the last reason.
        """
        start_s = self.clock()
        reason, attempts = "", 0
        while (left_s := start_s + self.deadline_s - self.clock()) > 0:
            attempts += 1
            try:
                return attempt(left_s if left_s <= self.deadline_s / 4 else left_s / 2)
            except TransientError as error:
                reason = str(error)
            left_s = start_s + self.deadline_s - self.clock()
            if left_s <= self.backoff_first_s:
                break
            pause_s = min(self.backoff_max_s, self.backoff_first_s * 2 ** min(attempts - 1, _DOUBLINGS_MAX))
            self.sleep(min(pause_s * random.uniform(0.5, 1), left_s / 2))
        raise ExhaustedError(
            f"{what}: {attempts} attempts in {self.clock() - start_s:.1f} s failed, the last with: {reason}"
        )
