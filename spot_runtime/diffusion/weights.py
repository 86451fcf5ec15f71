"""The policy as all weights of a transformer. Owns their names and binding; never trains, never loads a model.

A whole policy travels as an adapter does, `dict[str, np.ndarray]`: every parameter of the transformer in fp32 under its own name. What
holds a `lora_` tensor is an adapter, anything else is whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from spot_runtime.diffusion.adapter import ALPHA_KEY, Adapter, require_same
from spot_runtime.diffusion.invariance import PaddedRows
from spot_runtime.diffusion.sharding import copy_into, to_numpy


def is_whole(policy: Adapter) -> bool:
    """Whether `policy` holds the weights themselves and not an adapter."""
    return bool(policy) and not any(name == ALPHA_KEY or ".lora_" in name for name in policy)


def named_weights(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the names of the model folder, also where `make_batch_invariant` wrapped layers. Not while an adapter is attached."""
    padded = {name for name, module in transformer.named_modules() if isinstance(module, PaddedRows)}
    weights = {}
    for name, parameter in transformer.named_parameters():
        owner, _, leaf = name.rpartition(".")
        parent, _, child = owner.rpartition(".")
        weights[f"{parent}.{leaf}" if child == "linear" and parent in padded else name] = parameter
    return weights


def copy_weights(transformer: nn.Module) -> dict[str, np.ndarray]:
    """A whole policy that changes nothing."""
    return {name: to_numpy(parameter) for name, parameter in named_weights(transformer).items()}


def check_whole(policy: Adapter, places: Mapping[str, Tensor]) -> None:
    """Raises PolicyMismatchError that names the first tensor of `policy` without a place, or the first place without a tensor."""
    given: dict[str, tuple[float, ...]] = {name: array.shape for name, array in policy.items()}
    require_same(given, {name: tuple(place.shape) for name, place in places.items()})


def export_weights(folder: Path, policy: Adapter, config: Path) -> None:
    """Writes `policy` as the `transformer/` of a pipeline folder; `config` is the config.json of the model that it fits."""
    part = folder / "transformer"
    part.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(config, part / "config.json")
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in policy.items()}
    save_file(tensors, part / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})


class WholePolicy:
    """All weights of a transformer, in training. Keeps a copy of the weights it found: they are the reference policy, until `bind`.

    Raises PolicyMismatchError where `like` does not fit the model.
    """

    def __init__(self, transformer: nn.Module, like: Adapter) -> None:
        self._transformer = transformer
        check_whole(like, named_weights(transformer))
        transformer.requires_grad_(True)
        self.refresh()

    def refresh(self) -> None:
        """After the transformer was sharded. Its weights must still be the base's."""
        self.parameters = named_weights(self._transformer)
        copies = (nn.Parameter(p.detach().clone(), requires_grad=False) for p in self.parameters.values())
        self.reference = nn.ParameterList(copies)
        self._own: list[Tensor] = []

    def fits(self, policy: Adapter) -> bool:
        """Whether `bind` would take it."""
        return is_whole(policy) and {name: array.shape for name, array in policy.items()} == {
            name: tuple(parameter.shape) for name, parameter in self.parameters.items()
        }

    @torch.no_grad()
    def bind(self, policy: Adapter) -> None:
        """Copies every tensor of `policy` in. Raises PolicyMismatchError unless names and shapes are exactly the model's."""
        check_whole(policy, self.parameters)
        for name, parameter in self.parameters.items():
            copy_into(parameter, policy[name])

    @torch.no_grad()
    def detach(self) -> None:
        """Gives the transformer its own weights back; this object is of no use afterwards."""
        for parameter, base in zip(self.parameters.values(), self.reference, strict=True):
            parameter.copy_(base)
            parameter.requires_grad_(False)
            parameter.grad = None

    def state(self) -> dict[str, np.ndarray]:
        """A copy of the weights as they stand."""
        return {name: to_numpy(parameter) for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def enable(self, on: bool) -> None:
        """Off: the transformer computes what it did before. Not between a forward pass and its backward pass."""
        own, self._own = self._own, [] if on else [p.detach().clone() for p in self.parameters.values()]
        for parameter, weights in zip(self.parameters.values(), own if on else self.reference, strict=True):
            parameter.copy_(weights)
