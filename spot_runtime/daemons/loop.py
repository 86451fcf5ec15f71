"""The one thread of a daemon. Owns waiting: for sockets, timers and the results of blocking calls; never decides anything.

Everything but `post` belongs to the thread that runs the loop. In one turn: messages, then posted calls and results, then timers.
"""

from __future__ import annotations

import heapq
import itertools
import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, TypeVarTuple

from spot_runtime.errors import ClusterError
from spot_runtime.transport import Channel, Poller

R = TypeVar("R")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CALLS_MAX = 4096
"""Blocking calls that run or wait at one time."""


class Source(Protocol[T]):
    """A Router, a Dealer: what is received from one readiness comes as one list."""

    def receive(self, timeout_s: float) -> list[T]: ...


@dataclass(order=True)
class Timer:
    """A call to come; `cancel` keeps it from coming."""

    due_s: float
    order: int
    run: Callable[[], object] = field(compare=False)
    period_s: float = field(compare=False, default=0.0)
    """0: once."""
    cancelled: bool = field(compare=False, default=False)

    def cancel(self) -> None:
        self.cancelled = True


class EventLoop:
    """Messages, timers and results, one at a time, on one thread. An exception of a handler leaves `run`.

    Args:
        clock: monotonic seconds.
        threads: blocking calls that run side by side.
        urgent_threads: as many more, which only urgent calls use; 0: urgent calls are like the others.
        calls_max: blocking calls that run or wait; one more is refused.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        threads: int = 4,
        urgent_threads: int = 0,
        calls_max: int = CALLS_MAX,
    ) -> None:
        self._clock = clock
        self._poller = Poller()
        self._handlers: dict[Channel, Callable[[], None]] = {}
        self._timers: list[Timer] = []
        self._order = itertools.count()
        self._posted: deque[Callable[[], object]] = deque()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._poller.add(self._wake_reader.fileno())
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="loop-call")
        self._urgent_pool = (
            ThreadPoolExecutor(max_workers=urgent_threads, thread_name_prefix="loop-urgent")
            if urgent_threads
            else self._pool
        )
        self._calls_max = calls_max
        self._stopped = self._closed = False
        self.calls_open = 0
        """Blocking calls whose results were not yet delivered."""

    def now_s(self) -> float:
        return self._clock()

    # ---- what to wait for

    def attach(self, source: Source[R], handler: Callable[[list[R]], object]) -> None:
        """Calls `handler` with every list that is received from a Router or Dealer."""
        assert isinstance(source, Channel), f"{source!r} has no socket to wait for"
        self._handlers[source] = partial(_receive, source, handler)
        self._poller.add(source)

    def detach(self, source: Source[Any]) -> None:
        assert isinstance(source, Channel), f"{source!r} has no socket to wait for"
        del self._handlers[source]
        self._poller.remove(source)

    def call_every(self, period_s: float, run: Callable[[], object]) -> Timer:
        """Calls `run` every `period_s`, first after one period. Periods that were missed are left out, not made up for."""
        assert period_s > 0, f"period_s = {period_s}: must be > 0"
        return self._schedule(period_s, run, period_s)

    def call_later(self, delay_s: float, run: Callable[[], object]) -> Timer:
        """Calls `run` once, after `delay_s`."""
        return self._schedule(delay_s, run, 0.0)

    def submit(
        self, call: Callable[[*Ts], R], *args: *Ts, then: Callable[[Future[R]], object], urgent: bool = False
    ) -> None:
        """Runs a blocking call on a thread and hands its finished future to `then` on the loop's thread: `future.result()` raises.

        An urgent call never waits for one that is not. Raises ClusterError where `calls_max` calls are open already.
        """
        if self.calls_open >= self._calls_max:
            raise ClusterError(f"{self.calls_open} blocking calls are open: must be < {self._calls_max}")
        self.calls_open += 1
        pool = self._urgent_pool if urgent else self._pool
        pool.submit(call, *args).add_done_callback(lambda done: self.post(partial(self._deliver, then, done)))

    def post(self, call: Callable[[], object]) -> None:
        """Has the loop make a call. From any thread, and from a signal handler. A closed loop makes none."""
        if self._closed:
            return
        self._posted.append(call)
        try:
            self._wake_writer.send(b"\0")
        except BlockingIOError:
            return  # so many wake-ups wait that one more is not needed
        except OSError:
            return  # the loop is closed

    # ---- running

    def run(self) -> None:
        """Runs until `stop`."""
        while not self._stopped:
            self.run_once(60.0)

    def run_once(self, timeout_s: float) -> None:
        """One turn; waits up to `timeout_s` for something to do."""
        for source in self._poller.ready(self._wait_s(timeout_s)):
            if isinstance(source, Channel):
                self._handle(source)
            else:
                self._drain_wakes()
        self._run_posted()
        self._run_timers()

    def stop(self) -> None:
        """Ends `run` after this turn. From any thread, and from a signal handler."""
        self._stopped = True
        self.post(_nothing)

    def close(self) -> None:
        """Drops calls that have not begun and all results; does not close the sources."""
        self._stopped = self._closed = True
        self._posted.clear()
        for pool in (self._pool, self._urgent_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        self._poller.remove(self._wake_reader.fileno())
        self._wake_writer.close()
        self._wake_reader.close()

    def _schedule(self, delay_s: float, run: Callable[[], object], period_s: float) -> Timer:
        timer = Timer(self._clock() + delay_s, next(self._order), run, period_s)
        heapq.heappush(self._timers, timer)
        return timer

    def _wait_s(self, timeout_s: float) -> float:
        if self._posted:
            return 0.0
        if self._timers:
            return max(0.0, min(timeout_s, self._timers[0].due_s - self._clock()))
        return timeout_s

    def _handle(self, source: Channel) -> None:
        handler = self._handlers.get(source)  # an earlier handler of this turn may have detached it
        if handler is not None:
            handler()

    def _drain_wakes(self) -> None:
        try:
            self._wake_reader.recv(4096)
        except BlockingIOError:
            return

    def _run_posted(self) -> None:
        for _ in range(len(self._posted)):
            self._posted.popleft()()

    def _run_timers(self) -> None:
        now_s = self._clock()
        while self._timers and self._timers[0].due_s <= now_s:
            timer = heapq.heappop(self._timers)
            if timer.cancelled:
                continue
            if timer.period_s:
                self._reschedule(timer, now_s)
            timer.run()

    def _reschedule(self, timer: Timer, now_s: float) -> None:
        on_time_s = timer.due_s + timer.period_s
        timer.due_s = on_time_s if on_time_s > now_s else now_s + timer.period_s
        timer.order = next(self._order)
        heapq.heappush(self._timers, timer)

    def _deliver(self, then: Callable[[Future[R]], object], done: Future[R]) -> None:
        self.calls_open -= 1
        then(done)


def _receive(source: Source[R], handler: Callable[[list[R]], object]) -> None:
    received = source.receive(0.0)
    if received:
        handler(received)


def _nothing() -> None:
    """What wakes a loop that need only look at its flag."""
