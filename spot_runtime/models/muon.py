"""Muon for the matrices of the transformer blocks, AdamW for everything else. Owns the update rule; never schedules a learning rate.

    M ← μ M + (1 − μ) G           momentum of the gradient G
    U = orth((1 − μ) G + μ M)     Nesterov look-ahead, singular values pushed towards 1 by five Newton-Schulz rounds
    W ← (1 − η λ) W − η · 0.2 √max(rows, columns) · U

(K. Jordan, "Muon", 2024; the factor 0.2 √max matches AdamW's root mean square, arXiv 2502.16982.) Matrices of one shape are
orthogonalised as one batch, which keeps the launches a GPU sees few.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

MOMENTUM = 0.95
WEIGHT_DECAY = 0.01
NEWTON_SCHULZ_ROUNDS = 5
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the odd quintic a s + b s³ + c s⁵ that lifts small singular values quickest (Jordan, 2024)."""


def orthogonalised(matrices_BMN: torch.Tensor) -> torch.Tensor:
    """Each matrix of the batch with its singular values moved to about 1; same shape."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices_BMN.shape[1] > matrices_BMN.shape[2]
    x = matrices_BMN.mT if tall else matrices_BMN
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: torch.Tensor = x.mT if tall else x
    return result


class Muon:
    """The optimizer of one transformer. Gradients are read from `.grad` and are left for the caller to clear."""

    def __init__(self, transformer: nn.Module, learning_rate: float) -> None:
        matrices = [p for name, p in transformer.named_parameters() if p.ndim == 2 and "transformer_blocks" in name]
        taken = {id(p) for p in matrices}
        rest = [p for p in transformer.parameters() if id(p) not in taken]
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for p in matrices:
            by_shape[p.shape].append(p)
        self._stacks = list(by_shape.values())
        self._momenta = [torch.zeros(len(stack), *stack[0].shape, device=stack[0].device) for stack in self._stacks]
        self._adam = torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update of every parameter at `learning_rate`."""
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        for stack, momentum in zip(self._stacks, self._momenta, strict=True):
            gradient = torch.stack([p.grad for p in stack if p.grad is not None])
            momentum.lerp_(gradient, 1 - MOMENTUM)
            update = orthogonalised(gradient.lerp(momentum, MOMENTUM))
            scale = 0.2 * max(stack[0].shape) ** 0.5
            weights: list[torch.Tensor] = [*stack]
            torch._foreach_mul_(weights, 1 - learning_rate * WEIGHT_DECAY)
            torch._foreach_add_(weights, list(update.unbind()), alpha=-learning_rate * scale)
