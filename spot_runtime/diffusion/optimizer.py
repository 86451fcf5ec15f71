"""AdamW over a policy, from a saved state and back to one. Owns its constants and the moments' names; never computes a gradient."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from spot_runtime.config import GrpoConfig
from spot_runtime.diffusion.sharding import like, to_numpy
from spot_runtime.diffusion.state import TrainerState
from spot_runtime.diffusion.trainable import Trainable

ADAM_BETAS: Final = (0.9, 0.95)
"""A short second moment: an iteration is a few optimizer steps, and the gradient's scale moves with the rewards' spread."""
ADAM_EPS: Final = 1e-8


def restored_adamw(policy: Trainable, state: TrainerState, grpo: GrpoConfig) -> torch.optim.AdamW:
    """AdamW with the moments of `state`. A matrix that the image never sees (text output of the last block) has none."""
    optimizer = torch.optim.AdamW(
        policy.parameters.values(),
        lr=grpo.learning_rate,
        betas=ADAM_BETAS,
        eps=ADAM_EPS,
        weight_decay=grpo.weight_decay,
    )
    for name, parameter in policy.parameters.items():
        if name not in state.exp_avg:
            continue
        optimizer.state[parameter] = {
            "step": torch.tensor(float(state.optimizer_steps)),
            "exp_avg": like(state.exp_avg[name], parameter),
            "exp_avg_sq": like(state.exp_avg_sq[name], parameter),
        }
    return optimizer


def moments(policy: Trainable, optimizer: torch.optim.AdamW, moment: str) -> dict[str, np.ndarray]:
    """A copy of "exp_avg" or "exp_avg_sq" by the names of the policy's tensors."""
    return {
        name: to_numpy(optimizer.state[parameter][moment])
        for name, parameter in policy.parameters.items()
        if parameter in optimizer.state
    }
