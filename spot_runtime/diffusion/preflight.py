"""Whether a training step fits in memory, before it starts. Owns the sum; what it is a sum of is measured or counted, not guessed.

weights        of the transformer, as they are, a share of them on each rank
update         fp32 gradient, two moments of AdamW and the average, of what is trained
reference      a second copy of the weights, where all of them are trained
activations    what one row keeps for its backward pass, measured on one row, times the rows of a micro batch
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spot_runtime.config import GrpoConfig
from spot_runtime.errors import TrainingError

_FP32_BYTES = 4
_GB = 1e9


def kept_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps of `forward`, each storage once, without the model's own parameters."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()  # held, so that no storage is freed and its address used again
    total = sum(kept.values())
    del result
    return total


def needs(
    transformer: Any, trained: Mapping[str, Tensor], grpo: GrpoConfig, *, ranks: int, row_bytes: int, rows: int
) -> dict[str, int]:
    """Bytes of each kind on one rank, the weights included that are there already."""
    weights = sum(p.numel() * p.element_size() for p in transformer.parameters())
    count = sum(p.numel() for p in trained.values())
    copies = 3 + (grpo.ema_decay > 0)
    return {
        "weights": weights // ranks,
        "update": copies * _FP32_BYTES * count // ranks,
        "reference": weights // ranks if grpo.trainable == "full" else 0,
        "activations": row_bytes * rows,
    }


def check_memory(wanted: Mapping[str, int], available: int, rows: int) -> None:
    """Raises TrainingError that says what does not fit, and what to lower. `available` counts the weights' own bytes too."""
    total = sum(wanted.values())
    if total <= available:
        return
    parts = ", ".join(f"{name} {size / _GB:.2f}" for name, size in wanted.items() if size)
    raise TrainingError(
        f"memory: {total / _GB:.2f} GB ({parts}) of {available / _GB:.2f} GB: must fit; lower grpo.micro_batch ({rows} rows now), "
        "set grpo.activation_checkpointing, or add trainer ranks"
    )


def available_bytes(device: torch.device) -> int:
    """Bytes that are free on `device`."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) + int(
            torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        )
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        (kilobytes,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError):
        return sys.maxsize  # a system that does not say
    return int(kilobytes) * 1024
