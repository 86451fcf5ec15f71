"""The part of a transformer that training moves: an adapter or all weights. Owns the choice between the two, nothing of either."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from torch import nn

from spot_runtime.config import GrpoConfig
from spot_runtime.diffusion.adapter import Adapter, AttachedAdapter, initial_adapter
from spot_runtime.diffusion.weights import WholePolicy, copy_weights, is_whole


class Trainable(Protocol):
    """A policy that sits in a transformer and has gradients. `parameters` have the names of the policy's tensors."""

    parameters: dict[str, nn.Parameter]

    def refresh(self) -> None:
        """After the transformer was sharded: `parameters` are other objects then."""

    def fits(self, policy: Adapter) -> bool:
        """Whether `bind` would take it."""

    def bind(self, policy: Adapter) -> None:
        """Copies `policy` in. Raises PolicyMismatchError where it does not fit."""

    def detach(self) -> None:
        """Gives the transformer its own weights back."""

    def state(self) -> dict[str, np.ndarray]:
        """A copy of the policy as it stands."""

    def enable(self, on: bool) -> None:
        """Off: the transformer is the reference policy."""


def attach(transformer: Any, policy: Adapter) -> Trainable:
    """A place for policies like `policy`, still to be bound. Raises PolicyMismatchError where it does not fit the model."""
    return WholePolicy(transformer, policy) if is_whole(policy) else AttachedAdapter(transformer, policy)


def initial_policy(transformer: Any, grpo: GrpoConfig, seed: int) -> dict[str, np.ndarray]:
    """What a run starts from; it changes nothing yet."""
    if grpo.trainable == "full":
        return copy_weights(transformer)
    return initial_adapter(transformer, grpo.lora_rank, grpo.lora_alpha, seed)
