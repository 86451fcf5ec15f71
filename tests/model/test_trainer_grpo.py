import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from diffusion_rollouts import MODEL, NOISE_LEVEL, NUM_STEPS, PROMPTS, policy_of, random_adapter, training_samples

from spot_runtime.config import GrpoConfig, SamplingConfig
from spot_runtime.diffusion.adapter import ALPHA_KEY, adapter_digest, adapter_modules
from spot_runtime.diffusion.embeddings import PromptEncoder
from spot_runtime.diffusion.engine import DiffusersEngine
from spot_runtime.diffusion.geometry import model_folder, read_json
from spot_runtime.diffusion.schedule import sigmas
from spot_runtime.diffusion.trainer import (
    GrpoTrainer,
    TrainerState,
    TrainingOutcome,
    TrainingSample,
    TrainingStoppedError,
)
from spot_runtime.errors import PolicyMismatchError, TrainingError
from spot_runtime.types import PolicyRef

SAMPLING = SamplingConfig(num_steps=NUM_STEPS, noise_level=NOISE_LEVEL, sde_window_stop=4, sde_window_size=4)
GRPO = GrpoConfig(
    prompts_per_iteration=3,
    group_size=4,
    learning_rate=2e-3,
    optimizer_steps=1,
    micro_batch=8,
    lora_rank=4,
    lora_alpha=8,
)

OFF_POLICY = GRPO.model_copy(update={"clip_range": 0.5})
"""Wide enough to train on samples of another policy version."""


@pytest.fixture(scope="module")
def trainer() -> GrpoTrainer:
    return GrpoTrainer(MODEL)


@pytest.fixture(scope="module")
def engine() -> DiffusersEngine:
    engine = DiffusersEngine(MODEL)
    engine.load_policy(PolicyRef(), None)
    return engine


@pytest.fixture(scope="module")
def embeds() -> list[np.ndarray]:
    return PromptEncoder(MODEL).encode(PROMPTS)


@pytest.fixture(scope="module")
def samples(engine: DiffusersEngine, embeds: list[np.ndarray]) -> list[TrainingSample]:
    return training_samples(engine, embeds)


def train(
    trainer: GrpoTrainer,
    samples: Sequence[TrainingSample],
    state: TrainerState | None = None,
    grpo: GrpoConfig = GRPO,
    sampling: SamplingConfig = SAMPLING,
    **changes: object,
) -> TrainingOutcome:
    arguments = {
        "seed": 1,
        "policy_version": 0 if state is None else state.policy_version,
        "on_progress": lambda done, total: None,
        "should_stop": lambda: False,
    }
    return trainer.train(state, samples, sampling=sampling, grpo=grpo, **(arguments | changes))  # type: ignore[arg-type]


def with_grpo(**changes: object) -> GrpoConfig:
    return GRPO.model_copy(update=changes)


def test_rollout_log_probs_equal_the_trainers_before_the_first_update(
    trainer: GrpoTrainer, samples: list[TrainingSample]
) -> None:
    metrics = train(trainer, samples).metrics
    assert metrics["dlogp_first_max"] <= 1e-6
    assert metrics["ratio_min"] == pytest.approx(1, abs=1e-6)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-6)
    assert metrics["clip_fraction"] == 0
    assert sorted(name for name in metrics if name.startswith("dlogp_step")) == [f"dlogp_step_0{i}" for i in range(4)]


def test_they_still_do_with_a_trained_policy(
    trainer: GrpoTrainer, samples: list[TrainingSample], embeds: list[np.ndarray]
) -> None:
    """The whole circle: train, hand the adapter to an engine, sample with it, train on that."""
    first = train(trainer, samples)
    policy = policy_of(1, first.state.adapter)
    engine = DiffusersEngine(MODEL)
    engine.load_policy(policy, first.state.adapter)
    second = train(trainer, training_samples(engine, embeds, policy=policy), first.state)
    assert second.metrics["dlogp_first_max"] <= 1e-6
    assert second.state.policy_version == 2
    assert second.state.optimizer_steps == 2


