"""Which reward judges which row: the model's defaults, a row's own word, and combinations that cannot work."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from spot_runtime.config import DatasetName, TrainConfig
from spot_runtime.errors import InputError
from spot_runtime.rewards import choice
from spot_runtime.rewards.choice import check_offered, draws_photographs, rewarded
from spot_runtime.rewards.client import RewardClient
from spot_runtime.rewards.coco import coco_rows, is_evaluation_prompt
from spot_runtime.rewards.engines.vlm import MODEL_DEFAULT, VlmReader
from spot_runtime.rewards.prompts import GenevalObject, GenevalRow, prompt_id, reward_of, shapes_rows, text_rows
from tasks.start_run import TRAIN_ROWS, prompt_rows

pytestmark = pytest.mark.usefixtures("hub")


SERVED = {"data": [{"id": MODEL_DEFAULT}]}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub and a chat service that have what they are asked for."""
    monkeypatch.setattr("spot_runtime.rewards.engines.pretrained.require_weights", lambda model: None)
    monkeypatch.setattr(VlmReader, "models", lambda _: (200, json.dumps(SERVED).encode()))


SHAPES = shapes_rows(0, 4, "train")
TEXTS = text_rows(0, 4, "train")
PHOTOGRAPHS = coco_rows(0, 4, "train")
VLM_URL = {"SPOTLIGHT_VLM_URL": "http://judge:8000/v1"}


def names(
    rows: tuple[GenevalRow, ...], reward: str = "", *, photographs: bool = False, **environment: str
) -> list[str]:
    return [reward_of(row) for row in rewarded(rows, reward, photographs=photographs, environment=environment)]


def test_a_model_of_few_pixels_draws_shapes_and_others_photographs() -> None:
    assert [draws_photographs(side) for side in (64, 128, 256, 1024)] == [False, False, True, True]


def test_the_tiny_models_defaults_leave_rows_and_their_ids_alone() -> None:
    mixed = (*SHAPES, *TEXTS)
    assert rewarded(mixed, "", photographs=False, environment={}) == mixed
    assert rewarded(SHAPES, "geneval", photographs=False, environment={}) == SHAPES
    assert names(mixed) == ["geneval"] * 4 + ["deepseek_ocr"] * 4


def test_photographs_are_judged_by_detectors_and_readers_of_photographs() -> None:
    assert names(PHOTOGRAPHS, photographs=True) == ["geneval-coco"] * 4
    assert names((*PHOTOGRAPHS, *TEXTS), photographs=True, **VLM_URL) == ["geneval-coco"] * 4 + ["deepseek_ocr-vlm"] * 4


def test_without_a_reader_of_photographs_a_run_of_texts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spot_runtime.rewards.engines.rapid.find_spec", lambda name: None)
    with pytest.raises(InputError, match="needs RapidOCR"):
        names(TEXTS, photographs=True)
    there = rewarded(TEXTS, "", photographs=True, here=False, environment={})
    assert {reward_of(row) for row in there} == {choice.RAPID}


def test_a_reward_goes_to_the_rows_that_it_can_judge_and_a_row_has_the_last_word() -> None:
    own = GenevalRow(tag="text", include=(), prompt='"A"', reward="jpeg")
    assert names((*SHAPES[:1], *TEXTS[:1], own), "geneval-soft") == ["geneval-soft", "deepseek_ocr", "jpeg"]
    assert names((*SHAPES[:1], *TEXTS[:1]), "jpeg") == ["jpeg", "jpeg"]
    (soft,) = rewarded(SHAPES[:1], "geneval-soft", photographs=False, environment={})
    assert prompt_id(soft) != prompt_id(SHAPES[0])


