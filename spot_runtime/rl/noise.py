"""Initial latents and SDE noise as functions of (seed, denoising step). Owns the key of every draw; never keeps a generator.

    z(seed, i) = Philox-4x64 with the 128-bit key (seed, i), read as standard normals in fp32 by numpy's ziggurat
    x_T        = z(seed, 0)
    ε_i        = z(seed, i + 1)

The key is the pair itself, so no two (seed, denoising step) share a stream. Draws happen on the CPU, one sample at a time: they do not
change with batch, threads, device, the point of resumption, or the vector instructions of the machine.
"""

from __future__ import annotations

import numpy as np
import torch

SEED_MAX = 2**64 - 1


def initial_latents(seed: int, tokens: int, channels: int) -> torch.Tensor:
    """x_T of one sample: [tokens, channels] fp32 on the CPU."""
    return _draw(seed, 0, tokens, channels)


def sde_noise(seed: int, denoising_step: int, tokens: int, channels: int) -> torch.Tensor:
    """ε of one sample at one denoising step: [tokens, channels] fp32 on the CPU."""
    assert denoising_step >= 0, f"denoising_step = {denoising_step}"
    return _draw(seed, denoising_step + 1, tokens, channels)


def _draw(seed: int, stream: int, tokens: int, channels: int) -> torch.Tensor:
    assert 0 <= seed <= SEED_MAX, f"seed = {seed}: must be in 0..{SEED_MAX}"
    key = np.array([seed, stream], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    return torch.from_numpy(generator.standard_normal((tokens, channels), dtype=np.float32))
