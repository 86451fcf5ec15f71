"""Divergence from the reference policy. Owns the formula; the reference is the same model with its adapter disabled."""

from __future__ import annotations

from torch import Tensor


def gaussian_kl(mean: Tensor, mean_reference: Tensor, std: Tensor) -> Tensor:
    """KL(π || π_ref) a latent dimension [B], of two Gaussians that share their std:

        KL = mean_D( (μ - μ_ref)² ) / (2 std²)

    std is that of the whole transition, sqrt(-dt) included; the form without it, which some implementations use, is larger by a factor
    that grows with the number of denoising steps.

    Args:
        mean: μ [B, ...].
        mean_reference: μ_ref [B, ...].
        std: [B].
    """
    return (mean - mean_reference).square().flatten(1).mean(1) / (2 * std.square())
