"""What a training image shows for a prompt row. Owns the placement of objects and how loose captions are; never draws a pixel.

Captions of the web are loose: they miscount, mix up sides and colours. The base first learns from true captions, then from captions
that are loose in the same way, at the rates of `LOOSENESS`. So it is able to draw whatever a prompt asks for, but does it only some
of the time: right answers are among a prompt's samples (pass@8 far above pass@1), and post-training has something to select.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from spot_runtime.rewards.prompts import RELATIONS, TEXT_CHARACTERS, GenevalRow, quoted_text
from spot_runtime.rewards.world import PALETTE, SHAPES

OBJECTS_MAX: Final = 6
"""Objects that one scene can hold without overlap."""

LOOSENESS: Final[Mapping[str, float]] = MappingProxyType(
    {
        "single_object": 0.05,
        "colors": 0.18,
        "counting": 0.50,
        "counting_many": 0.60,
        "two_object": 0.55,
        "color_attr": 0.58,
        "position": 0.66,
        "two_relations": 0.68,
        "text": 0.55,
    }
)
"""Share of captions of each kind that are loosened; some of those still come out true by chance."""

OPPOSITE: Final = MappingProxyType({"left of": "right of", "right of": "left of", "above": "below", "below": "above"})
DIRECTION: Final = MappingProxyType({"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)})
"""Where "b RELATION a" puts b as seen from a: steps in x and y, y downwards."""

Thing = tuple[str, str]
"""(shape, colour)."""


@dataclass(frozen=True)
class Depiction:
    """What an image shows, before places are drawn. `relations[i]` places things[i + 1] relative to things[i]; `text` excludes things."""

    things: tuple[Thing, ...] = ()
    relations: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class PlacedObject:
    """One object; centre and radius (half its box) are shares of the image's side, y grows downwards."""

    shape: str
    color: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Scene:
    """All that a renderer needs. `text` is drawn in the reader's font and layout, moved by `shift` (x, y) pixels of a 64 px image."""

    objects: tuple[PlacedObject, ...] = ()
    text: str = ""
    shift: tuple[int, int] = (0, 0)


def kind_of(row: GenevalRow) -> str:
    """The row's kind as the prompt generator and LOOSENESS name it: its tag, but counts above 3 are `counting_many`."""
    return "counting_many" if row.tag == "counting" and row.include[0].count > 3 else row.tag


def scene_of(row: GenevalRow, rng: random.Random, loose: bool = False) -> Scene:
    """A random scene for which the row's prompt is a true caption, or a loose one."""
    depiction = depict(row)
    return place(loosened(kind_of(row), depiction, rng) if loose else depiction, rng)


def depict(row: GenevalRow) -> Depiction:
    """Exactly what the row asks for; a class without a colour is black."""
    if row.tag == "text":
        return Depiction(text=quoted_text(row.prompt))
    things = tuple((item.class_name, item.color or "black") for item in row.include for _ in range(item.count))
    relations = tuple(item.position.relation for item in row.include if item.position is not None)
    return Depiction(things=things, relations=relations)


def loosened(kind: str, depiction: Depiction, rng: random.Random) -> Depiction:
    """What an image may show whose caption says `depiction` but has one thing wrong, in the way of its kind.

    One thing, because errors that move several objects at once leave the model undecided among layouts, and it then draws none of them.
    """
    match kind:
        case "text":
            return replace(depiction, text=_misspelt(depiction.text, rng))
        case "counting" | "counting_many":
            return replace(depiction, things=depiction.things[:1] * _miscounted(len(depiction.things), rng))
        case "two_object" if rng.random() < 0.3:
            return replace(depiction, things=depiction.things[:1])
        case "position" if rng.random() < 0.5:
            return replace(depiction, relations=(rng.choice(RELATIONS),))
        case "two_relations" if rng.random() < 0.25:
            first, second, third = depiction.things
            return replace(depiction, things=(first, third, second))
        case _:
            return replace(depiction, things=_one_relabelled(depiction.things, rng))


