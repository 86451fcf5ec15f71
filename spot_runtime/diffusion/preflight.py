"""Whether a training step fits in memory, before it starts. Owns the sum; what it is a sum of is measured or counted, not guessed.

weights        of the transformer, as they are, a share of them on each rank
update         fp32 gradient, two moments of AdamW and the average, of what is trained
reference      where all weights are trained, a copy of the base's, and one of the policy's while the base computes
copies         of weights that a forward pass keeps whatever its rows: in another dtype, or with an adapter merged in
activations    what rows keep for their backward pass, times the rows of a micro batch; where they are recomputed, what blocks are given
               and all of one block

The last two are measured on one row and on two, which tells what grows with rows from what does not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spot_runtime.config import GrpoConfig
from spot_runtime.errors import TrainingError

PASSING = 1.15
"""What passes through memory in a backward pass, beside what waits for it: measured, up to .12 of it on the tiny model in bf16."""
_FP32_BYTES = 4
_GB = 1e9


class Kept(NamedTuple):
    """Bytes that autograd keeps of a forward pass: of each row, and whatever the rows."""

    row: int
    fixed: int


def kept_by_rows(forward: Callable[[int], Tensor], blocks: nn.ModuleList | None = None) -> Kept:
    """What `forward` of so many rows keeps; `blocks`: they are recomputed, and the first one stands for what that takes at a time."""

    def kept(rows: int) -> int:
        whole = kept_bytes(lambda: forward(rows))
        return whole if blocks is None else whole + _kept_by_block(blocks[0], lambda: forward(rows))

    one, two = kept(1), kept(2)
    return Kept(row=two - one, fixed=max(2 * one - two, 0))


def kept_bytes(forward: Callable[[], object]) -> int:
    """Bytes that autograd keeps of `forward`, each storage once, without the model's own parameters."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a result that its own node kept would never be freed, nor the model that computed it

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()  # held, so that no storage is freed and its address used again
    total = sum(kept.values())
    del result
    return total


def _kept_by_block(block: nn.Module, forward: Callable[[], object]) -> int:
    """Bytes that autograd keeps of `block` where `forward` comes through it, as it is when nothing is recomputed."""
    found: list[int] = []

    def measure(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {name: _with_gradient(value) for name, value in kwargs.items()}
        with torch.enable_grad():
            found.append(kept_bytes(lambda: module.forward(*map(_with_gradient, args), **given)))

    handle = block.register_forward_pre_hook(measure, with_kwargs=True)
    try:
        with torch.no_grad():
            forward()
    finally:
        handle.remove()
    return found[0]


def _with_gradient(value: Any) -> Any:
    is_latent = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if is_latent else value


def needs(
    transformer: Any, trained: Mapping[str, Tensor], grpo: GrpoConfig, *, ranks: int, kept: Kept, rows: int
) -> dict[str, int]:
    """Bytes of each kind on one rank, the weights included that are there already."""
    weights = sum(p.numel() * p.element_size() for p in transformer.parameters())
    count = sum(p.numel() for p in trained.values())
    copies = 3 + (grpo.ema_decay > 0)
    return {
        "weights": weights // ranks,
        "update": copies * _FP32_BYTES * count // ranks,
        "reference": (1 + (grpo.kl_coefficient > 0)) * weights // ranks if grpo.trainable == "full" else 0,
        "copies": kept.fixed,
        "activations": int(PASSING * kept.row * rows),
    }


def held_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters, of a sharded one this rank's share."""
    parameters = (p.to_local() if isinstance(p, DTensor) else p for p in module.parameters())
    return sum(p.numel() * p.element_size() for p in parameters)


def check_memory(wanted: Mapping[str, int], available: int, rows: int) -> None:
    """Raises TrainingError that says what does not fit, and what to lower. `available` counts what holds weights already."""
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
