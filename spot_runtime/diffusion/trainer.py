"""One GRPO training step of a policy on a transformer. Owns old log-probs, gradient and update; never samples or scores.

`GrpoTrainer.train` is a pure function of its arguments: the resident model is only a place to compute. Samples go through in one order,
the gradient of an optimizer step is a sum over its samples divided by their number, so it does not depend on how they are batched.

Old log-probs are the rollouts' as long as each is within clip_range / 10 of what the trainer itself finds before its first update; every
row before that update is such a probe, and costs nothing. Where one is not, all are computed again with the policy that sampled, at the
price of a forward pass, and then ratios before the first update must be 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from spot_runtime.config import GrpoConfig, SamplingConfig
from spot_runtime.diffusion.adapter import ALPHA_KEY, Adapter
from spot_runtime.diffusion.batch import TrainingSample, checked_batch, split_by_prompt
from spot_runtime.diffusion.embeddings import PromptEncoder
from spot_runtime.diffusion.geometry import model_folder, read_json
from spot_runtime.diffusion.meter import Meter, check_finite, gathered, loss_metrics, reward_metrics
from spot_runtime.diffusion.optimizer import moments, restored_adamw
from spot_runtime.diffusion.preflight import available_bytes, check_memory, held_bytes, kept_by_rows, needs
from spot_runtime.diffusion.pricing import OldPolicy, Pricer, Rows
from spot_runtime.diffusion.ranks import Alone, Ranks
from spot_runtime.diffusion.sharding import like, shard, to_numpy, whole
from spot_runtime.diffusion.sleep import Sleeper
from spot_runtime.diffusion.state import TrainerState
from spot_runtime.diffusion.trainable import Trainable, attach, base_dtype, initial_policy
from spot_runtime.diffusion.transformer import load_transformer, model_dtype
from spot_runtime.errors import PolicyMismatchError, TrainingError, UnseededError
from spot_runtime.rl.advantage import Advantages, advantages
from spot_runtime.rl.ema import update_ema
from spot_runtime.rl.guard import guarded_log_ratio
from spot_runtime.rl.kl import gaussian_kl
from spot_runtime.rl.loss import PolicyLoss, clipped_policy_loss
from spot_runtime.rl.sde import Transition

__all__ = ["GrpoTrainer", "TrainerState", "TrainingOutcome", "TrainingSample", "TrainingStoppedError"]

GAP_MAX: Final = 1e-2
"""Rounding, of bf16 models too, moves a log-prob by 1e-3 at most: beyond this the samples are of another policy, and refused."""


T = TypeVar("T")


class TrainingStoppedError(TrainingError):
    """The caller asked to stop; nothing of the step is kept."""


class _LogProbsDifferError(TrainingError):
    """The rollouts' log-probs cannot be used."""


@dataclass(frozen=True)
class TrainingOutcome:
    """The state after a training step, and its numbers by name."""

    state: TrainerState
    metrics: dict[str, float]


@dataclass
class _TrainingStep:
    """What one training step works on. `recomputed` has old log-probs and means by sample once they were computed again."""

    version: int
    batch: tuple[TrainingSample, ...]
    gains: Advantages
    sampling: SamplingConfig
    grpo: GrpoConfig
    policy: Trainable
    optimizer: torch.optim.AdamW
    ema: dict[str, Tensor]
    on_progress: Callable[[int, int], None]
    should_stop: Callable[[], bool]
    meter: Meter = field(default_factory=Meter)
    recomputed: dict[int, OldPolicy] = field(default_factory=dict)

    def chunks(self) -> Iterator[tuple[list[list[int]], int, int]]:
        """For each optimizer step: micro batches of indices, how many samples are left out, and rows in all."""
        for part in split_by_prompt(self.batch, self.grpo.optimizer_steps):
            kept = [index for index in part if self.gains.active[index] or self.grpo.kl_coefficient > 0]
            rows_in_part = sum(len(self.batch[index].log_probs) for index in part)
            yield list(_chunks(kept, self.grpo.micro_batch)), len(part) - len(kept), rows_in_part

    def samples(self, chunk: Sequence[int]) -> list[TrainingSample]:
        return [self.batch[index] for index in chunk]

    def check_stop(self) -> None:
        if self.should_stop():
            raise TrainingStoppedError(f"training of policy version {self.version} was stopped")


