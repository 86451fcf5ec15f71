"""The processes that take one training step together. Owns what they agree on; never shards a model.

Every rank runs the same code on the same samples and takes every size-th micro batch. Whatever one of them might decide alone (stop, a
probe that failed) is agreed first, since a rank that leaves the others makes them wait until the process group's deadline.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class Ranks(Protocol):
    """`rank` of `size` processes."""

    rank: int
    size: int

    @property
    def mesh(self) -> DeviceMesh | None:
        """What a model is sharded over; None where nothing is."""

    def max(self, value: float) -> float:
        """The largest of all ranks' values; NaN where one is."""

    def sum(self, value: float) -> float:
        """The sum of all ranks' values, added up in the order of ranks."""

    def concatenate(self, rows: Tensor) -> Tensor:
        """Rows [n, C] fp32 of all ranks in the order of ranks [N, C]; n may differ and be 0."""


class Alone:
    """One process."""

    rank, size = 0, 1
    mesh: DeviceMesh | None = None

    def max(self, value: float) -> float:
        return value

    def sum(self, value: float) -> float:
        return value

    def concatenate(self, rows: Tensor) -> Tensor:
        return rows


class GroupRanks:
    """The ranks of torch.distributed's default process group, which the caller makes and destroys."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._device = device
        self.mesh: DeviceMesh | None = DeviceMesh(device.type, torch.arange(self.size))

    def max(self, value: float) -> float:
        values = self._values(value)
        return float("nan") if any(each != each for each in values) else max(values)

    def sum(self, value: float) -> float:
        return sum(self._values(value))

    def concatenate(self, rows: Tensor) -> Tensor:
        counts = [int(count) for count in self._values(float(len(rows)))]
        padded = torch.zeros(max(counts), rows.shape[1], device=self._device)
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def _values(self, value: float) -> list[float]:
        mine = torch.tensor([value], dtype=torch.float64, device=self._device)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine)
        return [float(each) for each in every]
