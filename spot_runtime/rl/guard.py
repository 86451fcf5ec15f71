"""GRPO-Guard: ratios of all denoising steps on one scale, and gradients too. Owns the formulas; clipping is rl.loss's.

Legend: x' the sample, μ and μ_old the means of its transition now and when it was drawn, ε = (x' - μ_old) / std the noise it was
drawn with, std the standard deviation of the whole transition, dt = s' - s < 0, D all dimensions but the batch.

    Δμ   = μ - μ_old
    logr = std (logp - logp_old + mean_D(Δμ²) / (2 std²))
         = mean_D(ε Δμ)
    w    = 1 / (-dt)

The plain log-ratio of a Gaussian is biased below 0 by mean(Δμ²) / (2 std²) and spread by 1 / std, so that a clip range which binds at one
denoising step never does at another; logr is free of both (arXiv 2510.22319). w gives back what the drift's factor dt takes from the
gradient of late steps.
"""

from __future__ import annotations

from torch import Tensor


def guarded_log_ratio(mean: Tensor, mean_old: Tensor, std: Tensor, sample: Tensor) -> Tensor:
    """logr [B], with the gradient of `mean`; 0 exactly where the two means are equal. The same for SDE and CPS steps.

    Args:
        mean: μ [B, ...].
        mean_old: μ_old [B, ...].
        std: [B].
        sample: x' [B, ...].
    """
    noise = (sample - mean_old) / std.view(-1, *[1] * (mean.ndim - 1))
    return (noise * (mean - mean_old)).flatten(1).mean(1)


def step_weight(sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """w [B] of denoising steps from `sigma` [B] to `sigma_next` [B]."""
    return 1 / (sigma - sigma_next)
