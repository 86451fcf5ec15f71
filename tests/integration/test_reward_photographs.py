"""GenEval over photographs: the engine on tiny models with random weights, and its judge on scenes with stand-ins for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Mask2FormerImageProcessorPil,
    PreTrainedTokenizerFast,
    SwinConfig,
)

from spot_runtime.errors import InputError
from spot_runtime.rewards.catalog import check_reward, load_judge
from spot_runtime.rewards.coco import COLORS
from spot_runtime.rewards.detection import Detection, Image
from spot_runtime.rewards.engines.photographs import (
    PHRASES,
    ClipColors,
    Found,
    Mask2Former,
    PhotographJudge,
    cut_out,
)
from spot_runtime.rewards.prompts import GenevalObject, GenevalRow, Position
from spot_runtime.rewards.scorer import Verdict

NAMES = ["dog", "mouse", "tvmonitor"]
SCENE = np.random.default_rng(3).integers(0, 256, (48, 64, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Mask2Former with random weights that is sure of one thing: every query is a computer mouse."""
    folder = tmp_path_factory.mktemp("detector")
    torch.manual_seed(0)
    backbone = SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 1, 1],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    small = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 16}
    small |= {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "dim_feedforward": 16}
    config = Mask2FormerConfig(backbone_config=backbone, num_queries=20, id2label=dict(enumerate(NAMES)), **small)
    model = Mask2FormerForUniversalSegmentation(config)
    torch.nn.init.zeros_(model.class_predictor.weight)
    model.class_predictor.bias.data = torch.tensor([0.0, 9.0, 0.0, 0.0])
    model.save_pretrained(folder)
    Mask2FormerImageProcessorPil(size={"height": 64, "width": 64}).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A CLIP with random weights and a tokenizer of whole words."""
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(1)
    words = {word for phrase in PHRASES for word in phrase.replace("-", " - ").split() if "{" not in word}
    vocabulary = ["<pad>", "<eos>", "<unk>", *sorted(words | set(COLORS) | set(NAMES) | {"computer", "-"})]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    part = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = part | {"vocab_size": len(vocabulary), "max_position_embeddings": 16, "eos_token_id": 1, "pad_token_id": 0}
    config = CLIPConfig(text_config=text, vision_config=part | {"image_size": 32, "patch_size": 8}, projection_dim=16)
    CLIPModel(config).save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(folder)
    return str(folder)


def test_the_detector_finds_instances_with_boxes_around_their_masks(detector: str) -> None:
    found = Mask2Former(detector)(SCENE)
    assert 1 <= len(found) <= 16
    assert {item.class_name for item, _ in found} == {"computer mouse"}
    scores = [item.score for item, _ in found]
    assert scores == sorted(scores, reverse=True)
    assert all(0.3 <= score <= 1 for score in scores)
    for item, mask in found:
        assert mask.shape == (48, 64)
        x0, y0, x1, y1 = map(int, item.box)
        assert item.area == mask.sum() == mask[y0:y1, x0:x1].sum()
        assert mask[y0].any()
        assert mask[y1 - 1].any()
        assert mask[:, x0].any()
        assert mask[:, x1 - 1].any()


def found(name: str, box: tuple[int, int, int, int], confidence: float = 0.95) -> Found:
    mask = np.zeros((48, 64), np.bool_)
    mask[box[1] : box[3], box[0] : box[2]] = True
    return Detection(name, "", tuple(map(float, box)), confidence, float(mask.sum())), mask  # type: ignore[arg-type]


def test_colours_are_those_of_the_nearest_phrases_alone_and_among_others(clip: str) -> None:
    objects = [found("dog", (0, 0, 20, 20)), found("computer mouse", (20, 10, 60, 40)), found("dog", (5, 5, 9, 40))]
    colors = ClipColors(clip)(SCENE, objects)
    assert colors == [ClipColors(clip)(SCENE, [item])[0] for item in objects]
    assert colors[0] == by_hand(clip, cut_out(SCENE, objects[0][0].box, objects[0][1]), "dog")
    assert ClipColors(clip)(SCENE, []) == []


def by_hand(folder: str, crop: Image, name: str) -> str:
    """One colour at a time, in plain sums."""
    model, tokenizer = CLIPModel.from_pretrained(folder).eval(), PreTrainedTokenizerFast.from_pretrained(folder)
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(images=crop, return_tensors="pt")

    def unit(vector: torch.Tensor) -> torch.Tensor:
        return vector / vector.norm()

    similarity = {}
    with torch.no_grad():
        image_D = unit(model.visual_projection(model.vision_model(**pixels).pooler_output)[0])
        for color in COLORS:
            phrases = (phrase.format(color=color, name=name) for phrase in PHRASES)
            outputs = (model.text_model(**tokenizer(phrase, return_tensors="pt")).pooler_output for phrase in phrases)
            mean_D = unit(sum((unit(model.text_projection(output)[0]) for output in outputs), torch.zeros(16)))
            similarity[color] = float(mean_D @ image_D)
    return max(similarity, key=lambda color: similarity[color])


def test_an_object_is_cut_out_on_grey() -> None:
    mask = np.zeros((48, 64), np.bool_)
    mask[10, 20] = mask[12, 23] = True
    crop = cut_out(SCENE, (20.0, 10.0, 24.0, 13.0), mask)
    assert crop.shape == (3, 4, 3)
    assert crop[0, 0].tolist() == SCENE[10, 20].tolist()
    assert crop[2, 3].tolist() == SCENE[12, 23].tolist()
    assert (crop[1] == 0x99).all()


def row(*include: GenevalObject, tag: str = "colors") -> GenevalRow:
    return GenevalRow(tag=tag, include=include, prompt="p")


def test_both_models_load_from_folders_and_judge_an_image_by_name(detector: str, clip: str) -> None:
    environment = {"SPOTLIGHT_DETECTOR": detector, "SPOTLIGHT_CLIP": clip}
    there = row(GenevalObject(class_name="computer mouse", count=1))
    absent = row(GenevalObject(class_name="dog", count=1, color="red"))
    for name in ("geneval-coco", "geneval-coco-official", "geneval-coco-soft"):
        judge = load_judge(name, environment)
        verdicts = [judge(each, SCENE) for each in (there, absent)]
        assert all(isinstance(verdict, Verdict) for verdict in verdicts)
        assert [verdict.correct for verdict in verdicts] == [True, False]  # type: ignore[union-attr]


def test_rules_see_what_the_models_see_and_colours_are_named_only_where_asked() -> None:
    named: list[int] = []

    def find(image: Image) -> list[Found]:
        return [found("dog", (40, 5, 60, 25)), found("cat", (2, 5, 22, 25)), found("dog", (0, 30, 9, 39), 0.31)]

    def name_colors(image: Image, objects: Sequence[Found]) -> list[str]:
        named.append(len(objects))
        return ["red" if item.class_name == "dog" else "blue" for item, _ in objects]

    judge = PhotographJudge("official", find, name_colors)
    cat = GenevalObject(class_name="cat", count=1)
    right = GenevalObject(class_name="dog", count=1, position=Position("right of", 0))
    left = GenevalObject(class_name="dog", count=1, position=Position("left of", 0))
    assert judge(row(cat, right, tag="position"), SCENE) == Verdict(1.0, True, "")
    assert judge(row(cat, left, tag="position"), SCENE).reward == 0.0
    assert judge(row(GenevalObject(class_name="dog", count=2), tag="counting"), SCENE).reward == 0.0  # one below .9
    assert named == []
    assert judge(row(GenevalObject(class_name="dog", count=1, color="red")), SCENE).correct
    assert not judge(row(GenevalObject(class_name="cat", count=1, color="red")), SCENE).correct
    assert named == [3, 3]


def test_rows_of_another_world_are_errors() -> None:
    judge = PhotographJudge("clamped", lambda image: [], lambda image, objects: [])
    with pytest.raises(InputError, match="geneval judges objects, not texts"):
        judge(GenevalRow(tag="text", include=(), prompt='"A"'), SCENE)
    with pytest.raises(InputError, match="class = 'square': must be one of the 80"):
        judge(row(GenevalObject(class_name="square", count=1)), SCENE)


def test_likeness_is_the_scaled_cosine_of_image_and_whole_prompt(clip: str) -> None:
    asked = GenevalRow(tag="text", include=(), prompt='a photo of a red dog "A" ' + "dog " * 40)
    model, tokenizer = CLIPModel.from_pretrained(clip).eval(), PreTrainedTokenizerFast.from_pretrained(clip)
    pixels = CLIPImageProcessorPil.from_pretrained(clip)(images=SCENE, return_tensors="pt")
    tokens = tokenizer(asked.prompt, truncation=True, max_length=16, return_tensors="pt")
    with torch.no_grad():
        outputs = model(**pixels, **tokens)
        cosine = float(outputs.image_embeds[0] @ outputs.text_embeds[0])
    environment = {"SPOTLIGHT_CLIP": clip, "SPOTLIGHT_PICKSCORE": clip}
    rewards = [load_judge(name, environment)(asked, SCENE) for name in ("clip-score", "pickscore")]
    assert all(isinstance(reward, Verdict) for reward in rewards)
    scale = float(model.logit_scale.detach().exp())
    expected = [100 * cosine / 35, scale * cosine / 26]
    assert [reward.reward for reward in rewards] == pytest.approx(expected, rel=1e-4)  # type: ignore[union-attr]
    assert [reward.correct for reward in rewards] == [value >= 1 for value in expected]  # type: ignore[union-attr]


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTLIGHT_DETECTOR", "/nowhere")
    with pytest.raises(InputError, match=r"SPOTLIGHT_DETECTOR = '/nowhere': must be a folder with config.json"):
        check_reward("geneval-coco")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="cannot load it"):
        load_judge("geneval-coco", {"SPOTLIGHT_DETECTOR": str(tmp_path), "SPOTLIGHT_CLIP": str(tmp_path)})
