"""Training images: scenes of true captions are judged right, loose ones wrong, and the renderer draws the detector's outlines."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from spot_runtime.models.evaluation import is_correct
from spot_runtime.models.flow import to_uint8
from spot_runtime.models.latents import endless_rows, training_rows
from spot_runtime.models.recipe import exam_rows
from spot_runtime.models.render import coverage, render
from spot_runtime.models.scenes import LOOSENESS, OPPOSITE, depict, kind_of, loosened, scene_of
from spot_runtime.rewards import shapes
from spot_runtime.rewards.prompts import GenevalRow, shapes_rows
from spot_runtime.rewards.world import SHAPES

CPU = torch.device("cpu")
ROWS = training_rows(seed=0, text_prompts=200)


def share_right(rows: list[GenevalRow], loose: bool) -> float:
    rng = random.Random(1)
    images = to_uint8(render([scene_of(row, rng, loose) for row in rows], 64, CPU)).numpy()
    return sum(is_correct(row, image) for row, image in zip(rows, images, strict=True)) / len(rows)


@pytest.mark.parametrize("kind", sorted(LOOSENESS))
def test_scenes_of_true_captions_are_all_judged_right(kind: str) -> None:
    assert share_right((ROWS[kind] * 10)[:24], loose=False) == 1.0


@pytest.mark.parametrize("kind", sorted(LOOSENESS))
def test_scenes_of_loose_captions_are_mostly_judged_wrong(kind: str) -> None:
    assert share_right((ROWS[kind] * 10)[:40], loose=True) <= 0.35


def test_a_loose_text_caption_has_one_wrong_or_missing_character() -> None:
    row = ROWS["text"][0]
    right = depict(row).text
    for seed in range(50):
        shown = loosened("text", depict(row), random.Random(seed)).text
        assert shown != right
        assert len(right) - 1 <= len(shown) <= len(right)
        assert shown


def test_two_relations_keep_every_object_apart_and_in_its_place() -> None:
    row = shapes_rows(3, 1, "train", {"two_relations": 1})[0]
    first, second, third = scene_of(row, random.Random(0)).objects
    for a, b, clause in ((first, second, row.include[1]), (second, third, row.include[2])):
        assert clause.position is not None
        relation = clause.position.relation
        along = b.x - a.x if relation in ("left of", "right of") else b.y - a.y
        assert (along < 0) == (relation in ("left of", "above"))
        assert abs(along) > a.radius + b.radius


def test_opposite_is_its_own_inverse() -> None:
    assert {OPPOSITE[OPPOSITE[relation]] for relation in OPPOSITE} == set(OPPOSITE)


@pytest.mark.parametrize("shape", SHAPES)
def test_batched_outline_equals_the_detectors(shape: str) -> None:
    geometry_N3 = torch.tensor([[20.3, 31.7, 9.4]])
    drawn = coverage(torch.tensor([SHAPES.index(shape)]), geometry_N3, 64)[0].numpy()
    pixel = np.arange(64) + 0.5
    ideal = shapes.coverage(shape, pixel[None, :] - 20.3, pixel[:, None] - 31.7, 9.4, 9.4, edge=1.0)
    np.testing.assert_allclose(drawn, ideal, atol=1e-4)


def test_training_rows_and_exam_rows_share_no_prompt() -> None:
    trained = {row.prompt for rows in ROWS.values() for row in rows}
    assert not trained & {row.prompt for rows in exam_rows() for row in rows}


def test_endless_rows_are_the_same_for_the_same_seed_and_hold_every_kind() -> None:
    draws = []
    for _ in range(2):
        source = endless_rows(ROWS, random.Random(4))
        draws.append([next(source) for _ in range(400)])
    assert draws[0] == draws[1]
    assert {kind_of(row) for row in draws[0]} == set(LOOSENESS)
