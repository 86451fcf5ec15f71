"""The clipped policy loss of GRPO on denoising steps. Owns the formula; reduction over rows is the caller's.

ratio = exp(logp - logp_old)
loss  = max(-A ratio, -A clip(ratio, 1 - ε, 1 + ε))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """All [B], one row a denoising step of one sample. `clipped` rows give no gradient. log ratio = logp - logp_old is finite where the
    ratio itself is too small for a float."""

    loss: Tensor
    log_ratio: Tensor
    clipped: Tensor


def clipped_policy_loss(log_prob: Tensor, log_prob_old: Tensor, advantage: Tensor, clip_range: float) -> PolicyLoss:
    """Loss of each row (arXiv 2505.05470). logp is a mean over latent dimensions, so useful ε are 1e-5 to 1e-3.

    Args:
        log_prob: logp under the policy in training [B], with gradient.
        log_prob_old: logp under the policy that made the sample [B].
        advantage: A [B].
        clip_range: ε.
    """
    log_ratio = log_prob - log_prob_old
    ratio = torch.exp(log_ratio)
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - clip_range, 1 + clip_range)
    return PolicyLoss(torch.maximum(unclipped, clipped), log_ratio.detach(), (clipped > unclipped).detach())
