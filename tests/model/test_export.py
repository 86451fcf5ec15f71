"""`spotlight export` against stock diffusers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from diffusion_rollouts import MODEL, policy_of, random_adapter

from spot_runtime import cli
from spot_runtime.config import RunSettings
from spot_runtime.diffusion.adapter import initial_adapter
from spot_runtime.diffusion.geometry import check_model, model_folder
from spot_runtime.diffusion.policy_slot import MergedSlot
from spot_runtime.diffusion.state import TrainerState
from spot_runtime.diffusion.transformer import load_transformer, predict_velocity
from spot_runtime.diffusion.weights import copy_weights
from spot_runtime.errors import InputError
from spot_runtime.export import CARD
from spot_runtime.store.checkpoints import Checkpoint, put_checkpoint, trainer_key
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import PolicyRef

RUN = "geneval-20260101-000000-ab12"


@pytest.fixture
def transformer() -> QwenImageTransformer2DModel:
    return load_transformer(model_folder(MODEL), torch.device("cpu"), torch.float32)


def low_rank(transformer: QwenImageTransformer2DModel) -> dict[str, np.ndarray]:
    return random_adapter(initial_adapter(transformer, rank=4, alpha=12, seed=1), seed=2)


def whole(transformer: QwenImageTransformer2DModel) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    weights = copy_weights(transformer)
    return {name: w + 0.01 * rng.standard_normal(w.shape).astype(np.float32) for name, w in weights.items()}


def store_run(folder: Path, policy: Mapping[str, np.ndarray], ema: Mapping[str, np.ndarray]) -> str:
    """A checkpoint after one iteration; returns the run's URI."""
    store = TensorStore(folder.as_uri())
    ref = policy_of(1, policy)
    ref = PolicyRef(1, f"runs/{RUN}/policies/1-{ref.digest[:16]}", ref.digest)
    state, meta = TrainerState(policy, {}, {}, 1, 1, ema), {"policy_digest": ref.digest}
    store.put(trainer_key(ref), state.tensors(), meta)
    store.put(ref.key, dict(policy), meta)
    settings = RunSettings(
        run_id=RUN,
        iterations=1,
        resolution=64,
        model=MODEL,
        model_digest=check_model(MODEL).digest,
        store=store.url,
        train_prompts_key="t",
        validation_prompts_key="v",
    )
    checkpoint = Checkpoint(
        run_id=RUN,
        iteration=1,
        lineage="geneval",
        policy=ref,
        state_json="{}",
        settings_json=settings.model_dump_json(),
    )
    put_checkpoint(store, checkpoint)
    return f"{store.url}/runs/{RUN}"


def velocity(transformer: QwenImageTransformer2DModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 64, transformer.config.in_channels, generator=generator)
    text = torch.randn(9, transformer.config.joint_attention_dim, generator=generator)
    with torch.no_grad():
        return predict_velocity(transformer, latents, torch.tensor([0.9, 0.3]), [text, text[:7]], (8, 8))


def export(*argv: str) -> None:
    cli.app(args=["export", *argv], standalone_mode=False)


@pytest.mark.parametrize("ema", [False, True])
def test_an_exported_adapter_is_loaded_by_stock_diffusers_with_the_same_output(
    transformer: QwenImageTransformer2DModel, tmp_path: Path, ema: bool
) -> None:
    policy = low_rank(transformer)
    average = {name: w if name == "lora_alpha" else w * 0.5 for name, w in policy.items()}
    export(store_run(tmp_path / "store", policy, average), str(tmp_path / "out"), *(["--ema"] if ema else []))
    pipeline = QwenImagePipeline.from_pretrained(model_folder(MODEL))
    pipeline.load_lora_weights(tmp_path / "out")
    MergedSlot(transformer).bind(average if ema else policy)
    torch.testing.assert_close(velocity(pipeline.transformer), velocity(transformer), rtol=0, atol=1e-5)
    card = json.loads((tmp_path / "out" / CARD).read_text())
    assert (card["run_id"], card["iteration"], card["is_average"]) == (RUN, 1, ema)


def test_exported_weights_are_loaded_by_stock_diffusers_with_the_same_output(
    transformer: QwenImageTransformer2DModel, tmp_path: Path
) -> None:
    policy = whole(transformer)
    export(store_run(tmp_path / "store", policy, {}), str(tmp_path / "out"))
    loaded = QwenImageTransformer2DModel.from_pretrained(tmp_path / "out", subfolder="transformer")
    before = velocity(transformer)
    MergedSlot(transformer).bind(policy)
    torch.testing.assert_close(velocity(loaded), velocity(transformer), rtol=0, atol=0)
    assert (velocity(loaded) - before).abs().max() > 1e-3


def test_what_cannot_be_exported_is_one_line_and_leaves_no_folder(
    transformer: QwenImageTransformer2DModel, tmp_path: Path
) -> None:
    uri, out = store_run(tmp_path / "store", low_rank(transformer), {}), tmp_path / "out"
    with pytest.raises(InputError, match=r"^ema = True: run .* keeps no average, cfg\.grpo\.ema_decay must be > 0$"):
        export(uri, str(out), "--ema")
    with pytest.raises(InputError, match="has no checkpoint of run"):
        export(f"{uri}/checkpoints/5", str(out))
    assert not out.exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(InputError, match="must not exist yet, or be empty"):
        export(uri, str(tmp_path / "full"))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_folder_that_no_file_system_takes_is_one_line(
    transformer: QwenImageTransformer2DModel, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"^folder = '.*': File name too long$"):
        export(store_run(tmp_path / "store", low_rank(transformer), {}), str(tmp_path / ("a" * 300)))


def test_an_empty_working_directory_can_be_the_folder(
    transformer: QwenImageTransformer2DModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    export(store_run(tmp_path / "store", low_rank(transformer), {}), ".")
    assert (tmp_path / "here" / CARD).is_file()
