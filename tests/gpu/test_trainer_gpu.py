"""The trainer on a GPU: FSDP2 over NCCL, bf16, recomputed activations, sleep and wake, and memory as counted against memory as used."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
from diffusion_rollouts import MODEL, NOISE_LEVEL, NUM_STEPS, PROMPTS, training_samples

from spot_runtime.config import GrpoConfig, SamplingConfig
from spot_runtime.daemons.trainer_rank import join_group
from spot_runtime.diffusion import trainer as trainer_module
from spot_runtime.diffusion.embeddings import PromptEncoder
from spot_runtime.diffusion.engine import DiffusersEngine
from spot_runtime.diffusion.ranks import Ranks
from spot_runtime.diffusion.state import TrainerState
from spot_runtime.diffusion.trainer import GrpoTrainer, TrainingOutcome, TrainingSample
from spot_runtime.errors import TrainingError, UnseededError
from spot_runtime.types import PolicyRef

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU = "cuda:0"
SAMPLING = SamplingConfig(num_steps=NUM_STEPS, noise_level=NOISE_LEVEL, sde_window_stop=4, sde_window_size=4)
GRPO = GrpoConfig(
    prompts_per_iteration=3,
    group_size=4,
    learning_rate=1e-4,
    optimizer_steps=1,
    micro_batch=8,
    lora_rank=4,
    lora_alpha=8,
    clip_range=1e-2,
)


@pytest.fixture(scope="module")
def samples() -> list[TrainingSample]:
    engine = DiffusersEngine(MODEL, device=GPU)
    engine.load_policy(PolicyRef(), None)
    return training_samples(engine, PromptEncoder(MODEL).encode(PROMPTS))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """A world of one over NCCL: the model is sharded as with several."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("ranks") / "rendezvous"), 1)
    yield join_group(store, 0, 1, GPU, 120.0)
    dist.destroy_process_group()


def train(
    trainer: GrpoTrainer, samples: list[TrainingSample], state: TrainerState | None = None, **changes: object
) -> TrainingOutcome:
    return trainer.train(
        state,
        samples,
        sampling=SAMPLING,
        grpo=GRPO.model_copy(update=changes),
        seed=1,
        policy_version=0 if state is None else state.policy_version,
        on_progress=lambda *_: None,
        should_stop=lambda: False,
    )


