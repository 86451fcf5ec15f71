"""The samples of one training step, checked and in one order. Owns what a sample is and what makes a batch unfit; never trains."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spot_runtime.config import GrpoConfig, SamplingConfig
from spot_runtime.errors import TrainingError


@dataclass(frozen=True)
class TrainingSample:
    """One scored rollout. w = stop - start of `sde_window`, L tokens, C channels, T text tokens of width W.

    `window_latents` [w + 1, L, C] are the stored latents before each step of the window and after its last; `log_probs` [w] those that the
    rollout computed; `embeds` [T, W]. All fp32. `is_explored`: exploration chose the seed.
    """

    request_id: str
    prompt_id: str
    seed: int
    reward: float
    embeds: np.ndarray
    window_latents: np.ndarray
    log_probs: np.ndarray
    sde_window: tuple[int, int]
    num_steps: int
    noise_level: float
    is_explored: bool = False


def checked_batch(
    samples: Sequence[TrainingSample], *, sampling: SamplingConfig, grpo: GrpoConfig
) -> tuple[TrainingSample, ...]:
    """All of `samples` ordered by (prompt id, seed). Raises TrainingError that names the request or prompt at fault."""
    if not samples:
        raise TrainingError("0 samples: must have at least one whole group")
    for sample in samples:
        _check_sample(sample, sampling)
    groups: defaultdict[str, list[TrainingSample]] = defaultdict(list)
    for sample in samples:
        groups[sample.prompt_id].append(sample)
    for prompt_id, group in groups.items():
        _check_group(prompt_id, group, grpo.group_size)
    return tuple(sorted(samples, key=lambda s: (s.prompt_id, s.seed)))


def split_by_prompt(samples: Sequence[TrainingSample], parts: int) -> list[list[int]]:
    """Indices of `samples` in at most `parts` lists of whole groups, as even as can be. `samples` are ordered by prompt id."""
    prompt_ids = list(dict.fromkeys(sample.prompt_id for sample in samples))
    part_of = {}
    for part, chunk in enumerate(np.array_split(np.arange(len(prompt_ids)), min(parts, len(prompt_ids)))):
        part_of.update({prompt_ids[index]: part for index in chunk})
    split: list[list[int]] = [[] for _ in range(min(parts, len(prompt_ids)))]
    for index, sample in enumerate(samples):
        split[part_of[sample.prompt_id]].append(index)
    return split


def _check_sample(sample: TrainingSample, sampling: SamplingConfig) -> None:
    name = f"sample {sample.request_id} of prompt {sample.prompt_id}"
    if not math.isfinite(sample.reward):
        raise TrainingError(f"{name}: reward = {sample.reward}: must be finite")
    start, stop = sample.sde_window
    if not 0 <= start < stop <= sampling.num_steps - 1:
        raise TrainingError(
            f"{name}: sde_window = {sample.sde_window}: must lie in 0..{sampling.num_steps - 1}, not empty"
        )
    if sample.num_steps != sampling.num_steps:
        raise TrainingError(f"{name}: num_steps = {sample.num_steps}: must be {sampling.num_steps}")
    if sample.noise_level != sampling.noise_level:
        raise TrainingError(f"{name}: noise_level = {sample.noise_level}: must be {sampling.noise_level}")
    _check_trajectory(name, sample, stop - start)


def _check_trajectory(name: str, sample: TrainingSample, window: int) -> None:
    if sample.log_probs.shape != (window,):
        raise TrainingError(
            f"{name}: {sample.log_probs.size} log-probs: must be {window}, one a step of its SDE window"
        )
    if not np.isfinite(sample.log_probs).all():
        raise TrainingError(f"{name}: log-probs = {sample.log_probs.tolist()}: must be finite")
    if sample.window_latents.ndim != 3 or len(sample.window_latents) != window + 1:
        raise TrainingError(
            f"{name}: window latents of shape {sample.window_latents.shape}: must be ({window + 1}, L, C)"
        )
    if not np.isfinite(sample.window_latents).all():
        raise TrainingError(f"{name}: window latents: must be finite")


def _check_group(prompt_id: str, group: Sequence[TrainingSample], group_size: int) -> None:
    if len(group) != group_size:
        raise TrainingError(f"prompt {prompt_id}: {len(group)} samples: must be group_size = {group_size}")
    if len({sample.seed for sample in group}) != group_size:
        raise TrainingError(f"prompt {prompt_id}: two samples share a seed: must be {group_size} different ones")
    windows = {sample.sde_window for sample in group}
    if len(windows) != 1:
        raise TrainingError(f"prompt {prompt_id}: SDE windows {sorted(windows)}: a group must share one")
