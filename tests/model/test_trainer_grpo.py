import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from diffusion_rollouts import MODEL, NOISE_LEVEL, NUM_STEPS, PROMPTS, policy_of, random_adapter, training_samples

from spot_runtime.config import GrpoConfig, SamplingConfig
from spot_runtime.diffusion import trainer as trainer_module
from spot_runtime.diffusion.adapter import ALPHA_KEY, adapter_digest, adapter_modules
from spot_runtime.diffusion.embeddings import PromptEncoder
from spot_runtime.diffusion.engine import DiffusersEngine
from spot_runtime.diffusion.geometry import model_folder, read_json
from spot_runtime.diffusion.meter import Meter, check_finite, loss_metrics
from spot_runtime.diffusion.schedule import sigmas
from spot_runtime.diffusion.trainer import (
    GrpoTrainer,
    TrainerState,
    TrainingOutcome,
    TrainingSample,
    TrainingStoppedError,
)
from spot_runtime.errors import PolicyMismatchError, TrainingError
from spot_runtime.rl.loss import PolicyLoss
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

KL_COEFFICIENT = 1.0
"""At `moved_start` the pull of the reference is about as strong as that of the rewards."""
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


def gradient(
    trainer: GrpoTrainer, samples: list[TrainingSample], grpo: GrpoConfig, start: TrainerState | None = None
) -> np.ndarray:
    """Of a single optimizer step: exp_avg = (1 - β1) gradient after the first, before any clipping that binds."""
    state = train(trainer, samples, start, grpo=grpo).state
    return np.concatenate([state.exp_avg[name].ravel() for name in sorted(state.exp_avg)]) / 0.1


def moved_start(
    trainer: GrpoTrainer, embeds: list[np.ndarray], rank: int = 4
) -> tuple[TrainerState, list[TrainingSample]]:
    """Where both factors have a gradient and the policy is not the reference, and samples that it drew."""
    fresh = trainer.initial_state(with_grpo(lora_rank=rank, lora_alpha=2 * rank), seed=1)
    start = dataclasses.replace(fresh, adapter=random_adapter(fresh.adapter, seed=2))
    engine = DiffusersEngine(MODEL)
    engine.load_policy(policy := policy_of(0, start.adapter), start.adapter)
    return start, training_samples(engine, embeds, policy=policy)


@pytest.mark.parametrize("kl_coefficient", [0.0, KL_COEFFICIENT])
def test_the_gradient_does_not_depend_on_the_micro_batch(
    trainer: GrpoTrainer, embeds: list[np.ndarray], kl_coefficient: float
) -> None:
    """Also that of the divergence, at a start where it has one."""
    grpo, (start, samples) = with_grpo(max_grad_norm=1e6, kl_coefficient=kl_coefficient), moved_start(trainer, embeds)
    want = gradient(trainer, samples, grpo.model_copy(update={"micro_batch": 12}), start)
    for micro_batch in (1, 5):
        got = gradient(trainer, samples, grpo.model_copy(update={"micro_batch": micro_batch}), start)
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


@dataclasses.dataclass(frozen=True)
class ClosedForm:
    """What one training step must find: the gradient by the adapter's names, and the mean divergence from the reference."""

    gradient: dict[str, np.ndarray]
    divergence: float


def float64_model() -> QwenImageTransformer2DModel:
    model = QwenImageTransformer2DModel.from_pretrained(model_folder(MODEL) / "transformer")
    return model.double().requires_grad_(False)


def closed_form(
    samples: list[TrainingSample], adapter: dict[str, np.ndarray], *, ratio: str = "plain", kl_coefficient: float = 0.0
) -> ClosedForm:
    """Gradient of mean(-A logp + β KL) in float64, with the adapter merged into the weights by hand: GRPO's at ratio 1.

    A guarded log-ratio has std times the gradient of the plain one, and its row the weight 1 / (s - s').
    """
    folder = model_folder(MODEL)
    model, base = float64_model(), float64_model()
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
    total, divergence = torch.zeros(2, dtype=torch.float64)
    for s in samples:
        advantage = (s.reward - np.mean(rewards[s.prompt_id])) / (batch_std + 1e-4)
        for k, i in enumerate(range(*s.sde_window)):
            x, after = (torch.tensor(s.window_latents[j]).double()[None] for j in (k, k + 1))
            now, then = schedule[i], schedule[i + 1]
            text = torch.tensor(s.embeds).double()[None]
            v, v_base = (m(x, text, None, now[None], [[(1, 8, 8)]], return_dict=False)[0] for m in (model, base))
            rate = NOISE_LEVEL**2 * now / (1 - (schedule[1] if i == 0 else now))
            mean, mean_base = (x + (u + rate / (2 * now) * (x + (1 - now) * u)) * (then - now) for u in (v, v_base))
            variance = rate * (now - then)
            scale = variance.sqrt() / (now - then) if ratio == "guard" else 1.0
            total = total - scale * advantage * (-((after - mean) ** 2) / (2 * variance)).mean()
            divergence = divergence + ((mean - mean_base) ** 2 / (2 * variance)).mean()
    rows = sum(len(s.log_probs) for s in samples)
    ((total + kl_coefficient * divergence) / rows).backward()
    found = {name: factor.grad.numpy() for name, factor in factors.items() if factor.grad is not None}
    return ClosedForm(found, divergence.item() / rows)


