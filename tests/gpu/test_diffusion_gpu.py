import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
from diffusion_rollouts import (
    MODEL,
    NOISE_LEVEL,
    NUM_STEPS,
    PROMPTS,
    policy_of,
    random_adapter,
    request,
    sample,
    training_samples,
)

from spot_runtime.config import GrpoConfig, SamplingConfig
from spot_runtime.diffusion.adapter import initial_adapter
from spot_runtime.diffusion.embeddings import PromptEncoder
from spot_runtime.diffusion.engine import DiffusersEngine
from spot_runtime.diffusion.trainer import GrpoTrainer
from spot_runtime.types import PolicyRef

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SAMPLING = SamplingConfig(num_steps=NUM_STEPS, noise_level=NOISE_LEVEL, sde_window_stop=4, sde_window_size=4)
GRPO = GrpoConfig(prompts_per_iteration=3, group_size=4, optimizer_steps=1, lora_rank=4, lora_alpha=8)


@pytest.fixture(scope="module")
def embeds() -> list[np.ndarray]:
    return PromptEncoder(MODEL).encode(PROMPTS)


@pytest.fixture(scope="module")
def engine() -> DiffusersEngine:
    engine = DiffusersEngine(MODEL, device="cuda")
    engine.load_policy(PolicyRef(), None)
    return engine


def test_a_sample_is_the_same_on_cpu_and_gpu(engine: DiffusersEngine, embeds: list[np.ndarray]) -> None:
    """Same initial latents and noise; fp32 arithmetic differs only by rounding. Pixels within two grey levels."""
    requests = [request(seed, window=(1, 3), prompt=seed) for seed in range(3)]
    host = DiffusersEngine(MODEL)
    host.load_policy(PolicyRef(), None)
    on_gpu, priced = sample(engine, requests, embeds)
    on_cpu, priced_cpu = sample(host, requests, embeds)
    for slot in range(3):
        assert np.array_equal(on_gpu[slot][0], on_cpu[slot][0])
        np.testing.assert_allclose(on_gpu[slot][-1], on_cpu[slot][-1], rtol=0, atol=1e-3)
        assert priced[slot] == pytest.approx(priced_cpu[slot], abs=1e-5)
        (gpu_image,), (cpu_image,) = (e.decode([slot], [x[slot][-1]]) for e, x in ((engine, on_gpu), (host, on_cpu)))
        assert np.abs(gpu_image.astype(int) - cpu_image.astype(int)).max() <= 2


def test_a_trained_policy_circulates_on_the_gpu(engine: DiffusersEngine, embeds: list[np.ndarray]) -> None:
    trainer = GrpoTrainer(MODEL, device="cuda")
    arguments = {
        "sampling": SAMPLING,
        "grpo": GRPO,
        "seed": 0,
        "on_progress": lambda done, total: None,
        "should_stop": lambda: False,
    }
    first = trainer.train(None, training_samples(engine, embeds), policy_version=0, **arguments)  # type: ignore[arg-type]
    assert first.metrics["dlogp_first_max"] <= 1e-5
    policy = policy_of(1, first.state.adapter)
    engine.load_policy(policy, first.state.adapter)
    samples = training_samples(engine, embeds, policy=policy)
    second = trainer.train(first.state, samples, policy_version=1, **arguments)  # type: ignore[arg-type]
    assert second.metrics["dlogp_first_max"] <= 1e-5
    assert second.metrics["policy_changed"] == 1


def test_a_bf16_engine_serves_an_attached_policy(embeds: list[np.ndarray]) -> None:
    half = DiffusersEngine(MODEL, device="cuda", dtype="bfloat16")
    adapter = random_adapter(initial_adapter(half._transformer, rank=4, alpha=8, seed=0), seed=1, scale=0.01)
    policy = policy_of(1, adapter)
    half.load_policy(policy, adapter)
    full = DiffusersEngine(MODEL, device="cuda")
    full.load_policy(policy, adapter)
    wanted = [request(1, policy=policy)]
    (near,), _ = sample(half, wanted, embeds[:1])
    (exact,), _ = sample(full, wanted, embeds[:1])
    assert near[-1].dtype == np.float32
    relative = np.linalg.norm(near[1] - exact[1]) / np.linalg.norm(exact[1] - exact[0])
    assert relative <= 0.05
