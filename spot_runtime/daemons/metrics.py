"""Control's figures for Prometheus, on a loopback HTTP port. Owns their names; never decides anything.

Figures are copied from the core on the daemon's own thread; the scraping thread only reads the copies.
"""

from __future__ import annotations

import itertools

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from spot_runtime.daemons.ports import HOST
from spot_runtime.errors import PortInUseError
from spot_runtime.scheduler.core import ControlCore
from spot_runtime.types import JobPhase, Op, Pool, RequestState

_WRITE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class Total:
    """A counter that follows a number which something else counts up."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._seen = 0

    def follow(self, total: int) -> None:
        self._counter.inc(total - self._seen)
        self._seen = total


class ControlMetrics:
    """The registry of one control daemon."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._gauge("requests", "Requests that are not forgotten.", "op", "state")
        self._jobs = self._gauge("jobs", "Jobs that are not forgotten.", "op", "phase")
        self._slots = self._gauge("slots", "Worker slots that take work.", "pool")
        self._nodes = self._gauge("nodes", "Nodes that are present.", "pool")
        self._standbys = self._gauge("standby_workers", "Worker processes that wait for a slot.")
        self._parked = self._gauge("pulls_parked", "Pulls that wait for work.")
        self._lost_steps = Total(
            self._counter("denoising_steps_lost", "Sample-steps that nodes took again because a worker died or failed.")
        )
        self._lost = Total(self._counter("leases_lost", "Leases that ended with their node or by expiry."))
        self._refused = Total(self._counter("frames_refused", "Frames that could not be read."))
        self._peers = Total(self._counter("peers_refused", "Connections that never showed an allowed key."))
        self.inputs_refused = self._counter("messages_refused", "Messages that could be read and were not accepted.")
        self.journal_write_s = Histogram(
            "spotlight_journal_write_seconds",
            "One transaction of the journal.",
            registry=self.registry,
            buckets=_WRITE_S,
        )
        self.journal_rows = self._counter("journal_rows", "Rows written to the journal.")

    def serve(self, port: int) -> int:
        """Answers GET /metrics on a loopback port (0: a free one) and returns the port. Raises PortInUseError."""
        try:
            server, _ = start_http_server(port, addr=HOST, registry=self.registry)
        except OSError as error:
            raise PortInUseError(f"metrics_port = {port}: {error.strerror}") from error
        return int(server.server_port)

    def observe(self, core: ControlCore, *, frames_refused: int, peers_refused: int) -> None:
        """Copies what the core holds."""
        depth = dict.fromkeys(itertools.product(Op, RequestState), 0)
        for claim in core.queue.claims.values():
            for state, count in claim.tally.items():
                depth[claim.op, state] += count
        for (op, state), count in depth.items():
            self._requests.labels(op.value, state.value).set(count)
        jobs = dict.fromkeys(itertools.product(Op, JobPhase), 0)
        for job in core.jobs.values():
            jobs[job.job.op, job.phase] += 1
        for (op, phase), count in jobs.items():
            self._jobs.labels(op.value, phase.value).set(count)
        self._observe_nodes(core)
        self._parked.set(len(core.queue.pulls.parked))
        self._standbys.set(core.instances.standbys)
        self._lost_steps.follow(core.instances.lost_steps)
        self._lost.follow(core.queue.leases_lost)
        self._refused.follow(frames_refused)
        self._peers.follow(peers_refused)

    def _observe_nodes(self, core: ControlCore) -> None:
        spot = core.instances.spot_slots
        pools = list(core.instances.pools().values())
        self._slots.labels(Pool.SPOT.value).set(spot)
        self._slots.labels(Pool.RESERVED.value).set(core.instances.slots - spot)
        for pool in Pool:
            self._nodes.labels(pool.value).set(pools.count(pool))

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"spotlight_{name}", what, labels, registry=self.registry)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"spotlight_{name}", what, registry=self.registry)
