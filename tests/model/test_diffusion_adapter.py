from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusion_rollouts import MODEL, random_adapter

from spot_runtime.diffusion.adapter import (
    ALPHA_KEY,
    AttachedAdapter,
    adapter_digest,
    adapter_modules,
    export_adapter,
    initial_adapter,
)
from spot_runtime.diffusion.geometry import model_folder
from spot_runtime.diffusion.policy_slot import AttachedSlot, MergedSlot, PolicySlot, make_policy_slot
from spot_runtime.diffusion.transformer import load_transformer, predict_velocity
from spot_runtime.diffusion.weights import copy_weights
from spot_runtime.errors import PolicyMismatchError


@pytest.fixture
def transformer() -> QwenImageTransformer2DModel:
    return load_transformer(model_folder(MODEL), torch.device("cpu"), torch.float32)


def velocity(transformer: QwenImageTransformer2DModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 64, transformer.config.in_channels, generator=generator)
    text = torch.randn(2, 9, transformer.config.joint_attention_dim, generator=generator)
    with torch.no_grad():
        return predict_velocity(transformer, x, torch.tensor([0.9, 0.3]), list(text), (8, 8))


def test_the_initial_adapter_changes_nothing_and_follows_its_seed(transformer: QwenImageTransformer2DModel) -> None:
    before = velocity(transformer)
    adapter = initial_adapter(transformer, rank=4, alpha=8, seed=1)
    AttachedAdapter(transformer, adapter)
    assert torch.equal(velocity(transformer), before)
    assert len(adapter_modules(adapter)) == 12 * transformer.config.num_layers
    assert adapter_digest(adapter) == adapter_digest(initial_adapter_of(seed=1))
    assert adapter_digest(adapter) != adapter_digest(initial_adapter_of(seed=2))


def initial_adapter_of(seed: int) -> dict[str, np.ndarray]:
    fresh = load_transformer(model_folder(MODEL), torch.device("cpu"), torch.float32)
    return initial_adapter(fresh, rank=4, alpha=8, seed=seed)


def test_an_adapter_acts_as_its_formula_says(transformer: QwenImageTransformer2DModel) -> None:
    """W' = W + alpha / rank B A, merged by hand into a second copy of the model."""
    adapter = random_adapter(initial_adapter(transformer, rank=4, alpha=8, seed=1), seed=2)
    merged = load_transformer(model_folder(MODEL), torch.device("cpu"), torch.float32)
    for module in adapter_modules(adapter):
        low, high = adapter[f"{module}.lora_A.weight"], adapter[f"{module}.lora_B.weight"]
        merged.get_submodule(module).weight += torch.from_numpy(8 / 4 * high @ low)
    AttachedAdapter(transformer, adapter)
    torch.testing.assert_close(velocity(transformer), velocity(merged), rtol=0, atol=2e-4)


def test_binding_round_trips_and_disabling_restores_the_base_exactly(transformer: QwenImageTransformer2DModel) -> None:
    base = velocity(transformer)
    first = initial_adapter(transformer, rank=4, alpha=8, seed=1)
    attached = AttachedAdapter(transformer, first)
    second = random_adapter(first, seed=2)
    attached.bind(second)
    assert adapter_digest(attached.state()) == adapter_digest(second)
    assert not torch.equal(velocity(transformer), base)
    attached.enable(False)
    assert torch.equal(velocity(transformer), base)
    attached.enable(True)
    assert not torch.equal(velocity(transformer), base)
    attached.detach()
    assert torch.equal(velocity(transformer), base)


def test_an_adapter_of_another_alpha_is_not_bound(transformer: QwenImageTransformer2DModel) -> None:
    first = initial_adapter(transformer, rank=4, alpha=8, seed=1)
    attached = AttachedAdapter(transformer, first)
    other = first | {ALPHA_KEY: np.array([16], dtype=np.float32)}
    assert not attached.fits(other)
    with pytest.raises(PolicyMismatchError, match="lora_alpha"):
        attached.bind(other)


