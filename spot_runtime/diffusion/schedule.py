"""Noise levels of a rollout: exactly those that QwenImagePipeline takes. Owns the schedule and its digest; never steps through it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler


def sigmas(scheduler_config: Mapping[str, Any], num_steps: int, tokens: int) -> torch.Tensor:
    """sigma_0 = 1 > ... > sigma_{num_steps} = 0: [num_steps + 1] fp32 on the CPU.

    Args:
        scheduler_config: scheduler/scheduler_config.json of the model.
        num_steps: denoising steps.
        tokens: latent tokens of the image; the shift grows with them.
    """
    noise_scheduler = FlowMatchEulerDiscreteScheduler.from_config(dict(scheduler_config))
    raw = np.linspace(1.0, 1.0 / num_steps, num_steps)
    noise_scheduler.set_timesteps(sigmas=raw, mu=dynamic_shift(scheduler_config, tokens), device="cpu")
    result: torch.Tensor = noise_scheduler.sigmas.to(torch.float32)
    return result


def dynamic_shift(scheduler_config: Mapping[str, Any], tokens: int) -> float:
    """μ = μ_base + (tokens - L_base) (μ_max - μ_base) / (L_max - L_base), as the Qwen-Image pipeline takes it."""
    base_tokens = scheduler_config.get("base_image_seq_len", 256)
    max_tokens = scheduler_config.get("max_image_seq_len", 4096)
    base_shift = scheduler_config.get("base_shift", 0.5)
    slope = (scheduler_config.get("max_shift", 1.15) - base_shift) / (max_tokens - base_tokens)
    return float(tokens * slope + (base_shift - slope * base_tokens))


def schedule_digest(schedule: torch.Tensor) -> str:
    """SHA-256 of the noise levels, so that two sides can tell that they mean the same steps."""
    return hashlib.sha256(schedule.to(torch.float32).cpu().numpy().tobytes()).hexdigest()
