"""Prompts over photographs: GenEval's words, never one of its evaluation prompts, and two splits that never meet."""

from __future__ import annotations

from collections import Counter

import pytest

from spot_runtime.errors import InputError
from spot_runtime.rewards.coco import CLASSES, COLORS, MIX, check_coco, coco_rows, is_evaluation_prompt
from spot_runtime.rewards.geneval import score
from spot_runtime.rewards.prompts import GenevalObject, GenevalRow, Position

EVALUATION = [
    "a photo of a bench",
    "a photo of an elephant",
    "a photo of a toaster and an oven",
    "a photo of two backpacks",
    "a photo of three wine glasses",
    "a photo of four handbags",
    "a photo of a blue fire hydrant",
    "a photo of an orange cow",
    "a photo of a dog right of a teddy bear",
    "a photo of a couch below a cup",
    "a photo of a purple wine glass and a black apple",
    "a photo of three persons",
]


def test_evaluation_prompts_are_known_and_others_are_not() -> None:
    assert [prompt for prompt in EVALUATION if not is_evaluation_prompt(prompt)] == []
    assert not is_evaluation_prompt("a photo of a bench and a bench")
    assert sum(is_evaluation_prompt(f"a photo of {index}") for index in range(20_000)) == 0


def test_all_single_objects_are_evaluation_prompts_so_none_is_trained_on() -> None:
    singles = [f"a photo of {'an' if name[0] in 'aeiou' else 'a'} {name}" for name in CLASSES]
    assert len(set(singles)) == 80
    assert all(map(is_evaluation_prompt, singles))
    assert "single_object" not in MIX


def test_rows_are_reproducible_new_and_on_one_side_of_the_split() -> None:
    train, validation = coco_rows(0, 600, "train"), coco_rows(0, 256, "validation")
    assert train == coco_rows(0, 600, "train")
    assert train[:50] == coco_rows(0, 50, "train")
    assert train != coco_rows(1, 600, "train")
    prompts = [row.prompt for row in (*train, *validation)]
    assert len(set(prompts)) == 856
    assert not any(map(is_evaluation_prompt, prompts))


def test_tags_come_in_proportion() -> None:
    tags = Counter(row.tag for row in coco_rows(0, 340, "train"))
    assert set(tags) == set(MIX)
    for tag, weight in MIX.items():
        assert tags[tag] == pytest.approx(340 * weight / sum(MIX.values()), abs=25)


def test_a_tag_that_has_run_out_leaves_the_mix() -> None:
    rows = coco_rows(0, 3000, "validation")
    assert len({row.prompt for row in rows}) == 3000
    assert 20 < Counter(row.tag for row in rows)["counting"] < 100


def test_rows_say_what_their_prompts_say() -> None:
    by_prompt = {row.prompt: row for row in coco_rows(0, 2000, "train")}
    for row in by_prompt.values():
        check_coco(row)
        assert not score(row, []).correct
        for clause in row.include:
            assert clause.class_name in row.prompt
            assert clause.color is None or f"{clause.color} {clause.class_name}" in row.prompt
        if row.tag == "position":
            first, second = row.include
            assert second.position == Position(second.position.relation, 0) if second.position else False
            assert row.prompt.index(second.class_name) <= row.prompt.rindex(first.class_name)
        if row.tag == "counting":
            assert row.exclude[0].count == row.include[0].count + 1
    assert not any(" a apple" in prompt or " an dog" in prompt for prompt in by_prompt)


@pytest.mark.parametrize(
    ("clause", "fault"),
    [
        (GenevalObject(class_name="square", count=1), "class = 'square': must be one of the 80 COCO classes"),
        (GenevalObject(class_name="dog", count=1, color="mauve"), "color = 'mauve': must be one of red, orange"),
    ],
)
def test_a_class_or_colour_that_geneval_does_not_have_is_refused(clause: GenevalObject, fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        check_coco(GenevalRow(tag="colors", include=(clause,), prompt="p"))
    assert len(COLORS) == 10


@pytest.mark.parametrize(("n", "split"), [(0, "train"), (10_001, "train"), (1, "test")])
def test_a_draw_out_of_bounds_is_refused(n: int, split: str) -> None:
    with pytest.raises(InputError, match="must be"):
        coco_rows(0, n, split)  # type: ignore[arg-type]