def allocated() -> int:
    """Bytes that tensors hold, without what libraries keep to work in."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def gradient(outcome: TrainingOutcome) -> np.ndarray:
    """After one optimizer step the first moment is (1 - β1) times the gradient."""
    moments = outcome.state.exp_avg
    return np.concatenate([moments[name].ravel() for name in sorted(moments)]) / 0.1


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("trainable", ["lora", "full"])
def test_a_sharded_model_has_the_gradient_of_a_whole_one(
    samples: list[TrainingSample], one_rank: Ranks, trainable: str
) -> None:
    whole, sharded = (
        train(GrpoTrainer(MODEL, device=GPU, ranks=ranks), samples, trainable=trainable) for ranks in (None, one_rank)
    )
    off = relative(gradient(sharded), gradient(whole))
    print(f"{trainable}: sharded gradient off by {off:.3g}, log-probs by {whole.metrics['dlogp_first_max']:.3g}")
    assert off <= 1e-5
    assert sharded.metrics["dlogp_first_max"] <= 1e-5


@pytest.mark.parametrize("is_sharded", [False, True])
def test_bf16_with_recomputed_activations_trains_and_says_what_rounding_did(
    samples: list[TrainingSample], one_rank: Ranks, is_sharded: bool
) -> None:
    trainer = GrpoTrainer(MODEL, device=GPU, ranks=one_rank if is_sharded else None)
    exact = train(GrpoTrainer(MODEL, device=GPU), samples)
    outcome = train(trainer, samples, compute_dtype="bfloat16", activation_checkpointing=True, clip_range=1e-4)
    metrics, off = outcome.metrics, relative(gradient(outcome), gradient(exact))
    print(f"bf16: log-probs off by {metrics['dlogp_first_max']:.3g}, gradient by {off:.3g}")
    assert metrics["log_probs_recomputed"] == 1
    assert (metrics["ratio_min"], metrics["ratio_max"]) == (1, 1)
    assert off < 0.3
    assert {array.dtype for array in outcome.state.adapter.values()} == {np.dtype(np.float32)}
    assert train(trainer, samples, compute_dtype="bfloat16", log_probs="recompute").metrics["policy_changed"] == 1


@pytest.mark.parametrize("trainable", ["lora", "full"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_sleeping_trainer_leaves_the_device_and_wakes_up_the_same(
    samples: list[TrainingSample], one_rank: Ranks, is_sharded: bool, trainable: str
) -> None:
    before = allocated()
    trainer = GrpoTrainer(MODEL, device=GPU, ranks=one_rank if is_sharded else None)
    assert allocated() == before  # nothing is on the device before there is work
    first = train(trainer, samples, trainable=trainable)
    embeds = trainer.encode(PROMPTS[:1])[0]
    awake = allocated() - before
    trainer.sleep()
    asleep = allocated() - before
    print(f"{trainable}, sharded {is_sharded}: {awake / 1e6:.1f} MB awake, {asleep / 1e6:.2f} MB asleep")
    assert asleep < awake / 4  # tables of positions stay
    again = train(trainer, samples, trainable=trainable)
    for name, weights in first.state.adapter.items():
        np.testing.assert_allclose(again.state.adapter[name], weights, rtol=0, atol=1e-5)
    np.testing.assert_allclose(trainer.encode(PROMPTS[:1])[0], embeds, rtol=0, atol=1e-5)


def test_weights_that_were_damaged_in_their_sleep_are_refused(samples: list[TrainingSample], one_rank: Ranks) -> None:
    trainer = GrpoTrainer(MODEL, device=GPU, ranks=one_rank)
    train(trainer, samples)
    trainer.sleep()
    with torch.no_grad():
        weight = trainer._transformer.proj_out.weight
        weight.to_local().flatten()[0].add_(1)
    for _ in range(2):
        with pytest.raises(UnseededError, match=r"1 tensors woke up other than they fell asleep, the first proj_out"):
            train(trainer, samples)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_checkpointing": True},
        {"compute_dtype": "bfloat16"},
        {"compute_dtype": "bfloat16", "activation_checkpointing": True},
        {"trainable": "full"},
    ],
)
def test_memory_as_counted_covers_what_is_used(
    samples: list[TrainingSample], monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    """Rows enough that activations are most of it; the allocator's blocks and workspaces of libraries come on top."""
    counted: list[dict[str, int]] = []
    monkeypatch.setattr(trainer_module, "check_memory", lambda wanted, free, rows: counted.append(dict(wanted)))
    trainer = GrpoTrainer(MODEL, device=GPU)
    train(trainer, samples, micro_batch=12, **changes)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train(trainer, samples, micro_batch=12, **changes)
    used = torch.cuda.max_memory_allocated() - before
    (wanted,) = counted
    passing = sum(size for name, size in wanted.items() if name not in ("weights", "reference"))
    print(f"{changes}: counted {passing / 1e6:.1f} MB, used {used / 1e6:.1f} MB, {passing / used:.2f}")
    assert 0.8 * used <= passing < 2 * used


def test_what_does_not_fit_is_refused_before_it_starts(samples: list[TrainingSample]) -> None:
    """With most of the device held by somebody else."""
    trainer = GrpoTrainer(MODEL, device=GPU)
    train(trainer, samples[:4], prompts_per_iteration=1, micro_batch=1)
    torch.cuda.empty_cache()
    held = torch.empty(int(torch.cuda.mem_get_info()[0]) - 24 * 1024**2, dtype=torch.uint8, device=GPU)
    with pytest.raises(TrainingError, match=r"^memory: .* must fit; lower grpo\.micro_batch \(24 rows now\)"):
        train(trainer, samples, micro_batch=12)
    del held
    torch.cuda.empty_cache()  # else small blocks split it, and what is left of it serves no others
    assert train(trainer, samples, micro_batch=12).metrics["policy_changed"] == 1
