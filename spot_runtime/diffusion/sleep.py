"""Weights that leave a device and come back. Owns the check that they came back as they went; never decides when.

Models that share their device with others give the memory back while the others work. What wakes up is compared with what fell asleep by
`weights_digest`, each tensor for itself, so that an error can name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spot_runtime.errors import UnseededError
from spot_runtime.parallel.weights import weights_digest


class Sleeper:
    """Models and the device that they compute on. What woke up otherwise than it fell asleep never computes again.

    `moved` is called whenever the tensors lie elsewhere than before: whoever else holds them lets go of the old ones.
    """

    def __init__(
        self, models: Sequence[nn.Module], device: torch.device, moved: Callable[[], None] = lambda: None
    ) -> None:
        self._models = tuple(models)
        self._device = device
        self._moved = moved
        self._asleep: Mapping[str, str] | None = None

    @property
    def is_asleep(self) -> bool:
        return self._asleep is not None

    def sleep(self) -> None:
        """Moves all weights to the host and gives their memory back. Asleep already is no error."""
        if self._asleep is None:
            asleep = self._digests()
            self._leave()
            self._asleep = asleep

    def wake(self) -> None:
        """Moves them back. Raises UnseededError that names the first tensor which is not what it was; awake already is no error.

        Where the device has no room for all, torch's error passes through and all sleep on.
        """
        if self._asleep is None:
            return
        try:
            self._move(self._device)
        except BaseException:
            self._leave()
            raise
        before, after = self._asleep, self._digests()
        odd = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        if odd:
            raise UnseededError(f"{len(odd)} tensors woke up other than they fell asleep, the first {odd[0]}")
        self._asleep = None

    def _leave(self) -> None:
        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _move(self, device: torch.device) -> None:
        for model in self._models:
            model.to(device)
        self._moved()

    def _digests(self) -> dict[str, str]:
        return {name: weights_digest({name: tensor}) for model in self._models for name, tensor in _tensors(model)}


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, of a sharded one this rank's share."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, tensor.to_local() if isinstance(tensor, DTensor) else tensor