def test_training_raises_the_reward(trainer: GrpoTrainer, engine: DiffusersEngine, embeds: list[np.ndarray]) -> None:
    """Six training steps on fresh rollouts brighten the same seeds' images, over a span that chance does not give."""
    grpo = with_grpo(learning_rate=4e-3, clip_range=1e-2)
    state, policy, means = None, PolicyRef(), []
    for version in range(6):
        rollouts = training_samples(engine, embeds, policy=policy)
        means.append(np.mean([s.reward for s in rollouts]))
        state = train(trainer, rollouts, state, grpo).state
        policy = policy_of(version + 1, state.adapter)
        engine.load_policy(policy, state.adapter)
    spread = np.std([s.reward for s in rollouts])
    assert means[-1] - means[0] > 0.2 * spread


def test_training_is_a_pure_function_of_its_arguments(trainer: GrpoTrainer, samples: list[TrainingSample]) -> None:
    """Same policy bit for bit on repeat, in any order of samples, after other training in between, and in another trainer."""
    want = train(trainer, samples)
    train(trainer, samples, want.state, OFF_POLICY.model_copy(update={"kl_coefficient": 0.1}))
    for again in (train(trainer, samples[::-1]), train(GrpoTrainer(MODEL), samples)):
        assert adapter_digest(again.state.adapter) == adapter_digest(want.state.adapter)
        assert again.metrics == want.metrics


def test_the_seed_only_draws_the_initial_adapter(trainer: GrpoTrainer, samples: list[TrainingSample]) -> None:
    one, other = train(trainer, samples, seed=1), train(trainer, samples, seed=2)
    assert adapter_digest(one.state.adapter) != adapter_digest(other.state.adapter)
    again, same = (train(trainer, samples, one.state, OFF_POLICY, seed=seed) for seed in (1, 2))
    assert adapter_digest(again.state.adapter) == adapter_digest(same.state.adapter)


def test_state_survives_its_flat_form(trainer: GrpoTrainer, samples: list[TrainingSample]) -> None:
    """Training goes on from saved tensors exactly as from the state itself: moments and counters included."""
    first = train(trainer, samples).state
    restored = TrainerState.from_tensors({name: array.copy() for name, array in first.tensors().items()})
    straight, resumed = (train(trainer, samples, state, OFF_POLICY) for state in (first, restored))
    assert adapter_digest(straight.state.adapter) == adapter_digest(resumed.state.adapter)
    cold = dataclasses.replace(first, exp_avg={}, exp_avg_sq={}, optimizer_steps=0)
    restarted = train(trainer, samples, cold, OFF_POLICY)
    assert adapter_digest(restarted.state.adapter) != adapter_digest(straight.state.adapter)


def test_a_state_without_its_counters_is_refused() -> None:
    with pytest.raises(TrainingError, match="must hold counters"):
        TrainerState.from_tensors({"adapter.x": np.zeros(1)})


def gradient(trainer: GrpoTrainer, samples: list[TrainingSample], grpo: GrpoConfig) -> np.ndarray:
    """Of a single optimizer step: exp_avg = (1 - β1) gradient after the first, before any clipping that binds."""
    state = train(trainer, samples, grpo=grpo).state
    return np.concatenate([state.exp_avg[name].ravel() for name in sorted(state.exp_avg)]) / 0.1


@pytest.mark.parametrize("kl_coefficient", [0.0, 0.5])
def test_the_gradient_does_not_depend_on_the_micro_batch(
    trainer: GrpoTrainer, samples: list[TrainingSample], kl_coefficient: float
) -> None:
    want = gradient(trainer, samples, with_grpo(micro_batch=12, kl_coefficient=kl_coefficient))
    for micro_batch in (1, 5):
        got = gradient(trainer, samples, with_grpo(micro_batch=micro_batch, kl_coefficient=kl_coefficient))
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


