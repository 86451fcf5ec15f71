"""One GRPO training step of a LoRA policy on a frozen transformer. Owns recomputation, gradient and update; never samples or scores.

`GrpoTrainer.train` is a pure function of its arguments: the resident model is only a place to compute. Samples go through in one order,
the gradient of an optimizer step is a sum over its samples divided by their number, so it does not depend on how they are batched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

from spot_runtime.config import GrpoConfig, SamplingConfig
from spot_runtime.diffusion.adapter import ALPHA_KEY, Adapter, AttachedAdapter, initial_adapter
from spot_runtime.diffusion.batch import TrainingSample, checked_batch, split_by_prompt
from spot_runtime.diffusion.embeddings import PromptEncoder
from spot_runtime.diffusion.geometry import model_folder, read_json
from spot_runtime.diffusion.schedule import sigmas
from spot_runtime.diffusion.state import TrainerState
from spot_runtime.diffusion.transformer import load_transformer, predict_velocity
from spot_runtime.errors import PolicyMismatchError, TrainingError
from spot_runtime.rl.advantage import Advantages, advantages
from spot_runtime.rl.kl import gaussian_kl
from spot_runtime.rl.loss import clipped_policy_loss
from spot_runtime.rl.sde import STEPS, Transition

__all__ = ["GrpoTrainer", "TrainerState", "TrainingOutcome", "TrainingSample", "TrainingStoppedError"]

ADAM_BETAS: Final = (0.9, 0.95)
"""A short second moment: an iteration is one or two optimizer steps, and the gradient's scale moves with the rewards' spread."""
ADAM_EPS: Final = 1e-8


class TrainingStoppedError(TrainingError):
    """The caller asked to stop; nothing of the step is kept."""


@dataclass(frozen=True)
class TrainingOutcome:
    """The state after a training step, and its numbers by name."""

    state: TrainerState
    metrics: dict[str, float]


@dataclass(frozen=True)
class _Rows:
    """A micro batch: one row for each step of the SDE window of each sample. Shapes [B, L, C] and [B]."""

    before: Tensor
    after: Tensor
    embeds: list[Tensor]
    denoising_steps: Tensor
    log_prob_old: Tensor
    advantage: Tensor


@dataclass
class _Meter:
    """Numbers of all rows seen in one training step; `first_*` only of those before its first update."""

    loss: float = 0.0
    kl: float = 0.0
    rows: int = 0
    ratio: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)
    first_gap: list[Tensor] = field(default_factory=list)
    first_steps: list[Tensor] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)


class GrpoTrainer:
    """A resident model that trains. On the CPU it sets torch's thread count for the whole process."""

    def __init__(self, model: str, *, device: str = "cpu", threads: int = 1) -> None:
        if device == "cpu":
            torch.set_num_threads(threads)
        self._model = model
        self._folder = model_folder(model)
        self._device = torch.device(device)
        self._transformer = load_transformer(self._folder, self._device, torch.float32)
        self._scheduler_config = read_json(self._folder, "scheduler/scheduler_config.json")
        self._attached: AttachedAdapter | None = None
        self._encoder: PromptEncoder | None = None

    def encode(self, prompts: Sequence[str]) -> list[np.ndarray]:
        """Embeddings as `PromptEncoder.encode`; the text encoder is loaded on the first call."""
        if self._encoder is None:
            self._encoder = PromptEncoder(self._model, device=str(self._device))
        return self._encoder.encode(prompts)

    def initial_state(self, grpo: GrpoConfig, seed: int) -> TrainerState:
        """Version 0: an adapter that changes nothing yet."""
        return TrainerState(initial_adapter(self._transformer, grpo.lora_rank, grpo.lora_alpha, seed), {}, {}, 0, 0)

    def train(
        self,
        state: TrainerState | None,
        samples: Sequence[TrainingSample],
        *,
        sampling: SamplingConfig,
        grpo: GrpoConfig,
        seed: int,
        policy_version: int,
        on_progress: Callable[[int, int], None],
        should_stop: Callable[[], bool],
    ) -> TrainingOutcome:
        """One training step.

        Args:
            state: the policy that made `samples`, with its optimizer; None is version 0, seeded by `seed`.
            policy_version: version of the policy that made the samples; the outcome is the next.
            on_progress: called with (samples done, samples in all).
            should_stop: asked before each micro batch; True ends the step with TrainingStoppedError.

        Raises:
            PolicyMismatchError: `state` is another version.
            TrainingError: unfit samples (see `checked_batch`), log-probs that do not match the policy, a gradient that is not finite, or a
                policy that did not change although some advantage was not zero.
        """
        state = state or self.initial_state(grpo, seed)
        if state.policy_version != policy_version:
            raise PolicyMismatchError(
                f"trainer holds policy version {state.policy_version}: samples are of {policy_version}"
            )
        batch = checked_batch(samples, sampling=sampling, grpo=grpo)
        gains = advantages(
            [s.reward for s in batch],
            [s.prompt_id for s in batch],
            normalisation=grpo.advantage_normalisation,
            advantage_clip=grpo.advantage_clip,
        )
        adapter = self._bind(state.adapter)
        optimizer = _optimizer(adapter, state, grpo)
        meter = _Meter()
        done = 0
        for part in split_by_prompt(batch, grpo.optimizer_steps):
            rows_in_part = sum(len(batch[index].log_probs) for index in part)
            kept = [index for index in part if gains.active[index] or grpo.kl_coefficient > 0]
            done += len(part) - len(kept)
            for chunk in _chunks(kept, grpo.micro_batch):
                if should_stop():
                    raise TrainingStoppedError(f"training of policy version {policy_version + 1} was stopped")
                rows = self._rows([batch[index] for index in chunk], gains.values[chunk])
                self._accumulate(rows, rows_in_part, sampling, grpo, meter)
                done += len(chunk)
                on_progress(done, len(batch))
            if kept:
                self._check_first_ratio(meter, grpo)
                self._update(adapter, optimizer, grpo, meter)
        on_progress(len(batch), len(batch))
        return _outcome(state, adapter, optimizer, batch, gains, meter)

    def _bind(self, weights: Adapter) -> AttachedAdapter:
        """The model as the policy `weights`, without a trace of a step that was stopped or failed."""
        if self._attached is None or not self._attached.fits(weights):
            if self._attached is not None:
                self._attached.detach()
            self._attached = AttachedAdapter(self._transformer, weights)
        self._attached.bind(weights)
        for parameter in self._attached.parameters.values():
            parameter.grad = None
        return self._attached

    def _rows(self, samples: Sequence[TrainingSample], advantage: np.ndarray) -> _Rows:
        windows = [len(sample.log_probs) for sample in samples]
        texts = [torch.from_numpy(np.ascontiguousarray(sample.embeds)).to(self._device) for sample in samples]
        return _Rows(
            before=self._tensor(np.concatenate([sample.window_latents[:-1] for sample in samples])),
            after=self._tensor(np.concatenate([sample.window_latents[1:] for sample in samples])),
            embeds=[text for text, window in zip(texts, windows, strict=True) for _ in range(window)],
            denoising_steps=torch.cat([torch.arange(*sample.sde_window) for sample in samples]).to(self._device),
            log_prob_old=self._tensor(np.concatenate([sample.log_probs for sample in samples])),
            advantage=self._tensor(np.repeat(advantage, windows)),
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).to(self._device)

    def _accumulate(
        self, rows: _Rows, rows_in_part: int, sampling: SamplingConfig, grpo: GrpoConfig, meter: _Meter
    ) -> None:
        """Adds this micro batch's share to the gradient."""
        transition = self._transition(rows, sampling)
        policy = clipped_policy_loss(transition.log_prob, rows.log_prob_old, rows.advantage, grpo.clip_range)
        total = policy.loss.sum()
        if grpo.kl_coefficient > 0:
            divergence = gaussian_kl(transition.mean, self._reference_mean(rows, sampling), transition.std).sum()
            total = total + grpo.kl_coefficient * divergence
            meter.kl += divergence.item()
        (total / rows_in_part).backward()  # type: ignore[no-untyped-call]
        meter.loss += total.item()
        meter.rows += len(rows.advantage)
        meter.ratio.append(policy.ratio)
        meter.clipped.append(policy.clipped)
        if not meter.grad_norm:
            meter.first_gap.append((transition.log_prob.detach() - rows.log_prob_old).abs())
            meter.first_steps.append(rows.denoising_steps)

    def _transition(self, rows: _Rows, sampling: SamplingConfig) -> Transition:
        tokens = rows.before.shape[1]
        schedule = sigmas(self._scheduler_config, sampling.num_steps, tokens).to(self._device)
        sigma, sigma_next = schedule[rows.denoising_steps], schedule[rows.denoising_steps + 1]
        velocity = predict_velocity(self._transformer, rows.before, sigma, rows.embeds, _grid(tokens))
        level = torch.full_like(sigma, sampling.noise_level)
        return STEPS[sampling.sde](
            velocity, rows.before, sigma, sigma_next, schedule[1].expand_as(sigma), level, sample=rows.after
        )

    def _reference_mean(self, rows: _Rows, sampling: SamplingConfig) -> Tensor:
        assert self._attached is not None
        self._attached.enable(False)
        try:
            with torch.no_grad():
                return self._transition(rows, sampling).mean
        finally:
            self._attached.enable(True)

    def _check_first_ratio(self, meter: _Meter, grpo: GrpoConfig) -> None:
        """Before any update the policy in training is the one that sampled, so log-probs must agree (exactly, up to rounding)."""
        if meter.grad_norm or self._device.type != "cpu":
            return
        gap = float(torch.cat(meter.first_gap).max())
        bound = grpo.clip_range / 10
        if not gap <= bound:
            raise TrainingError(
                f"log-probs differ from the rollouts' by {gap:.3g}: must be <= clip_range / 10 = {bound:.3g}"
            )

    def _update(
        self, adapter: AttachedAdapter, optimizer: torch.optim.Optimizer, grpo: GrpoConfig, meter: _Meter
    ) -> None:
        norm = float(torch.nn.utils.clip_grad_norm_(list(adapter.parameters.values()), grpo.max_grad_norm))
        if not math.isfinite(norm):
            raise TrainingError(f"gradient norm = {norm}: must be finite")
        optimizer.step()
        optimizer.zero_grad()
        meter.grad_norm.append(norm)


