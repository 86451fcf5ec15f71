"""One denoising step of the flow as an ODE, SDE or coefficient-preserving step. Owns the formulas; never draws noise, never loads a model.

Legend, one sample a row of the batch:
    x   latents [B, L, C]            v   velocity the transformer predicts at x [B, L, C]
    s   sigma_i [B]                  s'  sigma_{i+1} [B]              dt = s' - s < 0
    a   noise level [B]              ε   standard normal [B, L, C]
    x'  the next latents             D   all dimensions but the batch

All arithmetic is fp32, whatever dtype comes in: log-probs of bf16 latents differ by more than a clip range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor


@dataclass(frozen=True)
class Transition:
    """x' [B, L, C], log p(x' | x) [B], mean [B, L, C] and standard deviation [B] of a stochastic denoising step."""

    sample: Tensor
    log_prob: Tensor
    mean: Tensor
    std: Tensor


def ode_step(velocity: Tensor, latents: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """x' = x + (s' - s) v. Euler, as FlowMatchEulerDiscreteScheduler takes it."""
    x, v = latents.float(), velocity.float()
    return x + _rows(sigma_next - sigma, x) * v


def sde_step(
    velocity: Tensor,
    latents: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    sigma_max: Tensor,
    noise_level: Tensor,
    *,
    noise: Tensor | None = None,
    sample: Tensor | None = None,
) -> Transition:
    """Flow-GRPO's SDE step (arXiv 2505.05470).

        g    = a sqrt(s / (1 - s)), where s = 1 takes sigma_1 in the denominator
        μ    = x (1 + g² / (2 s) dt) + v (1 + g² (1 - s) / (2 s)) dt
        std  = g sqrt(-dt)
        x'   = μ + std ε
        logp = mean_D( -(x' - μ)² / (2 std²) - log std - ½ log 2π )

    Args:
        sigma_max: sigma_1 of the schedule [B].
        noise: ε, to make a step; or
        sample: x' of a step made before, to price it. Exactly one of the two.
    """
    x, v = latents.float(), velocity.float()
    dt = sigma_next - sigma
    g = noise_level * torch.sqrt(sigma / (1 - torch.where(sigma == 1, sigma_max, sigma)))
    drift = g**2 / (2 * sigma)
    mean = x * _rows(1 + drift * dt, x) + v * _rows((1 + drift * (1 - sigma)) * dt, x)
    std = g * torch.sqrt(-dt)
    after = _after(mean, std, noise, sample)
    error = (after - mean).square().flatten(1).mean(1)
    log_prob = -error / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
    return Transition(after, log_prob, mean, std)


def cps_step(
    velocity: Tensor,
    latents: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    sigma_max: Tensor,
    noise_level: Tensor,
    *,
    noise: Tensor | None = None,
    sample: Tensor | None = None,
) -> Transition:
    """Coefficient-preserving step: the noise level after it is exactly s' (arXiv 2509.05952).

        std  = s' sin(a π / 2)
        μ    = (1 - s') (x - s v) + sqrt(s'² - std²) (x + (1 - s) v)
        x'   = μ + std ε
        logp = mean_D( -(x' - μ)² )          without a normaliser: clip ranges do not carry over from `sde_step`

    Args as `sde_step`; `sigma_max` is not used.
    """
    del sigma_max
    x, v = latents.float(), velocity.float()
    std = sigma_next * torch.sin(noise_level * (math.pi / 2))
    clean, pure_noise = x - _rows(sigma, x) * v, x + _rows(1 - sigma, x) * v
    mean = _rows(1 - sigma_next, x) * clean + _rows(torch.sqrt(sigma_next**2 - std**2), x) * pure_noise
    after = _after(mean, std, noise, sample)
    return Transition(after, -(after - mean).square().flatten(1).mean(1), mean, std)


StochasticStep = Callable[..., Transition]
STEPS: Mapping[str, StochasticStep] = MappingProxyType({"sde": sde_step, "cps": cps_step})
"""Stochastic steps by the name that `SamplingConfig.sde` takes."""


def _after(mean: Tensor, std: Tensor, noise: Tensor | None, sample: Tensor | None) -> Tensor:
    assert (noise is None) != (sample is None), "exactly one of noise and sample"
    if sample is not None:
        return sample.float()
    assert noise is not None
    return mean + _rows(std, mean) * noise.float()


def _rows(per_sample: Tensor, like: Tensor) -> Tensor:
    """[B] as [B, 1, ...] so that it scales the rows of `like`."""
    return per_sample.float().view(-1, *[1] * (like.ndim - 1))
