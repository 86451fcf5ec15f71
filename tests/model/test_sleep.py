from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from diffusion_rollouts import BASE, MODEL, PROMPTS, policy_of, random_adapter, request, training_samples

from spot_runtime.config import GrpoConfig, SamplingConfig
from spot_runtime.diffusion.adapter import initial_adapter
from spot_runtime.diffusion.embeddings import PromptEncoder
from spot_runtime.diffusion.engine import DiffusersEngine
from spot_runtime.diffusion.parts import base_tensors
from spot_runtime.diffusion.sleep import Sleeper
from spot_runtime.diffusion.trainer import GrpoTrainer, TrainingOutcome, TrainingSample
from spot_runtime.diffusion.weights import copy_weights
from spot_runtime.errors import UnseededError
from spot_runtime.messages import StepItem
from spot_runtime.parallel.weights import weights_digest
from spot_runtime.types import PolicyRef

CPU = torch.device("cpu")


def bits(layers: torch.nn.Module) -> str:
    tensors = dict([*layers.named_parameters(), *layers.named_buffers()])
    return weights_digest(tensors)


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).to(dtype)
    layers.register_buffer("rotary", torch.polar(torch.ones(4), torch.arange(4.0)), persistent=False)
    return layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_come_back_as_they_went(dtype: torch.dtype) -> None:
    layers = model(dtype)
    before = bits(layers)
    sleeper = Sleeper([layers], CPU)
    sleeper.wake()
    sleeper.sleep()
    sleeper.sleep()
    assert sleeper.is_asleep
    sleeper.wake()
    assert not sleeper.is_asleep
    assert bits(layers) == before


@pytest.mark.parametrize("name", ["0.weight", "1.bias", "rotary"])
def test_a_tensor_that_changed_in_its_sleep_is_named(name: str) -> None:
    layers = model()
    sleeper = Sleeper([layers], CPU)
    sleeper.sleep()
    tensor = dict([*layers.named_parameters(), *layers.named_buffers()])[name]
    with torch.no_grad():
        tensor.flatten()[-1].add_(1e-6)
    with pytest.raises(UnseededError, match=f"1 tensors woke up other than they fell asleep, the first {name}"):
        sleeper.wake()


def test_exchanged_neighbours_are_seen() -> None:
    layers = model()
    before = bits(layers)
    with torch.no_grad():
        weight = layers[0].weight
        weight[0, [0, 1]] = weight[0, [1, 0]].clone()
    assert bits(layers) != before


def places(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


@pytest.mark.parametrize("kind", ["base", "lora", "full"])
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "offload_alone": True}])
def test_an_engine_that_slept_makes_the_same_sample(kind: str, options: dict[str, Any]) -> None:
    """Asleep it holds the base model alone, and each tensor of it once."""
    engine = DiffusersEngine(MODEL, **options)
    digest = engine.weights.digest
    engine.load_policy(BASE, None)
    adapter = random_adapter(initial_adapter(engine._transformer, rank=4, alpha=8, seed=0), seed=5, scale=0.01)
    if kind == "full":
        adapter = {name: array + np.float32(0.01) for name, array in copy_weights(engine._transformer).items()}
    policy = BASE if kind == "base" else policy_of(1, adapter)
    if kind != "base":
        engine.load_policy(policy, adapter)
    width = engine._transformer.config.joint_attention_dim
    engine.admit(0, request(0, window=(1, 3), policy=policy), np.ones((5, width), np.float32))
    latents = engine.initial_latents(0)
    item = StepItem(slot=0, denoising_step=1)
    (before,) = engine.denoise([item], [latents])
    engine.sleep()
    assert places(base_tensors(engine._parts)) == places(engine.weights.tensors)
    assert weights_digest(engine.weights.tensors) == digest
    engine.wake()
    (after,) = engine.denoise([item], [latents])
    assert np.array_equal(before.latents, after.latents)
    assert before.log_prob == after.log_prob
    assert weights_digest(engine.weights.tensors) == digest


@pytest.fixture(scope="module")
def samples() -> list[TrainingSample]:
    engine = DiffusersEngine(MODEL)
    engine.load_policy(PolicyRef(), None)
    return training_samples(engine, PromptEncoder(MODEL).encode(PROMPTS[:2]))


def train(trainer: GrpoTrainer, samples: list[TrainingSample], **changes: object) -> TrainingOutcome:
    grpo = GrpoConfig(prompts_per_iteration=2, group_size=4, optimizer_steps=1, lora_rank=4, lora_alpha=8)
    return trainer.train(
        None,
        samples,
        sampling=SamplingConfig(num_steps=6, sde_window_stop=4, sde_window_size=2),
        grpo=grpo.model_copy(update=changes),
        seed=1,
        policy_version=0,
        on_progress=lambda *_: None,
        should_stop=lambda: False,
    )


def test_a_trainer_wakes_up_to_train_and_to_encode(samples: list[TrainingSample]) -> None:
    trainer = GrpoTrainer(MODEL)
    outcomes = []
    for _ in range(2):
        outcomes.append((train(trainer, samples).state.adapter, trainer.encode(["a red circle"])[0]))
        trainer.sleep()
    (first, embeds), (second, again) = outcomes
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert np.array_equal(embeds, again)


@pytest.mark.parametrize("part", ["transformer", "reference"])
def test_a_trainer_whose_weights_were_damaged_in_its_sleep_never_trains_again(
    samples: list[TrainingSample], part: str
) -> None:
    """Of all weights in training the copy of the base is the reference, and goes to sleep with them."""
    trainer = GrpoTrainer(MODEL)
    train(trainer, samples, trainable="full")
    trainer.sleep()
    asleep = trainer._transformer if part == "transformer" else trainer._policy.reference  # type: ignore[union-attr]
    with torch.no_grad():
        next(asleep.parameters()).flatten()[0].add_(1)
    for _ in range(2):
        with pytest.raises(UnseededError, match="1 tensors woke up other than they fell asleep"):
            train(trainer, samples, trainable="full")


def test_where_there_is_no_room_to_wake_up_all_sleep_on_and_may_try_again() -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    sleeper = Sleeper([first, second], torch.device("cpu"))
    sleeper.sleep()
    places: list[str] = []

    def full(device: torch.device) -> torch.nn.Module:
        places.append(str(device))
        if len(places) == 1:
            raise torch.OutOfMemoryError("full")
        return second

    second.to = full  # type: ignore[method-assign,assignment]
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        sleeper.wake()
    assert sleeper.is_asleep
    sleeper.wake()
    assert not sleeper.is_asleep
    assert len(places) == 3  # tried, put back, woken
