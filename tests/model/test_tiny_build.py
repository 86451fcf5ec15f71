"""The parts of a tiny pipeline: vocabulary, text encoder, shapes of tensors, and flow matching beside the stock pipeline."""

from __future__ import annotations

import random

import pytest
import torch
from diffusers import QwenImagePipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift, retrieve_timesteps

from spot_runtime.errors import InputError
from spot_runtime.models.build import BENCH, BENCH_RESOLUTION, TINY, build_pipeline, rope_axes
from spot_runtime.models.flow import flow_loss, pack, sampler_noise_levels, unpack, velocity
from spot_runtime.models.latents import encode_prompts, make_latent_set, training_rows
from spot_runtime.models.muon import Muon, orthogonalised
from spot_runtime.models.pretrain import GradientPass, learning_rate_factor
from spot_runtime.models.recipe import domain_words, resolved_device
from spot_runtime.rewards.prompts import TEXT_CHARACTERS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny() -> QwenImagePipeline:
    return build_pipeline(TINY, domain_words(), seed=0)


def test_every_word_of_the_domain_is_one_token_after_a_space(tiny: QwenImagePipeline) -> None:
    lengths = {word: len(tiny.tokenizer(f" {word}").input_ids) for word in domain_words()}
    assert set(lengths.values()) == {1}, {word: n for word, n in lengths.items() if n > 1}


def test_a_text_is_spelt_in_single_characters(tiny: QwenImagePipeline) -> None:
    assert tiny.tokenizer.tokenize(TEXT_CHARACTERS) == list(TEXT_CHARACTERS)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a photo of a red square left of a blue cross", "a photo of a blue cross left of a red square"),
        ("a photo of two red squares", "a photo of three red squares"),
        ('a photo of the text "AB"', 'a photo of the text "BA"'),
    ],
)
def test_random_text_encoder_tells_orders_apart(tiny: QwenImagePipeline, one: str, other: str) -> None:
    """The last token is the same in both prompts: only context, which has to keep the order, can tell them apart."""
    embeds_PLD, mask_PL = encode_prompts(tiny, [one, other], CPU)
    last = mask_PL.sum(1) - 1
    a, b = embeds_PLD[0, last[0]], embeds_PLD[1, last[1]]
    assert (a - b).norm() / a.norm() > 0.05


def test_prompt_embedding_does_not_depend_on_its_batch(tiny: QwenImagePipeline) -> None:
    short, long = "a photo of a red square", "a photo of a red square above a blue cross left of a green circle"
    alone, _ = encode_prompts(tiny, [short], CPU)
    beside, mask = encode_prompts(tiny, [short, long], CPU)
    real = int(mask[0].sum())
    torch.testing.assert_close(beside[0, :real], alone[0, :real], atol=1e-5, rtol=0)


def test_velocity_equals_the_stock_forward(tiny: QwenImagePipeline) -> None:
    embeds_BLD, mask_BL = encode_prompts(tiny, ["a photo of a red square", 'a photo of the text "ABCD"'], CPU)
    x_BTC = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(0))
    level_B = torch.tensor([0.9, 0.3])
    with torch.no_grad():
        ours = velocity(tiny.transformer, x_BTC, level_B, embeds_BLD, mask_BL)
        stock = tiny.transformer(
            hidden_states=x_BTC,
            timestep=level_B,
            encoder_hidden_states=embeds_BLD,
            encoder_hidden_states_mask=mask_BL,
            img_shapes=[[(1, 8, 8)]] * 2,
            return_dict=False,
        )[0]
    torch.testing.assert_close(ours, stock, atol=0, rtol=0)


def test_packing_equals_the_pipelines_and_unpacking_inverts_it(tiny: QwenImagePipeline) -> None:
    z = torch.randn(2, 4, 16, 16)
    torch.testing.assert_close(pack(z), tiny._pack_latents(z[:, :, None], 2, 4, 16, 16), atol=0, rtol=0)
    torch.testing.assert_close(unpack(pack(z)), z, atol=0, rtol=0)


def test_noise_levels_are_the_pipelines(tiny: QwenImagePipeline) -> None:
    levels = sampler_noise_levels(tiny.scheduler, 10, 64)
    mu = calculate_shift(64, 256, 8192, 0.5, 0.9)
    retrieve_timesteps(tiny.scheduler, 10, CPU, sigmas=[1 - 0.1 * i for i in range(10)], mu=mu)
    torch.testing.assert_close(levels, tiny.scheduler.sigmas, atol=1e-6, rtol=0)
    assert levels[0] == 1
    assert levels[-1] == 0


def test_same_seed_same_weights_and_global_generator_untouched(tiny: QwenImagePipeline) -> None:
    before = torch.random.get_rng_state()
    again = build_pipeline(TINY, domain_words(), seed=0)
    assert torch.equal(before, torch.random.get_rng_state())
    for one, other in zip(tiny.transformer.parameters(), again.transformer.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("head_dim", [24, 28, 32, 64, 128])
def test_rope_axes_are_even_and_sum_to_the_head(head_dim: int) -> None:
    axes = rope_axes(head_dim)
    assert sum(axes) == head_dim
    assert all(axis % 2 == 0 and axis > 0 for axis in axes)


def test_bench_model_splits_evenly_among_sequence_parallel_ranks() -> None:
    tokens = (BENCH_RESOLUTION // 8) ** 2
    assert BENCH.heads % 4 == 0
    assert tokens % 4 == 0


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonalised(torch.randn(3, 40, 16, generator=torch.Generator().manual_seed(0))))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_a_few_training_steps_lower_the_loss_on_a_fixed_batch(tiny: QwenImagePipeline) -> None:
    pipeline = build_pipeline(TINY, domain_words(), seed=1)
    data = make_latent_set(pipeline, training_rows(0, 50), 32, 64, random.Random(0), CPU)
    batch = data.batch(16, torch.Generator().manual_seed(0), only_true=False)
    with torch.no_grad():
        before = flow_loss(pipeline.transformer, *batch.tensors()).item()
    gradients = GradientPass(pipeline.transformer, batch)
    optimizer = Muon(pipeline.transformer, learning_rate=3e-3)
    for _ in range(8):
        gradients(batch)
        optimizer.step(3e-3)
    with torch.no_grad():
        after = flow_loss(pipeline.transformer, *batch.tensors()).item()
    assert after < 0.8 * before


def test_learning_rate_warms_up_stays_and_falls() -> None:
    assert learning_rate_factor(0, 0.0) == pytest.approx(1 / 200)
    assert learning_rate_factor(1000, 0.5) == 1
    assert learning_rate_factor(1000, 0.8) == pytest.approx(0.5)
    assert learning_rate_factor(1000, 1.0) == pytest.approx(0.02)


def test_unknown_device_is_one_line_that_names_it() -> None:
    with pytest.raises(InputError, match="device = 'tpu': must be auto, cpu or cuda"):
        resolved_device("tpu")
