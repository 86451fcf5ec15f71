"""Kubernetes' notice: SIGTERM, then `terminationGracePeriodSeconds` until SIGKILL. Owns the signal's handler while it watches."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

from spot_runtime.preemption.notice import PreemptionNotice

_Handler = Callable[[int, FrameType | None], object] | int | None


class SigtermWatcher:
    """Takes SIGTERM as a notice. `start` and `stop` belong to the main thread.

    Args:
        grace_period_s: the pod's terminationGracePeriodSeconds.
    """

    def __init__(self, grace_period_s: float) -> None:
        assert grace_period_s >= 0, f"grace_period_s = {grace_period_s}: must be >= 0"
        self._notice = PreemptionNotice(grace_period_s, "sigterm")
        self._previous: _Handler = None
        self._watching = False
        self._delivered = False

    def start(self, deliver: Callable[[PreemptionNotice], object]) -> None:
        def handle(_number: int, _frame: FrameType | None) -> None:
            if not self._delivered:
                self._delivered = True
                deliver(self._notice)

        self._previous = signal.signal(signal.SIGTERM, handle)
        self._watching = True

    def stop(self) -> None:
        if self._watching:
            self._watching = False
            signal.signal(signal.SIGTERM, self._previous)
