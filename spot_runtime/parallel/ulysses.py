"""Ulysses (arXiv 2309.14509): tokens spread over ranks, exchanged for heads around attention. Owns layouts, padding and their gradients.

It never computes attention and never knows a model. With n ranks, B samples, L image tokens, H heads of width D, T text tokens:

    l = max(ceil(L / n), tokens_min)          tokens a rank; the last ranks' are zeros beyond L, and no attention ever sees those
    [B, L, C] ─own_tokens─► [B, l, C] ─► [B, l, H, D] ─to_heads─► [B, L, H/n, D] ─attention─► [B, L, H/n, D]
    [B, L, H/n, D] ─to_tokens─► [B, l, H, D] ─► [B, l, C] ─gather_tokens─► [B, L, C]

Text is whole on every rank: a rank takes its heads of it (`own_heads`), and the outputs of all heads are put together (`gather_heads`).

Gradients: if every rank computes the same loss from the gathered output, the sum over ranks of a parameter's gradients is its gradient at
degree 1. So `gather_tokens` gives each rank the gradient of its own tokens, and all others are the adjoints of what they do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from spot_runtime.parallel.group import SequenceGroup


class TokenShards:
    """The layout of image tokens. Without a group all of them lie here, and every method hands back what it was given.

    `group` may be exchanged between forwards; `tokens` is L of the forward in hand. `tokens_min` bounds l from below, for arithmetic that
    rounds in another way over few rows.
    """

    def __init__(self, tokens_min: int = 1) -> None:
        self.group: SequenceGroup | None = None
        self.tokens = 0
        self._tokens_min = tokens_min

    @property
    def degree(self) -> int:
        return 1 if self.group is None else self.group.degree

    @property
    def tokens_each(self) -> int:
        """l."""
        return max(-(-self.tokens // self.degree), self._tokens_min)

    def own_tokens(self, x: Tensor, dim: int) -> Tensor:
        """The l tokens of this rank out of all L along `dim`."""
        if self.group is None:
            return x
        each, missing = self.tokens_each, self.tokens_each * self.degree - x.shape[dim]
        if missing:
            shape = list(x.shape)
            shape[dim] = missing
            x = torch.cat([x, x.new_zeros(shape)], dim)
        return x.narrow(dim, self.group.rank * each, each)

    def to_heads(self, x: Tensor) -> Tensor:
        """[B, l, H, W] to [B, L, H/n, W]: all tokens, own heads."""
        if self.group is None:
            return x
        batch, each, heads, width = x.shape
        parts = x.view(batch, each, self.degree, heads // self.degree, width).permute(2, 0, 1, 3, 4)
        blocks = _all_to_all(parts, self.group)
        return blocks.permute(1, 0, 2, 3, 4).reshape(batch, self.degree * each, -1, width)[:, : self.tokens]

    def to_tokens(self, x: Tensor) -> Tensor:
        """[B, L, H/n, W] to [B, l, H, W]: own tokens, all heads."""
        if self.group is None:
            return x
        each = self.tokens_each
        padded = functional.pad(x, (0, 0, 0, 0, 0, self.degree * each - x.shape[1]))
        parts = padded.view(len(x), self.degree, each, *x.shape[2:]).permute(1, 0, 2, 3, 4)
        return _all_to_all(parts, self.group).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def own_heads(self, x: Tensor) -> Tensor:
        """[B, T, H, W] to [B, T, H/n, W]."""
        return x if self.group is None else x.chunk(self.degree, 2)[self.group.rank]

    def gather_heads(self, x: Tensor) -> Tensor:
        """[B, T, H/n, W] to [B, T, H, W]."""
        if self.group is None:
            return x
        result: Tensor = _GatherPartial.apply(x, self.group)  # type: ignore[no-untyped-call]
        return result.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def gather_tokens(self, x: Tensor) -> Tensor:
        """[B, l, C] to [B, L, C]."""
        if self.group is None:
            return x
        result: Tensor = _GatherOwn.apply(x, self.group)  # type: ignore[no-untyped-call]
        return result.permute(1, 0, 2, 3).flatten(1, 2)[:, : self.tokens]


def _all_to_all(parts: Tensor, group: SequenceGroup) -> Tensor:
    result: Tensor = _AllToAll.apply(parts, group)  # type: ignore[no-untyped-call]
    return result


class _AllToAll(torch.autograd.Function):
    """Its own adjoint."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return group.all_to_all(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.group.all_to_all(grads[0]), None


class _GatherPartial(torch.autograd.Function):
    """All-gather whose result each rank uses in another way: its adjoint adds up what the ranks have for a part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return group.all_gather(part)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.group.all_to_all(grads[0]).sum(0), None


class _GatherOwn(torch.autograd.Function):
    """All-gather after which all ranks do the same: each answers for its own part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: SequenceGroup) -> Tensor:
        ctx.rank = group.rank
        return group.all_gather(part)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0][ctx.rank], None
