"""GPU-seconds that a run held, from the Usage of its jobs (paper §6.2). Pure arithmetic; prices are `instances.cost`'s.

Control counts what each pool was held since the cluster began, like a meter on a wall. What a run held is the last reading less the first:
jobs that overlap and the time between two jobs need no rule of their own. Never reads clocks or the store.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class Meter:
    """Totals of the cluster when the run's first job began, and when the last one so far ended."""

    first: Spend
    last: Spend

    @property
    def spend(self) -> Spend:
        """What the run held."""
        return Spend(self.last.reserved_gpu_s - self.first.reserved_gpu_s, self.last.spot_gpu_s - self.first.spot_gpu_s)


def read_meter(usages: Iterable[Usage], before: Meter | None = None) -> Meter | None:
    """The meter after jobs with these usages; `before` where none of them was told a total.

    first = min over jobs of (total_j - gpu_s_j);  last = max over jobs of total_j, for each pool.
    """
    told = [usage for usage in usages if usage.reserved_total_s or usage.spot_total_s]
    if not told:
        return before
    known = [before] if before else []
    return Meter(
        first=Spend(
            min([u.reserved_total_s - u.reserved_gpu_s for u in told] + [m.first.reserved_gpu_s for m in known]),
            min([u.spot_total_s - u.spot_gpu_s for u in told] + [m.first.spot_gpu_s for m in known]),
        ),
        last=Spend(
            max([u.reserved_total_s for u in told] + [m.last.reserved_gpu_s for m in known]),
            max([u.spot_total_s for u in told] + [m.last.spot_gpu_s for m in known]),
        ),
    )