class _Merge(torch.nn.Module):
    def __init__(self, high: torch.Tensor, low: torch.Tensor) -> None:
        super().__init__()
        self.high, self.low = high, low

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + 2.0 * self.high @ self.low


@pytest.mark.parametrize(
    ("rank", "ratio", "kl_coefficient"),
    [(4, "plain", 0.0), (16, "plain", 0.0), (4, "guard", 0.0), (4, "plain", KL_COEFFICIENT)],
)
def test_the_gradient_is_that_of_an_independent_float64_implementation(
    trainer: GrpoTrainer, embeds: list[np.ndarray], rank: int, ratio: str, kl_coefficient: float
) -> None:
    """In two parts and fused, guarded, and with a pull to the reference that is as strong as the rewards'."""
    grpo = with_grpo(lora_rank=rank, lora_alpha=2 * rank, ratio=ratio, kl_coefficient=kl_coefficient, max_grad_norm=1e6)
    start, samples = moved_start(trainer, embeds, rank)
    want = closed_form(samples, dict(start.adapter), ratio=ratio, kl_coefficient=kl_coefficient)
    outcome = train(trainer, samples, start, grpo)
    names = [name for name, array in want.gradient.items() if np.abs(array).max() > 0]
    assert len(names) >= 60
    flat_want = np.concatenate([want.gradient[name].ravel() for name in names])
    flat_got = np.concatenate([outcome.state.exp_avg[name].ravel() for name in names]) / 0.1
    assert np.linalg.norm(flat_got - flat_want) <= 1e-4 * np.linalg.norm(flat_want)
    if kl_coefficient:
        assert outcome.metrics["kl_reference"] == pytest.approx(want.divergence, rel=1e-3)


def test_flat_groups_count_among_the_rows_that_the_gradient_is_divided_by(
    trainer: GrpoTrainer, samples: list[TrainingSample]
) -> None:
    grpo = with_grpo(advantage_normalisation="none", max_grad_norm=1e6)
    alone = gradient(trainer, [s for s in samples if s.prompt_id != "prompt-0"], grpo)
    beside = gradient(trainer, flat(samples, {"prompt-0"}), grpo)
    assert np.linalg.norm(beside - alone * 2 / 3) <= 1e-5 * np.linalg.norm(beside)


def test_explored_groups_stay_out_of_the_deviation_that_divides_all(
    trainer: GrpoTrainer, samples: list[TrainingSample]
) -> None:
    """With constants of the advantage as they are: A's denominator is std + 1e-4 of prompt-0 alone, or of all."""
    grpo = with_grpo(max_grad_norm=1e6, advantage_clip=1e6)
    marked = [dataclasses.replace(s, is_explored=s.prompt_id != "prompt-0") for s in samples]
    of_all = gradient(trainer, marked, grpo)
    of_one = gradient(trainer, marked, grpo.model_copy(update={"advantage_normalisation": "unexplored"}))
    every, one = (np.std([s.reward for s in part]) + 1e-4 for part in (samples, samples[:4]))
    assert abs(every / one - 1) > 0.1
    assert np.linalg.norm(of_one - of_all * every / one) <= 1e-5 * np.linalg.norm(of_one)


def test_gradient_norm_and_advantages_are_clipped_as_asked(trainer: GrpoTrainer, samples: list[TrainingSample]) -> None:
    full = train(trainer, samples, grpo=with_grpo(max_grad_norm=1e6))
    bound = full.metrics["grad_norm"] / 4
    assert np.linalg.norm(gradient(trainer, samples, with_grpo(max_grad_norm=bound))) == pytest.approx(bound, rel=1e-3)
    assert full.metrics["advantage_abs_mean"] > 0.02
    assert train(trainer, samples, grpo=with_grpo(advantage_clip=0.01)).metrics["advantage_abs_mean"] <= 0.01


