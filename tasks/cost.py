"""GPU-seconds that a run held, from the Usage of its jobs (paper §6.2). Pure arithmetic; prices are `instances.cost`'s.

Every job reports the GPU-seconds that both pools were held while it ran, and jobs overlap; so held time is counted once per moment, and the
moments between two jobs at the rate before them. Never reads clocks or the store.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from spot_runtime.instances.cost import cost_usd
from spot_runtime.types import Usage


@dataclass(frozen=True)
class Spend:
    """GPU-seconds held by pool."""

    reserved_gpu_s: float = 0.0
    spot_gpu_s: float = 0.0

    @property
    def usd(self) -> float:
        """US dollars at the paper's prices."""
        return cost_usd(self.reserved_gpu_s, self.spot_gpu_s)


def spend(usages: Iterable[Usage]) -> Spend:
    """GPU-seconds from the first start to the last end, each moment at the highest rate that a running job reports.

    rate_j = gpu_s_j / (finished_j - started_j);  held = Σ over moments of max_j rate_j · length, for each pool.
    """
    jobs = [usage for usage in usages if usage.finished_s > usage.started_s]
    moments = sorted({moment for job in jobs for moment in (job.started_s, job.finished_s)})
    reserved_gpu_s = spot_gpu_s = reserved_rate = spot_rate = 0.0
    for start, end in itertools.pairwise(moments):
        running = [job for job in jobs if job.started_s <= start and job.finished_s >= end]
        if running:
            reserved_rate = max(_rate(job, job.reserved_gpu_s) for job in running)
            spot_rate = max(_rate(job, job.spot_gpu_s) for job in running)
        reserved_gpu_s += reserved_rate * (end - start)
        spot_gpu_s += spot_rate * (end - start)
    return Spend(reserved_gpu_s, spot_gpu_s)


def _rate(job: Usage, gpu_s: float) -> float:
    return gpu_s / (job.finished_s - job.started_s)
