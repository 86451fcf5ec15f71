import numpy as np
import pytest
import torch
from diffusion_rollouts import MODEL, PROMPTS, training_samples

from spot_runtime.config import GrpoConfig, SamplingConfig
from spot_runtime.diffusion.embeddings import PromptEncoder
from spot_runtime.diffusion.engine import DiffusersEngine
from spot_runtime.diffusion.sleep import Sleeper, fingerprint
from spot_runtime.diffusion.trainer import GrpoTrainer
from spot_runtime.errors import PolicyMismatchError
from spot_runtime.types import PolicyRef


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).to(dtype)
    layers.register_buffer("rotary", torch.polar(torch.ones(4), torch.arange(4.0)), persistent=False)
    return layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_come_back_as_they_went(dtype: torch.dtype) -> None:
    layers = model(dtype)
    before = fingerprint(layers)
    sleeper = Sleeper(layers, torch.device("cpu"))
    sleeper.wake()
    sleeper.sleep()
    sleeper.sleep()
    assert sleeper.is_asleep
    sleeper.wake()
    assert not sleeper.is_asleep
    assert fingerprint(layers) == before


@pytest.mark.parametrize("name", ["0.weight", "1.bias", "rotary"])
def test_a_tensor_that_changed_in_its_sleep_is_named(name: str) -> None:
    layers = model()
    sleeper = Sleeper(layers, torch.device("cpu"))
    sleeper.sleep()
    tensor = dict([*layers.named_parameters(), *layers.named_buffers()])[name]
    with torch.no_grad():
        tensor.flatten()[-1].add_(1e-6)
    with pytest.raises(PolicyMismatchError, match=f"1 tensors woke up other than they fell asleep, the first {name}"):
        sleeper.wake()


def test_exchanged_neighbours_are_seen() -> None:
    layers = model()
    before = fingerprint(layers)
    with torch.no_grad():
        weight = layers[0].weight
        weight[0, [0, 1]] = weight[0, [1, 0]].clone()
    assert fingerprint(layers) != before


def test_a_trainer_wakes_up_to_train() -> None:
    engine = DiffusersEngine(MODEL)
    engine.load_policy(PolicyRef(), None)
    samples = training_samples(engine, PromptEncoder(MODEL).encode(PROMPTS[:2]))
    trainer = GrpoTrainer(MODEL)
    grpo = GrpoConfig(prompts_per_iteration=2, group_size=4, optimizer_steps=1, lora_rank=4, lora_alpha=8)
    sampling = SamplingConfig(num_steps=6, sde_window_stop=4, sde_window_size=2)
    policies = []
    for _ in range(2):
        outcome = trainer.train(
            None,
            samples,
            sampling=sampling,
            grpo=grpo,
            seed=1,
            policy_version=0,
            on_progress=lambda *_: None,
            should_stop=lambda: False,
        )
        policies.append(outcome.state.adapter)
        trainer.sleep()
    assert all(np.array_equal(policies[0][name], policies[1][name]) for name in policies[0])