@pytest.mark.parametrize(
    ("rows", "reward", "photographs", "fault"),
    [
        (SHAPES, "faces", False, "reward = 'faces': must be one of geneval, "),
        (TEXTS, "geneval-soft", False, "reward = 'geneval-soft': judges objects, and no prompt asks for any"),
        (SHAPES, "deepseek_ocr", False, "reward = 'deepseek_ocr': judges texts, and no prompt asks for any"),
        (PHOTOGRAPHS, "", False, "the shapes detector finds only square, circle, triangle, cross"),
        (SHAPES, "", True, "must be one of the 80 COCO classes"),
        (
            SHAPES,
            "geneval-coco",
            False,
            "reward = 'geneval-coco': judges photographs, this model was made for <= 128 px",
        ),
        (TEXTS, "deepseek_ocr-rapidocr", False, "judges photographs, this model was made for <= 128 px"),
        (SHAPES, "clip-score", False, "judges photographs, this model was made for <= 128 px"),
        (PHOTOGRAPHS, "geneval-soft", True, "this one draws photographs: take geneval-coco-soft"),
        (TEXTS, "deepseek_ocr", True, "take deepseek_ocr-rapidocr or deepseek_ocr-vlm"),
        (TEXTS, "deepseek_ocr-vlm", True, "SPOTLIGHT_VLM_URL = '': must be a URL"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_starts(
    rows: tuple[GenevalRow, ...], reward: str, photographs: bool, fault: str
) -> None:
    with pytest.raises(InputError) as caught:
        names(rows, reward, photographs=photographs)
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- prompts of a run -------------------------------------------------------------------------------------------------------------

CONFIG = TrainConfig.parse({"grpo": {"prompts_per_iteration": 2, "optimizer_steps": 1}})


def test_photographs_get_prompts_over_coco_and_texts_stay_texts() -> None:
    train, validation = prompt_rows(DatasetName.GENEVAL, "", 0, CONFIG, photographs=True)
    assert (len(train), len(validation)) == (TRAIN_ROWS, CONFIG.evaluation.pairs)
    assert train == coco_rows(0, TRAIN_ROWS, "train")
    assert not any(is_evaluation_prompt(row.prompt) for row in (*train, *validation))
    train, _ = prompt_rows(DatasetName.DEEPSEEK_OCR, "", 0, CONFIG, photographs=True)
    assert {row.tag for row in train} == {"text"}


def write(path: Path, *rows: GenevalRow) -> str:
    clauses = [{"class": "bench", "count": 1}]
    path.write_text("".join(json.dumps({"tag": "t", "include": clauses, "prompt": row.prompt}) + "\n" for row in rows))
    return str(path)


def evaluation(prompt: str) -> GenevalRow:
    placed = GenevalObject(class_name="bench", count=1)
    assert is_evaluation_prompt(prompt)
    return GenevalRow(tag="t", include=(placed,), prompt=prompt)


def test_evaluation_prompts_of_a_file_are_only_ever_validated(tmp_path: Path) -> None:
    held = [evaluation("a photo of a bench"), evaluation("a photo of a cow"), evaluation("a photo of a clock")]
    mixed = write(tmp_path / "mixed.jsonl", *held[:2], *PHOTOGRAPHS, held[2])
    train, validation = prompt_rows(DatasetName.GENEVAL, mixed, 0, CONFIG, photographs=True)
    assert [row.prompt for row in validation] == [row.prompt for row in held]
    assert [row.prompt for row in train] == [row.prompt for row in PHOTOGRAPHS]


def test_a_file_of_evaluation_prompts_alone_is_trained_for_with_generated_ones(tmp_path: Path) -> None:
    alone = write(tmp_path / "evaluation.jsonl", evaluation("a photo of a bench"))
    train, validation = prompt_rows(DatasetName.GENEVAL, alone, 3, CONFIG, photographs=True)
    assert train == coco_rows(3, TRAIN_ROWS, "train")
    assert [row.prompt for row in validation] == ["a photo of a bench"]


def test_deepseek_ocr_takes_texts_a_line_and_rows_where_the_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("".join(f'a neon sign "A{index}" at night\n' for index in range(8)))
    train, validation = prompt_rows(DatasetName.DEEPSEEK_OCR, str(path), 0, CONFIG)
    assert (len(train), len(validation)) == (6, 2)
    rows = write(tmp_path / "rows.jsonl", *coco_rows(0, 8, "train"))
    assert {row.tag for side in prompt_rows(DatasetName.DEEPSEEK_OCR, rows, 0, CONFIG) for row in side} == {"t"}
    path.write_text('a sign "A"\na sign without\n')
    with pytest.raises(InputError, match=r"texts\.txt line 2: prompt must quote a text"):
        prompt_rows(DatasetName.DEEPSEEK_OCR, str(path), 0, CONFIG)


def service(answer: httpx.Response | Exception) -> RewardClient:
    def handle(_: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return RewardClient("http://judge:8188", transport=httpx.MockTransport(handle))


def test_a_reward_that_a_given_service_lacks_is_refused_and_one_that_is_silent_is_not_asked_twice() -> None:
    health = {"status": "ok", "datasets": ["geneval", "jpeg"], "queued_items": 0}
    check_offered(SHAPES, service(httpx.Response(200, json=health)))
    check_offered(TEXTS, service(httpx.ConnectError("refused")))
    with pytest.raises(InputError) as caught:
        check_offered((*SHAPES, *TEXTS), service(httpx.Response(200, json=health)))
    assert str(caught.value) == (
        "reward = 'deepseek_ocr': the cluster's service at http://judge:8188 judges by geneval, jpeg: start it with --reward deepseek_ocr"
    )
    with pytest.raises(InputError, match="http://judge:8188: not the answer of a reward service"):
        check_offered(SHAPES, service(httpx.Response(200, content=b"<html>")))
