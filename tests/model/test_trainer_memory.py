"""Memory before a training step starts, recomputed activations, and bf16 compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusion_rollouts import MODEL, NOISE_LEVEL, NUM_STEPS, PROMPTS, training_samples

from spot_runtime.config import GrpoConfig, SamplingConfig
from spot_runtime.diffusion import trainer as trainer_module
from spot_runtime.diffusion.embeddings import PromptEncoder
from spot_runtime.diffusion.engine import DiffusersEngine
from spot_runtime.diffusion.preflight import check_memory, kept_bytes
from spot_runtime.diffusion.trainer import GrpoTrainer, TrainingOutcome, TrainingSample
from spot_runtime.errors import TrainingError
from spot_runtime.types import PolicyRef

SAMPLING = SamplingConfig(num_steps=NUM_STEPS, noise_level=NOISE_LEVEL, sde_window_stop=4, sde_window_size=4)
GRPO = GrpoConfig(prompts_per_iteration=3, group_size=4, optimizer_steps=1, micro_batch=8, lora_rank=4, lora_alpha=8)


@pytest.fixture(scope="module")
def samples() -> list[TrainingSample]:
    engine = DiffusersEngine(MODEL)
    engine.load_policy(PolicyRef(), None)
    return training_samples(engine, PromptEncoder(MODEL).encode(PROMPTS))


def train(trainer: GrpoTrainer, samples: list[TrainingSample], **changes: object) -> TrainingOutcome:
    return trainer.train(
        None,
        samples,
        sampling=SAMPLING,
        grpo=GRPO.model_copy(update=changes),
        seed=1,
        policy_version=0,
        on_progress=lambda *_: None,
        should_stop=lambda: False,
    )


def test_what_does_not_fit_is_named_before_anything_is_computed(
    samples: list[TrainingSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = GrpoTrainer(MODEL)
    monkeypatch.setattr(trainer_module, "available_bytes", lambda device: 1_000_000)
    monkeypatch.setattr(GrpoTrainer, "_train", lambda self, work: pytest.fail("it started"))
    with pytest.raises(TrainingError) as caught:
        train(trainer, samples)
    words = str(caught.value)
    assert words.startswith("memory: ")
    for name in ("weights ", "update ", "activations "):
        assert name in words
    assert "lower grpo.micro_batch (16 rows now), set grpo.activation_checkpointing, or add trainer ranks" in words


def test_what_fits_is_no_error_and_the_sum_counts() -> None:
    check_memory({"weights": 60, "activations": 40}, 100, 1)
    with pytest.raises(TrainingError, match=r"^memory: 3\.00 GB \(weights 1\.00, update 2\.00\) of 2\.50 GB: must fit"):
        check_memory({"weights": 10**9, "update": 2 * 10**9, "reference": 0}, 25 * 10**8, 8)


def test_kept_bytes_are_what_autograd_saves() -> None:
    """relu keeps its result, a product both factors; a parameter is no activation."""
    weight, x = torch.nn.Parameter(torch.ones(16, 16)), torch.ones(4, 16, requires_grad=True)
    assert kept_bytes(lambda: torch.relu(x * 2).sum()) == 4 * 16 * 4
    assert kept_bytes(lambda: (x @ weight).sum()) == 4 * 16 * 4


def test_recomputed_activations_need_less_and_give_the_same_policy(
    samples: list[TrainingSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[int] = []
    monkeypatch.setattr(trainer_module, "check_memory", lambda needs, free, rows: wanted.append(needs["activations"]))
    kept, recomputed = (train(GrpoTrainer(MODEL), samples, activation_checkpointing=on) for on in (False, True))
    assert wanted[1] < wanted[0] / 3
    for name, weights in kept.state.adapter.items():
        np.testing.assert_allclose(recomputed.state.adapter[name], weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize("trainable", ["lora", "full"])
def test_bf16_compute_keeps_weights_and_log_probs_in_fp32_and_recomputes_what_rounding_moved(
    samples: list[TrainingSample], trainable: str
) -> None:
    outcome = train(GrpoTrainer(MODEL), samples, compute_dtype="bfloat16", trainable=trainable, clip_range=1e-4)
    metrics = outcome.metrics
    assert metrics["log_probs_recomputed"] == 1
    assert 1e-5 < metrics["dlogp_first_max"] < 1e-2
    assert (metrics["ratio_min"], metrics["ratio_max"]) == (1, 1)
    assert metrics["policy_changed"] == 1
    assert {array.dtype for array in outcome.state.adapter.values()} == {np.dtype(np.float32)}