class GrpoTrainer:
    """A resident model that trains. On the CPU it sets torch's thread count for the whole process.

    With several `ranks` each process has such a trainer, every one is called with the same arguments, and all return the same outcome.
    """

    def __init__(self, model: str, *, device: str = "cpu", threads: int = 1, ranks: Ranks | None = None) -> None:
        if device == "cpu":
            torch.set_num_threads(threads)
        self._model = model
        self._folder = model_folder(model)
        self._device = torch.device(device)
        self.ranks: Ranks = ranks or Alone()
        self._encoder: PromptEncoder | None = None
        self._encoder_sleeper: Sleeper | None = None
        self._load(torch.float32)

    def _load(self, dtype: torch.dtype) -> None:
        """The base model, on the host and whole on every rank until a policy is attached."""
        self._transformer = load_transformer(self._folder, torch.device("cpu"), dtype)
        self._policy: Trainable | None = None
        self._sleeper = Sleeper([self._transformer], self._device)
        self._checked: set[tuple[object, ...]] = set()

    def _hold(self, dtype: torch.dtype) -> None:
        """The model awake, its base in `dtype`: read again where it is another one, since rounding cannot be undone."""
        if dtype != model_dtype(self._transformer):
            self._load(dtype)
        damage: UnseededError | None = None
        try:
            self._sleeper.wake()
        except UnseededError as error:
            damage = error
        if self.ranks.max(float(damage is not None)) > 0:
            raise damage or UnseededError("weights of another rank of the trainer woke up other than they fell asleep")

    def _price_as(self, grpo: GrpoConfig) -> None:
        noise_scheduler_config = read_json(self._folder, "scheduler/scheduler_config.json")
        dtype: torch.dtype = getattr(torch, grpo.compute_dtype)
        self._pricer = Pricer(self._transformer, noise_scheduler_config, self._device, dtype)
        if grpo.activation_checkpointing:
            self._transformer.enable_gradient_checkpointing()
        else:
            self._transformer.disable_gradient_checkpointing()

    def encode(self, prompts: Sequence[str]) -> list[np.ndarray]:
        """Embeddings as `PromptEncoder.encode`; the text encoder is loaded on the first call."""
        if self._encoder is None:
            self._encoder = PromptEncoder(self._model, device=str(self._device))
            self._encoder_sleeper = Sleeper([self._encoder.module], self._device)
        assert self._encoder_sleeper is not None
        self._encoder_sleeper.wake()
        return self._encoder.encode(prompts)

    @property
    def is_asleep(self) -> bool:
        """Whether a model is not on the device, so that there may be no room for it."""
        return self._sleeper.is_asleep or (self._encoder_sleeper is not None and self._encoder_sleeper.is_asleep)

    def sleep(self) -> None:
        """Gives the device's memory back until there is something to train or to encode; each rank its own."""
        self._sleeper.sleep()
        if self._encoder_sleeper is not None:
            self._encoder_sleeper.sleep()

    def initial_state(self, grpo: GrpoConfig, seed: int) -> TrainerState:
        """Version 0: a policy that changes nothing yet."""
        if grpo.trainable == "full":
            self._give_up_policy()
        return TrainerState(initial_policy(self._transformer, grpo, seed), {}, {}, 0, 0)

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
            on_progress: called with (samples done, samples in all) after each micro batch; where log-probs are computed again, each sample
                counts twice.
            should_stop: asked before each micro batch; True ends the step with TrainingStoppedError.

        Raises:
            PolicyMismatchError: `state` is another version.
            UnseededError: the model woke up other than it fell asleep; it never trains again.
            TrainingError: unfit samples (see `checked_batch`), log-probs of another policy, recomputed log-probs that do not give a
                ratio of 1, a gradient or number that is not finite, or a policy that did not change although some advantage was not zero.
        """
        self._hold(base_dtype(grpo))
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
            explored=[s.is_explored for s in batch],
        )
        policy = self._bind(state.adapter)
        self._price_as(grpo)
        self._preflight(policy, batch, sampling, grpo)  # before the moments are there, which it counts
        work = _TrainingStep(
            version=policy_version + 1,
            batch=batch,
            gains=gains,
            sampling=sampling,
            grpo=grpo,
            policy=policy,
            optimizer=restored_adamw(policy, state, grpo),
            ema=_ema(policy, state, grpo),
            on_progress=on_progress,
            should_stop=lambda: self.ranks.max(float(should_stop())) > 0,
        )
        self._train(work)
        work.meter = gathered(work.meter, self.ranks)
        return _outcome(state, work)

    def _bind(self, weights: Adapter) -> Trainable:
        """The model as the policy `weights`, without a trace of a step that was stopped or failed."""
        if self._policy is None or not self._policy.fits(weights):
            self._give_up_policy()
            self._transformer.to(self._device)
            self._policy = attach(self._transformer, weights)
            if self.ranks.mesh is not None:
                shard(self._transformer, self.ranks.mesh)
                self._policy.refresh()
            self._sleeper = Sleeper([self._transformer, self._policy.reference], self._device)
        self._policy.bind(weights)
        _zero_grad(self._policy)
        return self._policy

    def _give_up_policy(self) -> None:
        """The bare base model. What was sharded with a policy is loaded anew."""
        if self._policy is not None and self.ranks.mesh is not None:
            self._load(model_dtype(self._transformer))
        elif self._policy is not None:
            self._policy.detach()
            self._policy = None

    def _preflight(
        self, policy: Trainable, batch: Sequence[TrainingSample], sampling: SamplingConfig, grpo: GrpoConfig
    ) -> None:
        """Before the first step of its kind: does it fit? Of what it counts only the weights are on the device by then."""
        longest = max(batch, key=lambda sample: len(sample.embeds))
        window, tokens = len(longest.log_probs), longest.window_latents.shape[1]
        rows = grpo.micro_batch * window
        changing = (grpo.trainable, grpo.compute_dtype, grpo.activation_checkpointing, grpo.kl_coefficient > 0)
        kind = (tokens, len(longest.embeds), rows, grpo.lora_rank, grpo.ema_decay > 0, *changing)
        if kind in self._checked:
            return
        one = replace(longest, log_probs=longest.log_probs[:1], window_latents=longest.window_latents[:2])
        one = replace(one, sde_window=(longest.sde_window[0], longest.sde_window[0] + 1))

        def forward(count: int) -> Tensor:
            some = self._pricer.rows([one] * count, np.zeros(count, dtype=np.float32))
            return self._pricer.transition(some, sampling).log_prob

        kept = kept_by_rows(forward, self._transformer.transformer_blocks if grpo.activation_checkpointing else None)
        wanted = needs(self._transformer, policy.parameters, grpo, ranks=self.ranks.size, kept=kept, rows=rows)
        there = sum(held_bytes(module) for module in (self._transformer, policy.reference))
        least = -self.ranks.max(-float(available_bytes(self._device) + there))  # all stop or none
        check_memory(wanted, int(least), rows)
        self._checked.add(kind)

    def _train(self, work: _TrainingStep) -> None:
        started_s = time.monotonic()
        if work.grpo.log_probs != "recompute":
            try:
                self._take_updates(work)
                return
            except _LogProbsDifferError:
                if work.grpo.log_probs == "rollout":
                    raise
        self._recompute(work, started_s)
        self._take_updates(work)

    def _recompute(self, work: _TrainingStep, started_s: float) -> None:
        """Prices all rows with the policy that sampled, micro batch by micro batch as training will."""
        work.meter.forget_rows()
        _zero_grad(work.policy)
        done = 0
        for chunks, left_out, _ in work.chunks():
            done += left_out
            for turn in _chunks(chunks, self.ranks.size):
                work.check_stop()
                chunk = self._mine(turn)
                samples = work.samples(chunk)
                rows = self._pricer.rows(samples, work.gains.values[chunk])
                with torch.no_grad():
                    transition = self._pricer.transition(rows, work.sampling)
                windows = [len(sample.log_probs) for sample in samples]
                means = torch.split(transition.mean, windows) if work.grpo.ratio == "guard" else [None] * len(chunk)
                priced = zip(torch.split(transition.log_prob, windows), means, strict=True)
                work.recomputed |= {index: OldPolicy(*old) for index, old in zip(chunk, priced, strict=True)}
                done += sum(map(len, turn))
                work.on_progress(done, 2 * len(work.batch))
        work.meter.recomputed, work.meter.recompute_s = True, time.monotonic() - started_s

    def _take_updates(self, work: _TrainingStep) -> None:
        done = len(work.batch) if work.recomputed else 0
        total = done + len(work.batch)
        for chunks, left_out, rows_in_part in work.chunks():
            done += left_out
            for turn in _chunks(chunks, self.ranks.size):
                work.check_stop()
                self._accumulate(work, self._mine(turn), rows_in_part, idle=self.ranks.rank >= len(turn))
                done += sum(map(len, turn))
                work.on_progress(done, total)
            if chunks:
                self._update(work)
        work.on_progress(total, total)

    def _mine(self, turn: Sequence[list[int]]) -> list[int]:
        """This rank's micro batch of those that are taken together; where there are too few, the first one again."""
        return turn[self.ranks.rank] if self.ranks.rank < len(turn) else turn[0]

    def _accumulate(self, work: _TrainingStep, chunk: list[int], rows_in_part: int, *, idle: bool) -> None:
        """Adds this micro batch's share to the gradient; an idle rank adds nothing, and only computes beside the others."""
        grpo, meter = work.grpo, work.meter
        rows = self._pricer.rows(work.samples(chunk), work.gains.values[chunk])
        reference = self._reference_mean(rows, work) if grpo.kl_coefficient > 0 else None
        transition = self._pricer.transition(rows, work.sampling)
        if not meter.has_updated:
            self._probe(work, chunk, rows, transition, idle=idle)
        policy = self._policy_loss(work, chunk, rows, transition)
        total = policy.loss.sum()
        if reference is not None:
            divergence = gaussian_kl(transition.mean, reference, transition.std).sum()
            total = total + grpo.kl_coefficient * divergence
            meter.kl = (meter.kl or 0.0) + (0.0 if idle else divergence.item())
        (total * 0.0 if idle else total / rows_in_part).backward()  # type: ignore[no-untyped-call]
        if idle:
            return
        meter.loss += total.item()
        meter.rows += len(rows.advantage)
        meter.log_ratio.append(policy.log_ratio)
        meter.clipped.append(policy.clipped)

    def _policy_loss(self, work: _TrainingStep, chunk: list[int], rows: Rows, transition: Transition) -> PolicyLoss:
        guard = work.grpo.ratio == "guard"
        old = self._old_policy(work, chunk, rows, transition.std.detach(), with_mean=guard)
        if not guard:
            return clipped_policy_loss(transition.log_prob, old.log_prob, rows.advantage, work.grpo.clip_range)
        assert old.mean is not None
        log_ratio = guarded_log_ratio(transition.mean, old.mean, transition.std, rows.after)
        policy = clipped_policy_loss(log_ratio, torch.zeros_like(log_ratio), rows.advantage, work.grpo.clip_range)
        return replace(policy, loss=policy.loss * self._pricer.weight(rows, work.sampling))

    def _old_policy(
        self, work: _TrainingStep, chunk: list[int], rows: Rows, std: Tensor, *, with_mean: bool
    ) -> OldPolicy:
        if not work.recomputed:
            return self._pricer.rollout_policy(work.samples(chunk), rows, std, with_mean=with_mean)
        old = [work.recomputed[index] for index in chunk]
        means = [each.mean for each in old if each.mean is not None]
        return OldPolicy(torch.cat([each.log_prob for each in old]), torch.cat(means) if means else None)

    def _probe(self, work: _TrainingStep, chunk: list[int], rows: Rows, transition: Transition, *, idle: bool) -> None:
        """Before any update the policy in training is the one that sampled, so log-probs must agree, up to rounding."""
        log_prob = transition.log_prob.detach()
        samples = work.samples(chunk)
        rollout = self._pricer.rollout_policy(samples, rows, transition.std.detach(), with_mean=False)
        gap = (log_prob - rollout.log_prob).abs()
        if not idle:
            work.meter.first_gap.append(gap)
            work.meter.first_steps.append(rows.denoising_steps)
        most, bound = self.ranks.max(float(gap.max())), work.grpo.clip_range / 10
        _check_same_policy(most, max(GAP_MAX, bound))
        if work.recomputed:
            own = self._old_policy(work, chunk, rows, transition.std.detach(), with_mean=False)
            _check_ratio_is_one(self.ranks.max(float((torch.exp(log_prob - own.log_prob) - 1).abs().max())))
        elif most > bound:
            raise _LogProbsDifferError(
                f"log-probs differ from the rollouts' by {most:.3g}: must be <= clip_range / 10 = {bound:.3g}"
            )

    def _reference_mean(self, rows: Rows, work: _TrainingStep) -> Tensor:
        """μ of the base model; before the policy's own forward pass, since weights may move in their place."""
        work.policy.enable(False)
        try:
            with torch.no_grad():
                return self._pricer.transition(rows, work.sampling).mean
        finally:
            work.policy.enable(True)

    def _update(self, work: _TrainingStep) -> None:
        parameters = list(work.policy.parameters.values())
        norm = float(whole(torch.nn.utils.clip_grad_norm_(parameters, work.grpo.max_grad_norm)))
        if not math.isfinite(norm):
            raise TrainingError(f"gradient norm = {norm}: must be finite")
        work.optimizer.step()
        work.optimizer.zero_grad()
        work.meter.grad_norm.append(norm)
        if work.ema:
            update_ema(work.ema, work.policy.parameters, work.grpo.ema_decay)


