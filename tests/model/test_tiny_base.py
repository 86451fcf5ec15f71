"""The shipped base: loads by the stock path, is small, and draws about a third of its prompts right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline

import spot_runtime.models
from spot_runtime.models.evaluation import Evaluation, draw, grade, make_exam
from spot_runtime.models.recipe import folder_bytes
from spot_runtime.models.tokenizer import TEMPLATE
from spot_runtime.rewards.prompts import GenevalRow, shapes_rows, text_rows

FOLDER = Path(spot_runtime.models.__file__).parent / "tiny"
FOLDER_BYTES_MAX = 16_000_000


@pytest.fixture(scope="module")
def base() -> QwenImagePipeline:
    return QwenImagePipeline.from_pretrained(FOLDER)


def graded(base: QwenImagePipeline, rows: tuple[GenevalRow, ...], tries: int) -> Evaluation:
    exam = make_exam(base, rows, tries, side_px=64, num_steps=10, seed=5, device=torch.device("cpu"))
    return grade(draw(base.transformer, base.vae, exam, batch=32), exam)


def test_folder_is_small_enough_to_ship() -> None:
    assert folder_bytes(FOLDER) <= FOLDER_BYTES_MAX


def test_template_prefix_is_34_tokens_as_the_pipeline_drops_so_many(base: QwenImagePipeline) -> None:
    assert base.prompt_template_encode == TEMPLATE
    assert len(base.tokenizer(TEMPLATE.split("{}")[0]).input_ids) == base.prompt_template_encode_start_idx == 34


def test_stock_pipeline_draws_an_image_of_the_asked_size(base: QwenImagePipeline) -> None:
    base.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    image = base("a photo of a red circle", num_inference_steps=4, height=64, width=64, generator=generator).images[0]
    assert image.size == (64, 64)


def test_shapes_are_right_about_a_third_of_the_time_and_within_reach_of_four_tries(base: QwenImagePipeline) -> None:
    success = graded(base, shapes_rows(5, 32, "validation"), tries=4).overall
    assert 0.26 <= success.one_try <= 0.5
    assert success.any_try >= success.one_try + 0.2


def test_texts_read_exactly_about_a_third_of_the_time_and_within_reach_of_four_tries(base: QwenImagePipeline) -> None:
    success = graded(base, text_rows(5, 24, "validation"), tries=4).overall
    assert 0.25 <= success.one_try <= 0.55
    assert success.any_try >= success.one_try + 0.25