def test_weight_decay_takes_its_share_of_the_weights_before_the_update(
    trainer: GrpoTrainer, samples: list[TrainingSample]
) -> None:
    """AdamW: w - lr (λ w + what the gradient gives)."""
    start = trainer.initial_state(GRPO, seed=1)
    plain, decayed = (train(trainer, samples, start, with_grpo(weight_decay=w)).state for w in (0.0, 0.5))
    for name in plain.exp_avg:  # one that the image never sees has no gradient, and stays as it is
        want = plain.adapter[name] - 2e-3 * 0.5 * start.adapter[name]
        np.testing.assert_allclose(decayed.adapter[name], want, rtol=0, atol=1e-6)


def test_coefficient_preserving_steps_are_priced_as_they_were_taken(
    trainer: GrpoTrainer, engine: DiffusersEngine, embeds: list[np.ndarray]
) -> None:
    engine.load_policy(PolicyRef(), None)  # others had it sample later policies
    drawn = training_samples(engine, embeds, sde="cps")
    metrics = train(trainer, drawn, sampling=SAMPLING.model_copy(update={"sde": "cps"})).metrics
    assert metrics["dlogp_first_max"] <= 1e-6
    assert metrics["policy_changed"] == 1


def test_gaps_are_of_the_denoising_steps_that_they_name(trainer: GrpoTrainer, samples: list[TrainingSample]) -> None:
    """One of four log-probs at denoising step 3 is off."""
    *others, good = samples
    assert good.sde_window == (2, 4)
    moved = dataclasses.replace(good, log_probs=good.log_probs - np.array([0, 5e-3], np.float32))
    metrics = train(trainer, [*others, moved]).metrics
    assert metrics["dlogp_step_03"] == pytest.approx(5e-3 / 4, abs=1e-5)
    assert max(metrics[f"dlogp_step_0{i}"] for i in range(3)) <= 1e-6


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


def test_a_policy_that_only_momentum_or_decay_moved_is_an_error(
    trainer: GrpoTrainer, samples: list[TrainingSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train(trainer, samples).state
    loss_of = trainer_module.clipped_policy_loss

    def without_gradient(*arguments: Any) -> PolicyLoss:
        found = loss_of(*arguments)
        return dataclasses.replace(found, loss=found.loss * 0.0)

    monkeypatch.setattr(trainer_module, "clipped_policy_loss", without_gradient)
    with pytest.raises(
        TrainingError, match=r"did not change by its samples: gradient norm = 0, norm of the update = 0\."
    ):
        train(trainer, samples, first, OFF_POLICY)
    with pytest.raises(TrainingError, match="gradient norm = 0"):
        train(trainer, samples, grpo=with_grpo(weight_decay=0.01))


def test_a_ratio_too_small_for_a_float_leaves_every_number_finite() -> None:
    """kl_rollout of ratio 0 is large, not infinite: log ratios are kept, not ratios."""
    meter = Meter(rows=2, log_ratio=[torch.tensor([-200.0, 0.0])], clipped=[torch.tensor([False, True])])
    meter.first_gap, meter.first_steps, meter.grad_norm = [torch.zeros(2)], [torch.tensor([0, 1])], [1.0]
    metrics = loss_metrics(meter)
    assert (metrics["ratio_min"], metrics["kl_rollout"]) == (0, pytest.approx((0 - 1 + 200) / 2))
    assert metrics["clip_fraction"] == 0.5
    check_finite(metrics)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_never_leaves_the_trainer(
    trainer: GrpoTrainer, samples: list[TrainingSample], monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    monkeypatch.setattr(trainer_module, "reward_metrics", lambda batch, gains: {"reward_std": value})
    with pytest.raises(TrainingError, match=rf"reward_std = {value}: must be finite"):
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


def test_recomputing_log_probs_is_told_and_may_be_stopped(trainer: GrpoTrainer, samples: list[TrainingSample]) -> None:
    """Whoever waits for a sign of life gets one at each micro batch of both passes."""
    seen: list[tuple[int, int]] = []
    grpo = with_grpo(log_probs="recompute", micro_batch=4)
    train(trainer, samples, grpo=grpo, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 24) for done in (4, 8, 12, 16, 20, 24, 24)]
    calls = iter([False, True])
    with pytest.raises(TrainingStoppedError):
        train(trainer, samples, grpo=grpo, should_stop=lambda: next(calls))


def test_several_optimizer_steps_split_the_prompts(trainer: GrpoTrainer, samples: list[TrainingSample]) -> None:
    outcome = train(trainer, samples, grpo=with_grpo(optimizer_steps=3))
    assert outcome.metrics["optimizer_steps"] == 3
    assert outcome.state.optimizer_steps == 3
    assert outcome.metrics["ratio_max"] > 1


def test_alpha_is_part_of_the_policy(trainer: GrpoTrainer, samples: list[TrainingSample]) -> None:
    assert train(trainer, samples).state.adapter[ALPHA_KEY].tolist() == [8.0]