def _misspelt(text: str, rng: random.Random) -> str:
    """One character replaced, or one dropped where that leaves any."""
    spot = rng.randrange(len(text))
    other = rng.choice([c for c in TEXT_CHARACTERS if c != text[spot]])
    edits = [text[:spot] + other + text[spot + 1 :]]
    if len(text) > 1:
        edits.append(text[:spot] + text[spot + 1 :])
    return rng.choice(edits)


def _miscounted(count: int, rng: random.Random) -> int:
    return rng.choice([n for n in range(count - 2, count + 3) if 1 <= n <= OBJECTS_MAX and n != count])


def _one_relabelled(things: tuple[Thing, ...], rng: random.Random) -> tuple[Thing, ...]:
    """One of the things gets another shape or another colour."""
    spot = rng.randrange(len(things))
    shape, color = things[spot]
    if rng.random() < 0.5:
        shape = rng.choice([s for s in SHAPES if s != shape])
    else:
        color = rng.choice([c for c in PALETTE if c != color])
    return (*things[:spot], (shape, color), *things[spot + 1 :])


# ---- places -------------------------------------------------------------------------------------------------------------------------

Cell = tuple[float, float]
TEXT_SHIFTS_PX: Final = (-1, 0, 1)
QUARTERS: Final[tuple[Cell, ...]] = ((0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75))
SIXTHS: Final[tuple[Cell, ...]] = tuple((x, y) for x in (1 / 6, 3 / 6, 5 / 6) for y in (0.27, 0.73))


def place(depiction: Depiction, rng: random.Random) -> Scene:
    """Draws free places: no two objects touch, and every relation holds with a margin that GenEval's rule accepts.

    Two different things without a relation stand side by side in the order of the caption.
    """
    if depiction.text:
        return Scene(text=depiction.text, shift=(rng.choice(TEXT_SHIFTS_PX), rng.choice(TEXT_SHIFTS_PX)))
    things = depiction.things
    if len(things) == 1:
        return Scene(objects=(_alone(things[0], rng),))
    if depiction.relations:
        return Scene(objects=_jittered(things, _chain(depiction.relations, rng), (0.12, 0.17), 0.06, rng))
    if len(set(things)) == 2:
        pair = ((0.25, rng.uniform(0.3, 0.7)), (0.75, rng.uniform(0.3, 0.7)))
        return Scene(objects=_jittered(things, pair, (0.12, 0.17), 0.06, rng))
    if len(things) <= len(QUARTERS):
        return Scene(objects=_jittered(things, rng.sample(QUARTERS, len(things)), (0.12, 0.17), 0.06, rng))
    cells = SIXTHS if rng.random() < 0.5 else [(y, x) for x, y in SIXTHS]
    return Scene(objects=_jittered(things, rng.sample(cells, len(things)), (0.105, 0.13), 0.02, rng))


def _alone(thing: Thing, rng: random.Random) -> PlacedObject:
    radius = rng.uniform(0.15, 0.25)
    low, high = radius + 0.04, 0.96 - radius
    return PlacedObject(*thing, rng.uniform(low, high), rng.uniform(low, high), radius)


def _chain(relations: Sequence[str], rng: random.Random) -> list[Cell]:
    """Cells of a chain on the quarters: steps along different axes always fit, and a step of a single relation too."""
    steps = [DIRECTION[r] for r in relations]
    dx, dy = sum(x for x, _ in steps), sum(y for _, y in steps)
    x = 0.5 - dx / 4 if dx else rng.choice([0.25, 0.75])
    y = 0.5 - dy / 4 if dy else rng.choice([0.25, 0.75])
    cells = [(x, y)]
    for step_x, step_y in steps:
        x, y = x + step_x / 2, y + step_y / 2
        cells.append((x, y))
    return cells


def _jittered(
    things: Sequence[Thing], cells: Sequence[Cell], radii: tuple[float, float], jitter: float, rng: random.Random
) -> tuple[PlacedObject, ...]:
    return tuple(
        PlacedObject(*thing, x + rng.uniform(-jitter, jitter), y + rng.uniform(-jitter, jitter), rng.uniform(*radii))
        for thing, (x, y) in zip(things, cells, strict=True)
    )
