"""GenEval's rules: golden cases for every tag and quirk, and what the three rewards promise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spot_runtime.rewards.detection import Box, Detection
from spot_runtime.rewards.geneval import (
    OFFICIAL_THRESHOLDS,
    SHAPES_THRESHOLDS,
    GenevalScore,
    Rule,
    direction,
    keep,
    relations_of,
    score,
)
from spot_runtime.rewards.prompts import MIX, RELATIONS, GenevalObject, GenevalRow, Position, shapes_rows
from spot_runtime.rewards.world import OTHER, PALETTE, SHAPES


def thing(
    class_name: str, color: str = "red", x: float = 0, y: float = 0, size: float = 10, conf: float = 1
) -> Detection:
    """An object centred at (x, y)."""
    return Detection(class_name, color, (x - size / 2, y - size / 2, x + size / 2, y + size / 2), conf, size * size)


def things(class_name: str, number: int, color: str = "red") -> list[Detection]:
    return [thing(class_name, color, x=20 * index) for index in range(number)]


def row(tag: str, *include: GenevalObject, exclude: tuple[GenevalObject, ...] = ()) -> GenevalRow:
    return GenevalRow(tag=tag, include=include, exclude=exclude, prompt="p")


def obj(class_name: str, count: int = 1, color: str | None = None, position: Position | None = None) -> GenevalObject:
    return GenevalObject(class_name=class_name, count=count, color=color, position=position)


SINGLE = row("single_object", obj("bench"))
COUNTING = row("counting", obj("clock", 3), exclude=(obj("clock", 4),))
COLORS = row("colors", obj("carrot", color="purple"))
TWO = row("two_object", obj("bench"), obj("ball"))
COLOR_ATTR = row("color_attr", obj("vase", color="red"), obj("apple", color="black"))
POSITION = row("position", obj("bear"), obj("dog", position=Position("right of", 0)))
CHAIN = row(
    "two_relations",
    obj("square", color="red"),
    obj("circle", color="blue", position=Position("left of", 0)),
    obj("cross", color="green", position=Position("above", 1)),
)


def rewards(prompt: GenevalRow, *detections: Detection) -> tuple[bool, float, float, float]:
    """correct, official, soft, clamped; all three agree on correct."""
    rules: tuple[Rule, ...] = ("official", "soft", "clamped")
    scores = [score(prompt, detections, rule) for rule in rules]
    assert len({judged.correct for judged in scores}) == 1
    return scores[0].correct, *(round(judged.reward, 4) for judged in scores)  # type: ignore[return-value]


# ---- golden cases: (correct, official, soft, clamped) -----------------------------------------------------------------------------


def test_single_object() -> None:
    assert rewards(SINGLE, thing("bench")) == (True, 1, 1, 1)
    assert rewards(SINGLE) == (False, 0, 0, 0)
    assert rewards(SINGLE, thing("cow")) == (False, 0, 0, 0)
    assert rewards(SINGLE, *things("bench", 3)) == (True, 1, -1, 1)


def test_two_object() -> None:
    assert rewards(TWO, thing("bench"), thing("ball", x=20)) == (True, 1, 1, 1)
    assert rewards(TWO, thing("bench")) == (False, 0, 0.5, 0.25)
    assert rewards(TWO, thing("bench"), *things("ball", 2)) == (True, 1, 0.5, 1)


def test_counting() -> None:
    assert rewards(COUNTING, *things("clock", 3)) == (True, 1, 1, 1)
    assert rewards(COUNTING, *things("clock", 2)) == (False, 0, 0.6667, 0.3333)
    assert rewards(COUNTING, *things("clock", 4)) == (False, 0, 0.6667, 0.375)
    assert rewards(COUNTING, *things("clock", 5)) == (False, 0, 0.3333, 0.25)
    assert rewards(COUNTING) == (False, 0, 0, 0)


def test_counting_with_a_colour() -> None:
    prompt = row("counting", obj("cross", 2, "red"), exclude=(obj("cross", 3),))
    assert rewards(prompt, *things("cross", 2)) == (True, 1, 1, 1)
    assert rewards(prompt, *things("cross", 1), thing("cross", "blue", x=40)) == (False, 0, 0.75, 0.375)
    assert rewards(prompt, *things("cross", 3)) == (False, 0, 0.25, 0.4167)


def test_the_forbidden_number_counts_objects_of_any_colour() -> None:
    prompt = row("counting", obj("cross", 2, "red"), exclude=(obj("cross", 3),))
    judged = score(prompt, [*things("cross", 2), thing("cross", "blue", x=60)])
    assert judged == GenevalScore(
        correct=False, reward=pytest.approx(0.4167, abs=1e-4), reason="expected cross < 3, found 3"
    )


def test_colors() -> None:
    assert rewards(COLORS, thing("carrot", "purple")) == (True, 1, 1, 1)
    assert rewards(COLORS, thing("carrot", "red")) == (False, 0, 0.5, 0.25)
    assert rewards(COLORS, thing("apple", "purple")) == (False, 0, 0, 0.125)
    assert rewards(COLORS) == (False, 0, 0, 0)


def test_color_attr() -> None:
    assert rewards(COLOR_ATTR, thing("vase", "red"), thing("apple", "black")) == (True, 1, 1, 1)
    assert rewards(COLOR_ATTR, thing("vase", "black"), thing("apple", "red")) == (False, 0, 0.5, 0.25)
    assert rewards(COLOR_ATTR, thing("vase", "red")) == (False, 0, 0.5, 0.25)


def test_position() -> None:
    bear = thing("bear")
    assert rewards(POSITION, bear, thing("dog", x=30)) == (True, 1, 1, 1)
    assert rewards(POSITION, bear, thing("dog", x=-30)) == (False, 0, 0.75, 0.337)
    assert rewards(POSITION, bear, thing("dog", y=30)) == (False, 0, 0.75, 0.3889)
    assert rewards(POSITION, bear) == (False, 0, 0.3333, 0.1667)
    assert rewards(POSITION, thing("dog", x=30)) == (False, 0, 0.3333, 0.1667)


def test_two_relations() -> None:
    square, circle, cross = thing("square", x=40, y=40), thing("circle", "blue", 0, 40), thing("cross", "green", 0, 0)
    assert rewards(CHAIN, square, circle, cross) == (True, 1, 1, 1)
    low = thing("cross", "green", 0, 80)
    correct, official, soft, clamped = rewards(CHAIN, square, circle, low)
    assert (correct, official, soft) == (False, 0, 0.8889)
    assert 0.4 < clamped < 0.5
    assert score(CHAIN, [square, circle, low]).reason == "expected cross above target, found below"


# ---- quirks of the official rule --------------------------------------------------------------------------------------------------


def test_colour_is_judged_on_the_most_confident_objects_only() -> None:
    right, wrong = thing("carrot", "purple", conf=0.8), thing("carrot", "red", x=30, conf=0.9)
    assert not score(COLORS, [right, wrong]).correct
    assert score(COLORS, [replace(right, score=0.95), wrong]).correct


def test_position_is_judged_on_the_most_confident_objects_only() -> None:
    bear, right, wrong = thing("bear"), thing("dog", x=30, conf=0.8), thing("dog", x=-30, conf=0.9)
    assert not score(POSITION, [bear, right, wrong]).correct
    assert score(POSITION, [bear, right, replace(wrong, score=0.7)]).correct


def test_a_clause_whose_target_failed_fails_too() -> None:
    prompt = row("position", obj("bear", color="red"), obj("dog", position=Position("right of", 0)))
    judged = score(prompt, [thing("bear", "blue"), thing("dog", x=30)])
    assert judged.reason == "expected 1 red bear, found blue; no target for dog to be right of"
    assert score(prompt, [thing("bear", "blue"), thing("dog", x=30)], "soft").reward == pytest.approx(
        (1 + 0 + 1 + 0) / 4
    )


def test_every_object_must_stand_in_the_relation_to_every_target() -> None:
    prompt = row("position", obj("bear", 2), obj("dog", 2, position=Position("right of", 0)))
    bears, dogs = [thing("bear"), thing("bear", y=5)], [thing("dog", x=40), thing("dog", x=60)]
    assert score(prompt, bears + dogs).correct
    assert not score(prompt, [*bears, dogs[0], thing("dog", x=-40)]).correct


def test_counting_rows_have_a_stricter_threshold() -> None:
    unsure = [replace(detection, score=0.6) for detection in things("clock", 3)]
    assert score(COUNTING, unsure, thresholds=OFFICIAL_THRESHOLDS).reason == "expected clock >= 3, found 0"
    assert score(COUNTING, unsure, thresholds=SHAPES_THRESHOLDS).correct
    assert score(SINGLE, [thing("bench", conf=0.31)]).correct
    assert not score(SINGLE, [thing("bench", conf=0.3)]).correct


def test_at_most_sixteen_objects_a_class_are_kept() -> None:
    found = keep(things("clock", 20), 0.3)
    assert len(found["clock"]) == 16
    assert score(SINGLE, things("bench", 40), "soft").reward == -14


def test_an_object_that_is_reported_twice_counts_twice() -> None:
    first, twin, other = thing("bench", conf=0.9), thing("bench", "blue", conf=0.5), thing("bench", x=30, conf=0.7)
    assert keep([twin, first, other], 0.3) == {"bench": [first, other, twin]}


def test_soft_ignores_what_is_excluded_and_forgives_nothing_in_count() -> None:
    prompt = row("counting", obj("clock"), exclude=(obj("dog", 1),))
    assert score(prompt, [thing("clock"), thing("dog", x=30)], "soft") == GenevalScore(
        correct=False, reward=1.0, reason="expected dog < 1, found 1"
    )
    assert score(prompt, [thing("clock"), thing("dog", x=30)], "clamped").reward == pytest.approx(0.25)


def test_a_text_row_is_no_geneval_row() -> None:
    with pytest.raises(AssertionError, match="text"):
        score(GenevalRow(tag="text", include=(), prompt='"A"'), [])


# ---- position, from box centres with a margin relative to sizes -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "y", "relations"),
    [
        (30, 0, ("right of",)),
        (-30, 0, ("left of",)),
        (0, -30, ("above",)),
        (0, 30, ("below",)),
        (30, 30, ("right of", "below")),
        (-40, -30, ("left of", "above")),
        (2, 0, ()),  # exactly the margin: .1 x (10 + 10)
        (3, 0, ()),  # (3 - 2) / 3 = 1/3 of the distance
        (4, 0, ()),  # exactly one half is not more than one half
        (4.1, 0, ("right of",)),
        (0, 0, ()),
        (30, 1.9, ("right of",)),
        (4.0, 4.0, ()),  # a diagonal inside the margin of both axes
    ],
)
def test_relations_of_two_boxes(x: float, y: float, relations: tuple[str, ...]) -> None:
    assert relations_of(thing("a", x=x, y=y).box, thing("b").box) == relations


def test_larger_objects_have_a_larger_margin() -> None:
    assert relations_of(thing("a", x=12, size=20).box, thing("b", size=20).box) == ("right of",)
    assert relations_of(thing("a", x=12, size=40).box, thing("b", size=40).box) == ()


coordinate = st.floats(-100, 100, allow_nan=False, width=32)
size = st.floats(0, 50, width=32)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    x, y = draw(coordinate), draw(coordinate)
    return (x, y, x + draw(size), y + draw(size))


@given(a=boxes(), b=boxes())
def test_relations_mirror_when_the_objects_are_swapped(a: Box, b: Box) -> None:
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    assert {opposite[relation] for relation in relations_of(a, b)} == set(relations_of(b, a))
    assert math.hypot(*direction(a, b)) <= 1 + 1e-9


# ---- promises of the rewards ------------------------------------------------------------------------------------------------------

scene_things = st.lists(
    st.builds(
        thing,
        st.sampled_from((*SHAPES, OTHER)),
        st.sampled_from(tuple(PALETTE)),
        x=st.integers(0, 64),
        y=st.integers(0, 64),
        size=st.integers(6, 20),
        conf=st.floats(0.31, 1),
    ),
    max_size=9,
)
prompts = st.sampled_from([prompt for kind in MIX for prompt in shapes_rows(0, 3, "train", {kind: 1.0})])


@settings(max_examples=300)
@given(prompt=prompts, detections=scene_things)
def test_clamped_is_within_bounds_and_one_exactly_when_correct(prompt: GenevalRow, detections: list[Detection]) -> None:
    judged = score(prompt, detections, "clamped", SHAPES_THRESHOLDS)
    assert 0 <= judged.reward <= 1
    assert (judged.reward == 1) == judged.correct == (not judged.reason)
    assert judged.correct or judged.reward < 0.5
    assert score(prompt, detections, "official", SHAPES_THRESHOLDS).reward == judged.correct


@given(number=st.integers(1, 6), found=st.integers(0, 12))
def test_clamped_falls_as_the_count_moves_away(number: int, found: int) -> None:
    prompt = row("counting", obj("clock", number), exclude=(obj("clock", number + 1),))
    here = score(prompt, things("clock", found)).reward
    nearer = score(prompt, things("clock", found + (found < number) - (found > number))).reward
    assert nearer > here or nearer == here in (0, 1)


@settings(max_examples=200)
@given(prompt=prompts, detections=scene_things, index=st.integers(0, 8), x=st.integers(0, 64), y=st.integers(0, 64))
def test_clamped_never_falls_when_an_object_takes_on_the_asked_colour(
    prompt: GenevalRow, detections: list[Detection], index: int, x: int, y: int
) -> None:
    if index >= len(detections):
        return
    wanted = {clause.class_name: clause.color for clause in prompt.include}
    old = detections[index]
    color = wanted.get(old.class_name) or old.color
    better = [*detections[:index], replace(old, color=color), *detections[index + 1 :]]
    thresholds = SHAPES_THRESHOLDS
    assert (
        score(prompt, better, "clamped", thresholds).reward >= score(prompt, detections, "clamped", thresholds).reward
    )


def test_clamped_rises_as_an_object_moves_towards_its_place() -> None:
    circle = [(30 * math.cos(angle), 30 * math.sin(angle)) for angle in (math.pi, 2.4, 1.8, 1.4, 0.5, 0.0)]
    values = [score(POSITION, [thing("bear"), thing("dog", x=x, y=y)]).reward for x, y in circle]
    assert values == sorted(values)
    assert values[-1] == 1
    assert len(set(values)) >= 5


@pytest.mark.parametrize("relation", RELATIONS)
def test_each_relation_is_credited_in_its_own_direction(relation: str) -> None:
    prompt = row("position", obj("bear"), obj("dog", position=Position(relation, 0)))  # type: ignore[arg-type]
    places = {"left of": (-30, 0), "right of": (30, 0), "above": (0, -30), "below": (0, 30)}
    correct = {
        name for name, (x, y) in places.items() if score(prompt, [thing("bear"), thing("dog", x=x, y=y)]).correct
    }
    assert correct == {relation}
