"""Memory before a training step starts, recomputed activations, and bf16 compute."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from diffusion_rollouts import MODEL, NOISE_LEVEL, NUM_STEPS, PROMPTS, training_samples
from torch.profiler import ProfilerActivity, profile

from spot_runtime.config import GrpoConfig, SamplingConfig
from spot_runtime.diffusion import trainer as trainer_module
from spot_runtime.diffusion.embeddings import PromptEncoder
from spot_runtime.diffusion.engine import DiffusersEngine
from spot_runtime.diffusion.preflight import Kept, check_memory, kept_by_rows, kept_bytes
from spot_runtime.diffusion.trainer import GrpoTrainer, TrainerState, TrainingOutcome, TrainingSample
from spot_runtime.errors import TrainingError
from spot_runtime.types import PolicyRef

SAMPLING = SamplingConfig(num_steps=NUM_STEPS, noise_level=NOISE_LEVEL, sde_window_stop=4, sde_window_size=4)
GRPO = GrpoConfig(prompts_per_iteration=3, group_size=4, optimizer_steps=1, micro_batch=8, lora_rank=4, lora_alpha=8)


@pytest.fixture(scope="module")
def samples() -> list[TrainingSample]:
    engine = DiffusersEngine(MODEL)
    engine.load_policy(PolicyRef(), None)
    return training_samples(engine, PromptEncoder(MODEL).encode(PROMPTS))


def train(
    trainer: GrpoTrainer, samples: list[TrainingSample], state: TrainerState | None = None, **changes: object
) -> TrainingOutcome:
    return trainer.train(
        state,
        samples,
        sampling=SAMPLING,
        grpo=GRPO.model_copy(update=changes),
        seed=1,
        policy_version=state.policy_version if state else 0,
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


def test_what_an_earlier_step_left_is_counted_once_and_before_it_is_restored(
    samples: list[TrainingSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that goes on from a state asks for what a fresh one asks for, with only the weights on the device."""
    first = train(GrpoTrainer(MODEL), samples, ema_decay=0.5).state
    order: list[str] = []
    restore, average = trainer_module.restored_adamw, trainer_module._ema
    monkeypatch.setattr(trainer_module, "check_memory", lambda *_: order.append("checked"))
    monkeypatch.setattr(trainer_module, "restored_adamw", lambda *a: [order.append("moments"), restore(*a)][1])
    monkeypatch.setattr(trainer_module, "_ema", lambda *a: [order.append("average"), average(*a)][1])
    train(GrpoTrainer(MODEL), samples, first, ema_decay=0.5, clip_range=0.5)
    assert order == ["checked", "moments", "average"]


def test_what_fits_is_no_error_and_the_sum_counts() -> None:
    check_memory({"weights": 60, "activations": 40}, 100, 1)
    with pytest.raises(TrainingError, match=r"^memory: 3\.00 GB \(weights 1\.00, update 2\.00\) of 2\.50 GB: must fit"):
        check_memory({"weights": 10**9, "update": 2 * 10**9, "reference": 0}, 25 * 10**8, 8)


def test_kept_bytes_are_what_autograd_saves() -> None:
    """relu keeps its result, a product both factors; a parameter is no activation."""
    weight, x = torch.nn.Parameter(torch.ones(16, 16)), torch.ones(4, 16, requires_grad=True)
    assert kept_bytes(lambda: torch.relu(x * 2).sum()) == 4 * 16 * 4
    assert kept_bytes(lambda: (x @ weight).sum()) == 4 * 16 * 4


def test_what_grows_with_rows_is_told_from_what_does_not() -> None:
    """A matrix that a forward pass makes of its weights is kept once, its input and relu's result for each row."""
    weight = torch.nn.Parameter(torch.ones(16, 16))

    def forward(rows: int) -> torch.Tensor:
        x = torch.ones(rows, 16, requires_grad=True) * 1.0
        return torch.relu(torch.nn.functional.linear(x, weight * 2)).sum()

    assert kept_by_rows(forward) == Kept(row=2 * 16 * 4, fixed=16 * 16 * 4)


def most_bytes(run: Callable[[], object]) -> int:
    """The most that torch had allocated at a time on the CPU, above what it had before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    events: list[Any] = record.profiler.kineto_results.events()  # type: ignore[union-attr]
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_checkpointing": True},
        {"compute_dtype": "bfloat16"},
        {"compute_dtype": "bfloat16", "activation_checkpointing": True},
        {"lora_rank": 32, "lora_alpha": 64},
        {"trainable": "full"},
    ],
)
def test_what_is_counted_is_what_is_used(
    samples: list[TrainingSample], monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    """Sixteen rows in a micro batch: about the measured peak, and less than twice of it. What kernels work in differs between machines."""
    counted: list[Mapping[str, int]] = []
    monkeypatch.setattr(trainer_module, "check_memory", lambda wanted, free, rows: counted.append(wanted))
    trainer = GrpoTrainer(MODEL)
    train(trainer, samples, clip_range=1e-2, **changes)  # counts once, and allocates what stays
    used = most_bytes(lambda: train(trainer, samples, clip_range=1e-2, **changes))
    (wanted,) = counted
    passing = sum(size for name, size in wanted.items() if name not in ("weights", "reference"))
    assert 0.8 * used <= passing < 2 * used


def test_each_kind_of_training_step_is_counted_once(
    samples: list[TrainingSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(trainer_module, "check_memory", lambda wanted, free, rows: counted.append(rows))
    trainer = GrpoTrainer(MODEL)
    kinds = ({}, {}, {"ema_decay": 0.5}, {"trainable": "full"}, {"micro_batch": 4})
    seen = [len(counted) for kind in kinds if train(trainer, samples, **kind)]
    assert seen == [1, 1, 2, 3, 4]


def test_recomputed_activations_need_less_and_give_the_same_policy(
    samples: list[TrainingSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[int] = []
    monkeypatch.setattr(trainer_module, "check_memory", lambda needs, free, rows: wanted.append(needs["activations"]))
    kept, recomputed = (train(GrpoTrainer(MODEL), samples, activation_checkpointing=on) for on in (False, True))
    assert wanted[1] < wanted[0] / 2  # of this model a quarter is one block, and that is whole for a moment
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


def test_a_frozen_base_is_held_in_what_it_computes_in_and_the_adapter_in_fp32(samples: list[TrainingSample]) -> None:
    """And read again where another run of this trainer wants it exact."""
    want = train(GrpoTrainer(MODEL), samples)
    trainer = GrpoTrainer(MODEL)
    near = train(trainer, samples, compute_dtype="bfloat16")
    held = {name: p.dtype for name, p in trainer._transformer.named_parameters()}
    assert {dtype for name, dtype in held.items() if ".lora_" in name} == {torch.float32}
    assert {dtype for name, dtype in held.items() if ".lora_" not in name} == {torch.bfloat16}
    assert near.metrics["grad_norm"] == pytest.approx(want.metrics["grad_norm"], rel=0.2)
    again = train(trainer, samples)
    assert all(np.array_equal(again.state.adapter[name], weights) for name, weights in want.state.adapter.items())


def test_what_was_measured_is_let_go_of() -> None:
    def measured() -> weakref.ref[torch.nn.Parameter]:
        weight = torch.nn.Parameter(torch.ones(4))
        assert kept_bytes(lambda: (weight * torch.ones(4)).exp()) > 0  # exp keeps its own result
        return weakref.ref(weight)

    gone = measured()
    gc.collect()
    assert gone() is None