@pytest.mark.parametrize("make_slot", [MergedSlot, AttachedSlot])
def test_a_policy_slot_exchanges_policies_and_gives_the_base_back_exactly(
    transformer: QwenImageTransformer2DModel, make_slot: type[MergedSlot] | type[AttachedSlot]
) -> None:
    """Policies of another rank, and one that covers fewer modules than the policy before it."""
    base = velocity(transformer)
    wide = random_adapter(initial_adapter(transformer, rank=4, alpha=8, seed=1), seed=2)
    narrow = random_adapter(initial_adapter(transformer, rank=2, alpha=8, seed=1), seed=3)
    few = {name: array for name, array in narrow.items() if ".attn.to_q." in name or name == ALPHA_KEY}
    whole = {name: array + np.float32(0.01) for name, array in copy_weights(transformer).items()}
    slot: PolicySlot = make_slot(transformer)
    slot.bind(None)
    outputs = []
    for adapter in (wide, narrow, few, whole, wide, few, narrow, whole, None):
        slot.bind(adapter)
        outputs.append(velocity(transformer))
    assert torch.equal(outputs[-1], base)
    for one, other in ((0, 4), (1, 6), (2, 5), (3, 7)):
        assert torch.equal(outputs[one], outputs[other])
    assert len({round(float(output.sum()), 3) for output in (*outputs[:4], base)}) == 5


def test_merged_and_attached_policies_agree(transformer: QwenImageTransformer2DModel) -> None:
    adapter = random_adapter(initial_adapter(transformer, rank=4, alpha=8, seed=1), seed=2, scale=0.02)
    merged = load_transformer(model_folder(MODEL), torch.device("cpu"), torch.float32)
    MergedSlot(merged).bind(adapter)
    AttachedSlot(transformer).bind(adapter)
    torch.testing.assert_close(velocity(merged), velocity(transformer), rtol=0, atol=1e-5)


def test_a_misfit_leaves_a_merged_slot_as_it_was(transformer: QwenImageTransformer2DModel) -> None:
    adapter = random_adapter(initial_adapter(transformer, rank=4, alpha=8, seed=1), seed=2)
    slot = MergedSlot(transformer)
    slot.bind(adapter)
    before = velocity(transformer)
    with pytest.raises(
        PolicyMismatchError, match=r"transformer_blocks\.0\.attn\.to_q\.lora_B\.weight: absent, must be"
    ):
        slot.bind({k: v for k, v in adapter.items() if k != "transformer_blocks.0.attn.to_q.lora_B.weight"})
    assert torch.equal(velocity(transformer), before)


def test_only_fp32_models_are_merged(transformer: QwenImageTransformer2DModel) -> None:
    assert isinstance(make_policy_slot(transformer), MergedSlot)
    assert isinstance(make_policy_slot(transformer.bfloat16()), AttachedSlot)


def test_an_exported_adapter_loads_in_stock_diffusers_with_the_same_output(
    transformer: QwenImageTransformer2DModel, tmp_path: Path
) -> None:
    adapter = random_adapter(initial_adapter(transformer, rank=4, alpha=12, seed=1), seed=2)
    AttachedAdapter(transformer, adapter)
    export_adapter(tmp_path / "export", adapter)
    pipeline = QwenImagePipeline.from_pretrained(model_folder(MODEL))
    pipeline.load_lora_weights(tmp_path / "export")
    torch.testing.assert_close(velocity(pipeline.transformer), velocity(transformer), rtol=0, atol=1e-6)


def test_the_digest_sees_names_shapes_and_values() -> None:
    plain = {"a": np.zeros((2, 3), np.float32)}
    variants = [
        plain,
        {"b": plain["a"]},
        {"a": plain["a"].reshape(3, 2)},
        {"a": plain["a"].astype(np.float64)},
        {"a": plain["a"] + 1},
    ]
    assert len({adapter_digest(variant) for variant in variants}) == len(variants)
    assert adapter_digest({"a": np.asfortranarray(plain["a"])}) == adapter_digest(plain)
