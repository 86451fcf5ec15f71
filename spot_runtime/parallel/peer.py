"""Weights from the other ranks of a group. Owns who gives and who takes; never loads from a file.

For ranks that cannot map a peer's memory: another GPU without peer access, or a publisher that is gone.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from spot_runtime.errors import UnseededError
from spot_runtime.parallel.group import SequenceGroup
from spot_runtime.parallel.weights import Weights

_DIGEST_BYTES: Final = 64


def share_weights(group: SequenceGroup, weights: Weights) -> Weights:
    """Every rank of `group` calls it once; afterwards all are SEEDED with the same digest. Returns `weights`.

    The lowest seeded rank gives, those unseeded take. Raises UnseededError on every rank where none is seeded or two are with different
    digests, and on a rank whose copy does not have the giver's digest; it stays UNSEEDED. Raises GroupError where a rank dies in between.
    """
    digests = _digests(group, weights)
    seeded = [rank for rank, digest in enumerate(digests) if digest]
    if not seeded:
        raise UnseededError(f"{group.generation}: no rank has weights to share")
    if len({digests[rank] for rank in seeded}) > 1:
        raise UnseededError(f"{group.generation}: ranks {seeded} hold different weights")
    if len(seeded) < group.degree:
        _copy(group, weights, source=seeded[0], digest=digests[seeded[0]])
    return weights


def _digests(group: SequenceGroup, weights: Weights) -> list[str]:
    """Each rank's digest, empty where it is unseeded: a rank can only say what it has checked."""
    mine = weights.digest.encode() if weights.is_seeded else bytes(_DIGEST_BYTES)
    return [bytes(row).decode().strip("\0") for row in group.gather_numbers(list(mine))]


def _copy(group: SequenceGroup, weights: Weights, source: int, digest: str) -> None:
    """A broadcast has no bystanders: ranks that are seeded already take their copy into memory that is given up at once."""
    names = sorted(weights.spec)
    if group.rank == source:
        group.broadcast([weights.tensors[name] for name in names], source)
    elif weights.is_seeded:
        group.broadcast((_empty(weights, name, group.device) for name in names), source)
    else:
        tensors = {name: _empty(weights, name, group.device) for name in names}
        group.broadcast(tensors.values(), source)
        group.synchronize()
        weights.seed(tensors, digest)
        return
    group.synchronize()


def _empty(weights: Weights, name: str, device: torch.device) -> Tensor:
    spec = weights.spec[name]
    return torch.empty(spec.shape, dtype=spec.dtype, device=device)