def _check_same_policy(gap: float, bound: float) -> None:
    """Also where log-probs were recomputed: of another policy's samples their ratio would be 1 too."""
    if not gap <= bound:
        raise TrainingError(
            f"log-probs differ from the rollouts' by {gap:.3g}: must be <= {bound:g}, the samples are of another policy"
        )


def _check_ratio_is_one(off: float) -> None:
    if off != 0:
        raise TrainingError(
            f"ratio before the first update is off by {off:.3g}: must be exactly 1 with recomputed log-probs"
        )


def _chunks(items: Sequence[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])


def _zero_grad(policy: Trainable) -> None:
    for parameter in policy.parameters.values():
        parameter.grad = None


def _ema(policy: Trainable, state: TrainerState, grpo: GrpoConfig) -> dict[str, Tensor]:
    """The average so far, or the policy where none was kept; empty where none is wanted."""
    if not grpo.ema_decay:
        return {}
    source = state.ema or state.adapter
    return {name: like(source[name], p) for name, p in policy.parameters.items()}


def _outcome(before: TrainerState, work: _TrainingStep) -> TrainingOutcome:
    meter, weights = work.meter, work.policy.state()
    delta = _norm({name: weights[name] - before.adapter[name] for name in weights})
    if meter.has_updated and work.gains.active.any():
        _check_changed(max(meter.grad_norm), delta)
    constants = {name: array for name, array in weights.items() if name == ALPHA_KEY}
    after = TrainerState(
        adapter=weights,
        exp_avg=moments(work.policy, work.optimizer, "exp_avg"),
        exp_avg_sq=moments(work.policy, work.optimizer, "exp_avg_sq"),
        optimizer_steps=before.optimizer_steps + len(meter.grad_norm),
        policy_version=before.policy_version + 1,
        ema=constants | {name: to_numpy(average) for name, average in work.ema.items()} if work.ema else {},
    )
    metrics = reward_metrics(work.batch, work.gains) | loss_metrics(meter)
    metrics["adapter_delta_norm"] = delta
    metrics["adapter_norm"] = _norm({name: array for name, array in weights.items() if name != ALPHA_KEY})
    check_finite(metrics)
    return TrainingOutcome(after, metrics)


def _check_changed(gradient: float, delta: float) -> None:
    """Momentum and weight decay move a policy without a gradient too."""
    if gradient == 0 or delta == 0:
        raise TrainingError(
            f"policy did not change by its samples: gradient norm = {gradient:g}, norm of the update = {delta:g}: "
            "some advantage was not zero, so both must be > 0"
        )


def _norm(tensors: Adapter) -> float:
    return math.sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in tensors.values()))