def closed_form_gradient(samples: list[TrainingSample], adapter: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gradient of -mean(A logp) in float64, with the adapter merged into the weights by hand: what GRPO's gradient is at ratio 1."""
    folder = model_folder(MODEL)
    model = QwenImageTransformer2DModel.from_pretrained(folder / "transformer").double().requires_grad_(False)
    schedule = sigmas(read_json(folder, "scheduler/scheduler_config.json"), NUM_STEPS, 64).double()
    factors = {}
    for module in adapter_modules(adapter):
        high = torch.tensor(adapter[f"{module}.lora_B.weight"]).double().requires_grad_()
        low = torch.tensor(adapter[f"{module}.lora_A.weight"]).double().requires_grad_()
        linear = model.get_submodule(module)
        torch.nn.utils.parametrize.register_parametrization(linear, "weight", _Merge(high, low))
        factors |= {f"{module}.lora_A.weight": low, f"{module}.lora_B.weight": high}
    rewards = {p: [s.reward for s in samples if s.prompt_id == p] for p in {s.prompt_id for s in samples}}
    batch_std = np.std([s.reward for s in samples])
    total = torch.zeros((), dtype=torch.float64)
    for s in samples:
        advantage = (s.reward - np.mean(rewards[s.prompt_id])) / (batch_std + 1e-4)
        for k, i in enumerate(range(*s.sde_window)):
            x, after = (torch.tensor(s.window_latents[j]).double()[None] for j in (k, k + 1))
            now, then = schedule[i], schedule[i + 1]
            text = torch.tensor(s.embeds).double()[None]
            v = model(x, text, None, now[None], [[(1, 8, 8)]], return_dict=False)[0]
            rate = NOISE_LEVEL**2 * now / (1 - (schedule[1] if i == 0 else now))
            mean = x + (v + rate / (2 * now) * (x + (1 - now) * v)) * (then - now)
            variance = rate * (now - then)
            total = total - advantage * (-((after - mean) ** 2) / (2 * variance)).mean()
    rows = sum(len(s.log_probs) for s in samples)
    (total / rows).backward()
    return {name: factor.grad.numpy() for name, factor in factors.items() if factor.grad is not None}


class _Merge(torch.nn.Module):
    def __init__(self, high: torch.Tensor, low: torch.Tensor) -> None:
        super().__init__()
        self.high, self.low = high, low

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + 2.0 * self.high @ self.low


@pytest.mark.parametrize("rank", [4, 16])
def test_the_gradient_is_that_of_an_independent_float64_implementation(
    trainer: GrpoTrainer, samples: list[TrainingSample], rank: int
) -> None:
    """In two parts and fused, and at a start where both factors have a gradient."""
    fresh = trainer.initial_state(with_grpo(lora_rank=rank, lora_alpha=2 * rank), seed=1)
    start = dataclasses.replace(fresh, adapter=random_adapter(fresh.adapter, seed=2, scale=1e-4))
    want = closed_form_gradient(samples, dict(start.adapter))
    got = train(trainer, samples, start).state.exp_avg
    names = [name for name in want if np.abs(want[name]).max() > 0]
    assert len(names) >= 60
    flat_want = np.concatenate([want[name].ravel() for name in names])
    flat_got = np.concatenate([got[name].ravel() for name in names]) / 0.1
    assert np.linalg.norm(flat_got - flat_want) <= 1e-4 * np.linalg.norm(flat_want)


def test_the_reference_divergence_is_zero_before_training_and_pulls_back_after(
    trainer: GrpoTrainer, samples: list[TrainingSample]
) -> None:
    grpo = with_grpo(kl_coefficient=1.0, optimizer_steps=3)
    outcome = train(trainer, samples, grpo=grpo)
    assert train(trainer, samples, grpo=with_grpo(kl_coefficient=1.0)).metrics["kl_reference"] == 0
    assert outcome.metrics["kl_reference"] > 0


def flat(samples: list[TrainingSample], prompts: set[str]) -> list[TrainingSample]:
    return [dataclasses.replace(s, reward=1.0) if s.prompt_id in prompts else s for s in samples]


def test_flat_groups_count_in_the_batch_but_give_no_gradient(
    trainer: GrpoTrainer, samples: list[TrainingSample]
) -> None:
    outcome = train(trainer, flat(samples, {"prompt-0"}))
    assert outcome.metrics["zero_variance_groups"] == 1
    assert outcome.metrics["trained_rows"] == 2 * 4 * 2
    assert outcome.metrics["groups"] == 3


def test_all_groups_flat_is_no_error_and_leaves_the_policy(trainer: GrpoTrainer, samples: list[TrainingSample]) -> None:
    first = train(trainer, samples).state
    outcome = train(trainer, flat(samples, {"prompt-0", "prompt-1", "prompt-2"}), first)
    assert adapter_digest(outcome.state.adapter) == adapter_digest(first.adapter)
    assert (outcome.metrics["policy_changed"], outcome.metrics["zero_variance_groups"]) == (0, 3)
    assert outcome.metrics["adapter_delta_norm"] == 0
    assert (outcome.state.policy_version, outcome.state.optimizer_steps) == (2, 1)


def shifted(samples: list[TrainingSample], by: float) -> list[TrainingSample]:
    return [dataclasses.replace(s, log_probs=s.log_probs + np.float32(by)) for s in samples]


@pytest.mark.parametrize("log_probs", ["auto", "rollout", "recompute"])
def test_log_probs_of_another_policy_are_refused(
    trainer: GrpoTrainer, samples: list[TrainingSample], log_probs: str
) -> None:
    """Recomputed ones too, whose ratio would be 1 all the same."""
    with pytest.raises(
        TrainingError, match=r"differ from the rollouts' by 0\.02: must be <= 0\.01, the samples are of"
    ):
        train(trainer, shifted(samples, 2e-2), grpo=with_grpo(log_probs=log_probs))


def test_log_probs_that_the_probe_does_not_confirm_are_recomputed_and_say_so(
    trainer: GrpoTrainer, samples: list[TrainingSample]
) -> None:
    """The update is the one that exact log-probs of the rollouts give."""
    want, got = train(trainer, samples), train(trainer, shifted(samples, 2e-4))
    assert (want.metrics["log_probs_recomputed"], want.metrics["log_probs_recompute_s"]) == (0, 0)
    assert got.metrics["log_probs_recomputed"] == 1
    assert got.metrics["log_probs_recompute_s"] > 0
    assert got.metrics["dlogp_first_max"] == pytest.approx(2e-4, abs=1e-5)
    assert (got.metrics["ratio_min"], got.metrics["ratio_max"]) == (1, 1)
    for name, weights in want.state.adapter.items():
        np.testing.assert_allclose(got.state.adapter[name], weights, rtol=0, atol=2e-4)


def test_only_the_rollouts_log_probs_may_be_asked_for(trainer: GrpoTrainer, samples: list[TrainingSample]) -> None:
    with pytest.raises(TrainingError, match=r"by 0\.0002: must be <= clip_range / 10 = 0\.0001"):
        train(trainer, shifted(samples, 2e-4), grpo=with_grpo(log_probs="rollout"))


@pytest.mark.parametrize("ratio", ["plain", "guard"])
def test_with_recomputed_log_probs_the_first_ratio_is_exactly_one(
    trainer: GrpoTrainer, samples: list[TrainingSample], ratio: str
) -> None:
    grpo = with_grpo(log_probs="recompute", ratio=ratio, micro_batch=5)
    metrics = train(trainer, samples, grpo=grpo).metrics
    assert [metrics[f"ratio_{name}"] for name in ("min", "mean", "max")] == [1, 1, 1]
    assert metrics["log_probs_recomputed"] == 1


def test_a_first_ratio_that_is_not_one_stops_the_trainer(
    trainer: GrpoTrainer, samples: list[TrainingSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    recompute = GrpoTrainer._recompute

    def broken(self: GrpoTrainer, work: Any, started_s: float) -> None:
        recompute(self, work, started_s)
        work.recomputed[0].log_prob.add_(1e-6)

    monkeypatch.setattr(GrpoTrainer, "_recompute", broken)
    with pytest.raises(TrainingError, match=r"ratio before the first update is off by .*e-0.: must be exactly 1"):
        train(trainer, samples, grpo=with_grpo(log_probs="recompute"))


def test_guarded_ratios_are_near_one_with_the_rollouts_log_probs_and_move_with_updates(
    trainer: GrpoTrainer, samples: list[TrainingSample]
) -> None:
    first = train(trainer, samples, grpo=with_grpo(ratio="guard")).metrics
    assert first["log_probs_recomputed"] == 0
    assert first["ratio_max"] == pytest.approx(1, abs=1e-6)
    later = train(trainer, samples, grpo=with_grpo(ratio="guard", optimizer_steps=3)).metrics
    assert later["ratio_max"] > 1 + 1e-5
    assert later["policy_changed"] == 1


def test_the_guarded_gradient_does_not_depend_on_the_micro_batch(
    trainer: GrpoTrainer, samples: list[TrainingSample]
) -> None:
    want, got = (
        gradient(trainer, samples, with_grpo(ratio="guard", max_grad_norm=1e6, micro_batch=m)) for m in (12, 5)
    )
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


def test_the_average_of_the_policy_is_kept_from_step_to_step(
    trainer: GrpoTrainer, samples: list[TrainingSample]
) -> None:
    start = trainer.initial_state(GRPO, seed=1)
    first = train(trainer, samples, start, with_grpo(ema_decay=0.75)).state
    second = train(trainer, samples, first, OFF_POLICY.model_copy(update={"ema_decay": 0.75})).state
    assert set(first.ema) == set(first.adapter)
    for name, weights in start.adapter.items():
        once = 0.75 * weights + 0.25 * first.adapter[name]
        np.testing.assert_allclose(first.ema[name], once, rtol=0, atol=1e-6)
        np.testing.assert_allclose(second.ema[name], 0.75 * once + 0.25 * second.adapter[name], rtol=0, atol=1e-6)
    restored = TrainerState.from_tensors(second.tensors())
    assert adapter_digest(restored.ema) == adapter_digest(second.ema)
    assert train(trainer, samples).state.ema == {}


FULL = with_grpo(trainable="full", learning_rate=1e-4)


def test_all_weights_can_be_trained_and_go_back_to_the_rollout_worker(
    trainer: GrpoTrainer, engine: DiffusersEngine, samples: list[TrainingSample], embeds: list[np.ndarray]
) -> None:
    """The whole circle without an adapter: the engine computes what the trainer does, and has its base back afterwards."""
    first = train(trainer, samples, grpo=FULL)
    assert first.metrics["dlogp_first_max"] <= 1e-6
    assert "time_text_embed.timestep_embedder.linear_1.weight" in first.state.adapter
    policy = policy_of(1, first.state.adapter)
    engine.load_policy(policy, first.state.adapter)
    rollouts = training_samples(engine, embeds, policy=policy)
    second = train(trainer, rollouts, TrainerState.from_tensors(first.state.tensors()), FULL)
    assert second.metrics["dlogp_first_max"] <= 1e-6
    assert (second.state.policy_version, second.metrics["policy_changed"]) == (2, 1)
    engine.load_policy(PolicyRef(), None)  # a worker keeps the last few policies only
    again = training_samples(engine, embeds)
    assert all(np.array_equal(a.window_latents, b.window_latents) for a, b in zip(again, samples, strict=True))
    assert train(trainer, samples).metrics["dlogp_first_max"] <= 1e-6


def test_the_reference_of_a_whole_policy_is_the_base_model(trainer: GrpoTrainer, samples: list[TrainingSample]) -> None:
    grpo = FULL.model_copy(update={"kl_coefficient": 1.0})
    first = train(trainer, samples, grpo=grpo)
    assert first.metrics["kl_reference"] == 0
    later = train(trainer, samples, first.state, grpo.model_copy(update={"clip_range": 0.5}))
    assert later.metrics["kl_reference"] > 0
    assert later.metrics["policy_changed"] == 1


def test_a_whole_policy_with_a_tensor_too_few_is_refused(
    trainer: GrpoTrainer, engine: DiffusersEngine, samples: list[TrainingSample]
) -> None:
    state = trainer.initial_state(FULL, seed=1)
    short = {name: array for name, array in state.adapter.items() if name != "proj_out.bias"}
    with pytest.raises(PolicyMismatchError, match=r"differ in 1 tensors, the first proj_out\.bias: absent"):
        engine.load_policy(policy_of(1, short), short)
    with pytest.raises(PolicyMismatchError, match="differ in 1 tensors"):
        train(trainer, samples, dataclasses.replace(state, adapter=short), FULL)


def test_a_foreign_policy_version_is_refused(trainer: GrpoTrainer, samples: list[TrainingSample]) -> None:
    state = train(trainer, samples).state
    with pytest.raises(PolicyMismatchError, match="holds policy version 1: samples are of 0"):
        train(trainer, samples, state, policy_version=0)


def test_a_policy_that_an_update_did_not_move_is_an_error(
    trainer: GrpoTrainer, samples: list[TrainingSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)
    with pytest.raises(TrainingError, match="policy did not change"):
        train(trainer, samples)


@pytest.mark.parametrize(
    ("weight", "message"),
    [(1e30, "gradient norm = inf: must be finite"), (3e38, "log-probs differ from the rollouts' by nan")],
)
def test_a_gradient_or_a_log_prob_that_is_not_finite_is_an_error(
    trainer: GrpoTrainer, samples: list[TrainingSample], weight: float, message: str
) -> None:
    """B is zero at the start, so a huge A leaves the forward pass as it is, and a still larger one overflows in it."""
    start = trainer.initial_state(GRPO, seed=1)
    name = next(name for name in start.adapter if name.endswith("0.attn.to_q.lora_A.weight"))
    broken = dict(start.adapter) | {name: np.full_like(start.adapter[name], weight)}
    with pytest.raises(TrainingError, match=message):
        train(trainer, samples, dataclasses.replace(start, adapter=broken))
    assert train(trainer, samples).metrics["policy_changed"] == 1


def test_half_a_group_is_refused_and_the_trainer_stays_usable(
    trainer: GrpoTrainer, samples: list[TrainingSample]
) -> None:
    with pytest.raises(TrainingError, match="3 samples: must be group_size = 4"):
        train(trainer, samples[1:])
    assert train(trainer, samples).metrics["policy_changed"] == 1


def test_stopping_ends_the_step_and_keeps_nothing(trainer: GrpoTrainer, samples: list[TrainingSample]) -> None:
    want = train(trainer, samples)
    calls = iter([False, True])
    with pytest.raises(TrainingStoppedError, match="policy version 1 was stopped"):
        train(trainer, samples, should_stop=lambda: next(calls))
    assert adapter_digest(train(trainer, samples).state.adapter) == adapter_digest(want.state.adapter)


def test_progress_counts_every_sample_once(trainer: GrpoTrainer, samples: list[TrainingSample]) -> None:
    seen: list[tuple[int, int]] = []
    train(
        trainer,
        flat(samples, {"prompt-0"}),
        grpo=with_grpo(micro_batch=4),
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(8, 12), (12, 12), (12, 12)]


def test_several_optimizer_steps_split_the_prompts(trainer: GrpoTrainer, samples: list[TrainingSample]) -> None:
    outcome = train(trainer, samples, grpo=with_grpo(optimizer_steps=3))
    assert outcome.metrics["optimizer_steps"] == 3
    assert outcome.state.optimizer_steps == 3
    assert outcome.metrics["ratio_max"] > 1


def test_alpha_is_part_of_the_policy(trainer: GrpoTrainer, samples: list[TrainingSample]) -> None:
    assert train(trainer, samples).state.adapter[ALPHA_KEY].tolist() == [8.0]
