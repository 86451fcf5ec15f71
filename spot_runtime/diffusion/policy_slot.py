"""The policy that a serving transformer computes with, exchanged between denoising steps. Owns the ways to do it; never trains.

Merged: W + (alpha / rank) B A takes the place of W, which is kept beside it and never written to: others may share its memory. A step then
costs what the base model's does; beside it, low-rank products add a fifth to a third on a small model. Only in fp32: a bf16 update is often
smaller than the rounding of W, and lost.
Attached: the low-rank product is computed beside W in every step, by peft.
A whole policy takes the place of the weights either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from spot_runtime.diffusion.adapter import Adapter, AttachedAdapter, fitting_modules, lora_scale
from spot_runtime.diffusion.weights import check_whole, is_whole, named_weights


class PolicySlot(Protocol):
    """Holds one policy at a time."""

    def bind(self, adapter: Adapter | None) -> None:
        """The transformer computes with `adapter`, low-rank or whole, from now on; None for the base model, exactly.

        Raises PolicyMismatchError where `adapter` does not fit the model.
        """

    def release(self) -> None:
        """The base model again, and nothing in memory beside it."""


def make_policy_slot(transformer: Any) -> PolicySlot:
    """Merged for an fp32 transformer, else attached."""
    return MergedSlot(transformer) if transformer.dtype == torch.float32 else AttachedSlot(transformer)


class MergedSlot:
    """W' in the place of W. `_base` holds W of each weight that is changed at present, `_changed` memory for W' of each that ever was."""

    def __init__(self, transformer: Any) -> None:
        self._transformer = transformer
        self._base: dict[str, Tensor] = {}
        self._changed: dict[str, Tensor] = {}

    @torch.no_grad()
    def bind(self, adapter: Adapter | None) -> None:
        places = named_weights(self._transformer)
        modules = self._modules(adapter, places)
        for name in self._base.keys() - set(modules):
            places[name].data = self._base.pop(name)
        for name, module in modules.items():
            assert adapter is not None
            base = self._base.setdefault(name, places[name].data)
            if name not in self._changed or self._changed[name].device != base.device:
                self._changed[name] = torch.empty_like(base)
            changed = self._changed[name]
            if module:
                low, high = (torch.as_tensor(adapter[f"{module}.lora_{half}.weight"]).to(base) for half in "AB")
                torch.addmm(base, high, low, alpha=lora_scale(adapter), out=changed)
            else:
                changed.copy_(torch.as_tensor(adapter[name]))
            places[name].data = changed

    def release(self) -> None:
        self.bind(None)
        self._changed.clear()

    @property
    def is_changed(self) -> bool:
        return bool(self._base)

    def _modules(self, adapter: Adapter | None, places: Mapping[str, Tensor]) -> Mapping[str, str]:
        """Names of the weights that are to differ from the base, each with the module whose adapter changes it, "" where it is replaced."""
        if adapter is None:
            return {}
        if is_whole(adapter):
            check_whole(adapter, places)
            return dict.fromkeys(adapter, "")
        return {f"{module}.weight": module for module in fitting_modules(self._transformer, adapter)}


class AttachedSlot:
    """Low-rank matrices beside W, attached again only where their number or shapes change."""

    def __init__(self, transformer: Any) -> None:
        self._transformer = transformer
        self._weights = MergedSlot(transformer)
        self._attached: AttachedAdapter | None = None

    def bind(self, adapter: Adapter | None) -> None:
        whole = adapter if adapter is not None and is_whole(adapter) else None
        if whole is not None or self._weights.is_changed:
            self._detach()
            self._weights.bind(whole)
        if whole is not None:
            return
        if adapter is None:
            if self._attached is not None:
                self._attached.enable(False)
        elif self._attached is not None and self._attached.fits(adapter):
            self._attached.bind(adapter)
            self._attached.enable(True)
        else:
            self._attach(adapter)

    def release(self) -> None:
        self._detach()
        self._weights.release()

    def _detach(self) -> None:
        if self._attached is not None:
            self._attached.detach()
        self._attached = None

    def _attach(self, adapter: Adapter) -> None:
        self._detach()
        self._attached = AttachedAdapter(self._transformer, adapter)
