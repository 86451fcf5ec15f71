"""FSDP2 over several processes on gloo: the same gradient, policy and numbers whatever their number."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from diffusion_rollouts import MODEL, NOISE_LEVEL, NUM_STEPS, PROMPTS, training_samples
from trainer_rank import write_samples

from spot_runtime.diffusion.embeddings import PromptEncoder
from spot_runtime.diffusion.engine import DiffusersEngine
from spot_runtime.types import PolicyRef

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

SAMPLING = {"num_steps": NUM_STEPS, "noise_level": NOISE_LEVEL, "sde_window_stop": 4, "sde_window_size": 4}
GRPO = {
    "prompts_per_iteration": 3,
    "group_size": 4,
    "learning_rate": 1e-4,
    "optimizer_steps": 1,
    "micro_batch": 5,
    "lora_rank": 4,
    "lora_alpha": 8,
    "clip_range": 0.5,
}
"""Three micro batches: with two and with four ranks one of them is idle in a turn. The clip range lets a second step follow."""


def case(training_steps: int = 1, **changes: object) -> dict[str, object]:
    return {"sampling": SAMPLING, "grpo": GRPO | changes, "training_steps": training_steps}


CASES = {
    "lora": case(),
    "guarded": case(ratio="guard", ema_decay=0.5, optimizer_steps=3, activation_checkpointing=True),
    "whole": case(trainable="full", kl_coefficient=0.1, log_probs="recompute", training_steps=2),
    "half": case(compute_dtype="bfloat16", activation_checkpointing=True),
}
EXACT = ("lora", "guarded", "whole")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    engine = DiffusersEngine(MODEL)
    engine.load_policy(PolicyRef(), None)
    samples = training_samples(engine, PromptEncoder(MODEL).encode(PROMPTS))
    write_samples(folder, samples)
    (folder / "cases.json").write_text(json.dumps(CASES))
    for size in (1, 2, 4):
        with world(folder, size) as ranks:
            codes = [rank.wait(800) for rank in ranks]
            assert codes == [0] * size, said(folder, codes)
    return folder


@contextmanager
def world(folder: Path, size: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many ranks, all gone at the end; what each says, and where it was when it aborted, is in a file of its own."""
    script = str(Path(__file__).with_name("trainer_rank.py"))
    with ExitStack() as open_files:
        logs = [open_files.enter_context((folder / f"rank-{size}-{rank}.log").open("wb")) for rank in range(size)]
        commands = [[sys.executable, "-X", "faulthandler", script, str(folder), str(r), str(size)] for r in range(size)]
        ranks = [subprocess.Popen(command, stderr=log) for command, log in zip(commands, logs, strict=True)]
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def said(folder: Path, codes: list[int]) -> str:
    logs = [(folder / f"rank-{len(codes)}-{rank}.log").read_text() for rank in range(len(codes))]
    return "\n".join(f"rank {rank} ended with {codes[rank]}:\n{log[-4000:]}" for rank, log in enumerate(logs))


def part(folder: Path, name: str, size: int, prefix: str) -> np.ndarray:
    with np.load(folder / f"{name}-{size}.npz") as tensors:
        return np.concatenate([tensors[key].ravel() for key in sorted(tensors) if key.startswith(prefix)])


def difference(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("size", [2, 4])
def test_the_gradient_is_the_same_for_any_number_of_ranks(outcomes: Path, size: int) -> None:
    """After one optimizer step the first moment is (1 - β1) times the gradient."""
    got, want = (part(outcomes, "lora", each, "exp_avg.") for each in (size, 1))
    assert difference(got, want) <= 1e-5


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["guarded", "whole"])
def test_policy_moments_and_average_are_those_of_one_process(outcomes: Path, name: str, size: int) -> None:
    for prefix in ("adapter.", "exp_avg.", "exp_avg_sq.", *(["ema."] if name == "guarded" else [])):
        got, want = (part(outcomes, name, each, prefix) for each in (size, 1))
        assert difference(got, want) <= 1e-3, prefix


@pytest.mark.parametrize("size", [2, 4])
def test_a_base_in_bf16_under_an_adapter_in_fp32_is_sharded_too(outcomes: Path, size: int) -> None:
    """Rounding depends on which samples are computed together, so the gradient is near, not the same."""
    got, want = (part(outcomes, "half", each, "exp_avg.") for each in (size, 1))
    assert difference(got, want) <= 0.1


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", EXACT)
def test_every_rank_counts_in_the_numbers(outcomes: Path, name: str, size: int) -> None:
    got, want = (json.loads((outcomes / f"{name}-{each}.json").read_text()) for each in (size, 1))
    assert got.keys() == want.keys()
    exact = ("trained_rows", "optimizer_steps", "groups", "clip_fraction", "log_probs_recomputed", "policy_changed")
    assert {key: got[key] for key in exact} == {key: want[key] for key in exact}
    for key in ("loss", "ratio_mean", "ratio_min", "ratio_max", "grad_norm", "dlogp_first_mean", "adapter_delta_norm"):
        assert got[key] == pytest.approx(want[key], rel=1e-2, abs=1e-6), key
