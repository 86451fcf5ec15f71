"""A transformer sharded over trainer ranks by FSDP2, and tensors between whole and sharded. Owns the units; never trains.

A unit is a transformer block: its weights are whole only while it computes. Gradients are summed over ranks, not averaged, because the
loss is already divided by the rows of all ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(transformer: Any, mesh: DeviceMesh) -> None:
    """Shards a transformer in place; its parameters are other objects afterwards."""
    for block in transformer.transformer_blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(transformer, mesh=mesh, reshard_after_forward=True)
    for module in transformer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of a sharded one; every rank must ask."""
    result: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return result


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A copy of all of it in fp32; every rank must ask."""
    array: np.ndarray = whole(tensor.detach()).float().cpu().numpy().copy()
    return array


def like(array: np.ndarray, place: Tensor) -> Tensor:
    """`array` in fp32 as `place` is: on its device, and this rank's shard of it where `place` is sharded."""
    tensor = torch.tensor(array, dtype=torch.float32, device=place.device)
    if isinstance(place, DTensor):
        return distribute_tensor(tensor, place.device_mesh, place.placements, src_data_rank=None)
    return tensor


@torch.no_grad()
def copy_into(place: nn.Parameter, array: np.ndarray) -> None:
    """Puts `array` into a parameter, in its dtype."""
    if isinstance(place, DTensor):
        place.copy_(like(array, place).to(place.dtype))
    else:
        place.copy_(torch.as_tensor(array))
