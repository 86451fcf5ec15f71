"""The policy that a serving transformer computes with, exchanged between denoising steps. Owns both ways to do it; never trains.

Merged: W + (alpha / rank) B A takes the place of W, which is kept beside it and never written to: others may share its memory. A step then
costs what the base model's does; beside it, low-rank products add a fifth to a third on a small model. Only in fp32: a bf16 update is often
smaller than the rounding of W, and lost.
Attached: the low-rank product is computed beside W in every step, by peft.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from spot_runtime.diffusion.adapter import Adapter, AttachedAdapter, fitting_modules, lora_scale


class PolicySlot(Protocol):
    """Holds one policy at a time."""

    def bind(self, adapter: Adapter | None) -> None:
        """The transformer computes with `adapter` from now on, None for the base model, exactly.

        Raises PolicyMismatchError where `adapter` does not fit the model.
        """


def make_policy_slot(transformer: Any) -> PolicySlot:
    """Merged for an fp32 transformer, else attached."""
    return MergedSlot(transformer) if transformer.dtype == torch.float32 else AttachedSlot(transformer)


class MergedSlot:
    """W' in the place of W. `_base` holds W of each matrix that is changed at present, `_merged` memory for W' of each that ever was."""

    def __init__(self, transformer: Any) -> None:
        self._transformer = transformer
        self._base: dict[str, Tensor] = {}
        self._merged: dict[str, Tensor] = {}

    @torch.no_grad()
    def bind(self, adapter: Adapter | None) -> None:
        modules = () if adapter is None else fitting_modules(self._transformer, adapter)
        for module in self._base.keys() - set(modules):
            self._weight(module).data = self._base.pop(module)
        for module in modules:
            assert adapter is not None
            base = self._base.setdefault(module, self._weight(module).data)
            merged = self._merged.setdefault(module, torch.empty_like(base))
            low, high = (torch.as_tensor(adapter[f"{module}.lora_{half}.weight"]).to(base) for half in "AB")
            self._weight(module).data = torch.addmm(base, high, low, alpha=lora_scale(adapter), out=merged)

    def _weight(self, module: str) -> Tensor:
        weight: Tensor = self._transformer.get_submodule(module).weight
        return weight


class AttachedSlot:
    """Low-rank matrices beside W, attached again only where their number or shapes change."""

    def __init__(self, transformer: Any) -> None:
        self._transformer = transformer
        self._attached: AttachedAdapter | None = None

    def bind(self, adapter: Adapter | None) -> None:
        if adapter is None:
            if self._attached is not None:
                self._attached.enable(False)
        elif self._attached is not None and self._attached.fits(adapter):
            self._attached.bind(adapter)
            self._attached.enable(True)
        else:
            self._attach(adapter)

    def _attach(self, adapter: Adapter) -> None:
        if self._attached is not None:
            self._attached.detach()
        self._attached = None
        self._attached = AttachedAdapter(self._transformer, adapter)
