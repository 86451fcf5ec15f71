"""A worker's weights: whether they are whole, what they must look like, and their digest. Owns the rule that only checked weights are used.

    UNSEEDED ──seed(tensors that fit, digest as expected)──► SEEDED

There is no way back and no third state: tensors on their way are nobody's weights yet. A worker that is UNSEEDED neither serves nor passes
weights on; whatever asks for its tensors gets UnseededError. Where tensors come from is for others: the model folder (`diffusion`), memory
shared on the machine (`shared.py`) or a peer's GPU (`cuda_ipc.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from spot_runtime.errors import UnseededError

CPU: Final = torch.device("cpu")
CHUNK_BYTES: Final = 1024 * 1024
"""Bytes that one number of a digest stands for."""


class TensorSpec(NamedTuple):
    """What a tensor must be to have its place in the model."""

    dtype: torch.dtype
    shape: tuple[int, ...]


WeightSpec = Mapping[str, TensorSpec]


class WeightState(StrEnum):
    UNSEEDED = "unseeded"
    SEEDED = "seeded"


class Weights:
    """The base model's tensors by name, without any policy.

    Seeded, they lie on `device`, and `install` gets them, to compute with. Nobody writes to them.
    """

    def __init__(
        self,
        spec: WeightSpec,
        device: torch.device = CPU,
        install: Callable[[Mapping[str, Tensor]], None] = lambda tensors: None,  # noqa: ARG005 - tensors are all
    ) -> None:
        self.spec = spec
        self.device = device
        self._install = install
        self._tensors: Mapping[str, Tensor] = {}
        self._digest = ""

    @property
    def is_seeded(self) -> bool:
        return self.state is WeightState.SEEDED

    @property
    def state(self) -> WeightState:
        return WeightState.SEEDED if self._digest else WeightState.UNSEEDED

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Raises UnseededError before `seed`."""
        self.require_seeded()
        return self._tensors

    @property
    def digest(self) -> str:
        """Raises UnseededError before `seed`."""
        self.require_seeded()
        return self._digest

    def require_seeded(self) -> None:
        """Raises UnseededError unless the weights are whole and checked."""
        if not self._digest:
            raise UnseededError(f"weights of {len(self.spec)} tensors are unseeded: must be copied and checked first")

    def seed(self, tensors: Mapping[str, Tensor], digest: str = "") -> None:
        """Takes `tensors` over. `digest`: what the giver says they are, empty where they come from the model folder itself.

        Raises UnseededError that names what does not fit, and stays UNSEEDED then.
        """
        assert not self._digest, "weights are seeded once"
        _require_fit(self.spec, tensors)
        placed = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        found = weights_digest(placed)
        if digest and found != digest:
            raise UnseededError(f"weights arrived with digest {found}: must be {digest}")
        self._install(placed)
        self._tensors, self._digest = placed, found

    def relocate(self, tensors: Mapping[str, Tensor]) -> None:
        """The same weights, some of them now in other memory: what was there before is given up."""
        self.require_seeded()
        _require_fit(self.spec, tensors)
        self._tensors = dict(tensors)


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and the sums of all chunks of CHUNK_BYTES as 64-bit numbers.

    Quick on any device, against memory that is torn, stale or unwritten; not against somebody who means harm.
    """
    digest = hashlib.sha256()
    sums = {name: _chunk_sums(tensors[name]) for name in sorted(tensors)}
    for name, chunk_sums in sums.items():
        tensor = tensors[name]
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(chunk_sums.cpu().numpy().tobytes())
    return digest.hexdigest()


def _chunk_sums(tensor: Tensor) -> Tensor:
    """int64 [chunks]: the last chunk is filled up with zeros."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = len(data) // CHUNK_BYTES * CHUNK_BYTES
    rest = functional.pad(data[whole:], (0, -len(data[whole:]) % 8)).view(torch.int64).sum()[None]
    if not whole:
        return rest
    return torch.cat([data[:whole].view(torch.int64).view(-1, CHUNK_BYTES // 8).sum(1), rest])


def _require_fit(spec: WeightSpec, tensors: Mapping[str, Tensor]) -> None:
    found = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    odd = sorted({name for name, _ in found.items() ^ spec.items()})
    if odd:
        given, wanted = found.get(odd[0], "absent"), spec.get(odd[0], "absent")
        raise UnseededError(f"weights differ in {len(odd)} tensors, the first {odd[0]}: {given}, must be {wanted}")
