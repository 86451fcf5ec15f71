"""What the reward service counts, for Prometheus. Owns names and labels; a registry of its own for each service, no module state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from spot_runtime.rewards.wire import ItemAnswer

Answers = tuple[ItemAnswer, ...]

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Figures:
    """Counters of one service. `queued_items` is asked at each scrape."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, queued_items: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._items = Counter(
            "spotlight_reward_items", "Items answered", ("reward", "outcome"), registry=self._registry
        )
        self._refused = Counter("spotlight_reward_refused", "Requests refused", ("status",), registry=self._registry)
        self._seconds = Histogram(
            "spotlight_reward_request_seconds",
            "From admission of a request to its answer",
            ("reward",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        queued = Gauge("spotlight_reward_queued_items", "Accepted and not yet judged", registry=self._registry)
        queued.set_function(queued_items)

    @contextmanager
    def judging(self, reward: str) -> Iterator[Callable[[Answers], Answers]]:
        """Times one request; its answers go through what it yields."""
        started_s = time.monotonic()

        def answered(answers: Answers) -> Answers:
            scored = sum(answer.error is None for answer in answers)
            self._items.labels(reward, "scored").inc(scored)
            self._items.labels(reward, "error").inc(len(answers) - scored)
            return answers

        yield answered
        self._seconds.labels(reward).observe(time.monotonic() - started_s)

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def text(self) -> bytes:
        """The exposition format of `media_type`."""
        return generate_latest(self._registry)
