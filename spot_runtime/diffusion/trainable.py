"""The part of a transformer that training moves: an adapter or all weights. Owns the choice between the two, nothing of either."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from spot_runtime.config import GrpoConfig
from spot_runtime.diffusion.adapter import Adapter, AttachedAdapter, initial_adapter
from spot_runtime.diffusion.weights import WholePolicy, copy_weights, is_whole


class Trainable(Protocol):
    """A policy that sits in a transformer and has gradients. `parameters` have the names of the policy's tensors."""

    parameters: dict[str, nn.Parameter]

    @property
    def reference(self) -> nn.Module:
        """What it keeps beside the transformer to be the reference policy."""

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
    """A place in fp32 for policies like `policy`, still to be bound. Raises PolicyMismatchError where it does not fit the model."""
    if is_whole(policy):
        return WholePolicy(transformer, policy)
    return AttachedAdapter(transformer, policy, torch.float32)


def base_dtype(grpo: GrpoConfig) -> torch.dtype:
    """What the weights of the base model are held in: those that are trained in fp32, frozen ones in what they compute in."""
    dtype: torch.dtype = torch.float32 if grpo.trainable == "full" else getattr(torch, grpo.compute_dtype)
    return dtype


def initial_policy(transformer: Any, grpo: GrpoConfig, seed: int) -> dict[str, np.ndarray]:
    """What a run starts from; it changes nothing yet."""
    if grpo.trainable == "full":
        return copy_weights(transformer)
    return initial_adapter(transformer, grpo.lora_rank, grpo.lora_alpha, seed)