def _grid(tokens: int) -> tuple[int, int]:
    """Rows and columns of a square image's latent tokens."""
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise TrainingError(f"{tokens} latent tokens: must be a square number, images are square")
    return side, side


def _chunks(indices: Sequence[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(indices), size):
        yield list(indices[start : start + size])


def _optimizer(adapter: AttachedAdapter, state: TrainerState, grpo: GrpoConfig) -> torch.optim.AdamW:
    """AdamW over the adapter with the moments of `state`. A matrix that the image never sees (text output of the last block) has none."""
    optimizer = torch.optim.AdamW(
        adapter.parameters.values(),
        lr=grpo.learning_rate,
        betas=ADAM_BETAS,
        eps=ADAM_EPS,
        weight_decay=grpo.weight_decay,
    )
    for name, parameter in adapter.parameters.items():
        if name not in state.exp_avg:
            continue
        optimizer.state[parameter] = {
            "step": torch.tensor(float(state.optimizer_steps)),
            "exp_avg": torch.tensor(state.exp_avg[name], device=parameter.device),
            "exp_avg_sq": torch.tensor(state.exp_avg_sq[name], device=parameter.device),
        }
    return optimizer


def _outcome(
    before: TrainerState,
    adapter: AttachedAdapter,
    optimizer: torch.optim.AdamW,
    batch: Sequence[TrainingSample],
    gains: Advantages,
    meter: _Meter,
) -> TrainingOutcome:
    weights = adapter.state()
    delta = _norm({name: weights[name] - before.adapter[name] for name in weights})
    if meter.grad_norm and gains.active.any() and delta == 0:
        raise TrainingError("policy did not change: some advantage was not zero, so the update must move it")
    after = TrainerState(
        adapter=weights,
        exp_avg=_moments(adapter, optimizer, "exp_avg"),
        exp_avg_sq=_moments(adapter, optimizer, "exp_avg_sq"),
        optimizer_steps=before.optimizer_steps + len(meter.grad_norm),
        policy_version=before.policy_version + 1,
    )
    metrics = _reward_metrics(batch, gains) | _loss_metrics(meter)
    metrics["adapter_delta_norm"] = delta
    metrics["adapter_norm"] = _norm({name: array for name, array in weights.items() if name != ALPHA_KEY})
    return TrainingOutcome(after, metrics)


def _moments(adapter: AttachedAdapter, optimizer: torch.optim.AdamW, moment: str) -> dict[str, np.ndarray]:
    return {
        name: optimizer.state[parameter][moment].cpu().numpy().copy()
        for name, parameter in adapter.parameters.items()
        if parameter in optimizer.state
    }


def _norm(tensors: Adapter) -> float:
    return math.sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in tensors.values()))


def _reward_metrics(batch: Sequence[TrainingSample], gains: Advantages) -> dict[str, float]:
    rewards = np.array([sample.reward for sample in batch])
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "group_std_mean": gains.group_std_mean,
        "groups": float(gains.groups),
        "zero_variance_groups": float(gains.zero_variance_groups),
        "advantage_abs_mean": float(np.abs(gains.values).mean()),
    }


def _loss_metrics(meter: _Meter) -> dict[str, float]:
    """Means over the rows that took part; a step without any (all groups flat) has none of the ratio's numbers."""
    metrics = {
        "optimizer_steps": float(len(meter.grad_norm)),
        "trained_rows": float(meter.rows),
        "policy_changed": float(bool(meter.grad_norm)),
    }
    if not meter.rows:
        return metrics
    ratio, clipped = torch.cat(meter.ratio), torch.cat(meter.clipped)
    metrics |= {
        "loss": meter.loss / meter.rows,
        "ratio_mean": float(ratio.mean()),
        "ratio_min": float(ratio.min()),
        "ratio_max": float(ratio.max()),
        "clip_fraction": float(clipped.float().mean()),
        "kl_rollout": float((ratio - 1 - ratio.log()).mean()),
        "kl_reference": meter.kl / meter.rows,
        "grad_norm": float(np.mean(meter.grad_norm)),
        "grad_norm_max": float(np.max(meter.grad_norm)),
    }
    return metrics | _gap_metrics(meter)


def _gap_metrics(meter: _Meter) -> dict[str, float]:
    """|Δlogp| between trainer and rollout before the first update: over all rows, and by denoising step."""
    gap, steps = torch.cat(meter.first_gap), torch.cat(meter.first_steps)
    by_step = {f"dlogp_step_{i:02d}": float(gap[steps == i].mean()) for i in sorted(set(steps.tolist()))}
    return {"dlogp_first_max": float(gap.max()), "dlogp_first_mean": float(gap.mean())} | by_step
