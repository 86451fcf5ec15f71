"""GenEval's rules over detections (arXiv 2310.11513): the official yes or no, and three rewards by name.

Owns what is right and how far off the rest is. Never sees a pixel: detectors hand in detections.

Quirks of the official rule that are kept, because figures must compare:
- an object that a detector reports twice counts twice;
- more objects than asked are right, unless an exclude clause (counting rows) forbids them; exclude looks at the class only, not the colour;
- colour and position are judged on the `count` most confident objects of the class, so a confident wrong object hides a right one;
- a clause whose target failed in any respect fails too; every object must stand in the relation to every target object;
- two relations can hold at once, near a diagonal; and none at all, where the offset lies within the margin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Final, Literal, get_args

from spot_runtime.rewards.detection import Box, Detection
from spot_runtime.rewards.prompts import OBJECTS_MAX, GenevalObject, GenevalRow, Relation

Rule = Literal["official", "soft", "clamped"]
RULES: Final[tuple[Rule, ...]] = get_args(Rule)

POSITION_MARGIN: Final = 0.1
"""Share of the two objects' summed width (height) by which centres must differ before left, right (above, below) counts."""
OFFSET_PX_MIN: Final = 1e-3
DIRECTION_MIN: Final = 0.5
"""A relation holds where the offset, margin taken off, has more than this share of the distance along its axis: within 60 degrees."""
STAND_IN: Final = 0.5
"""clamped: credit for an object of the asked colour, but of a class that nobody asked for."""
CORRECT_SHARE: Final = 0.5
"""clamped: share of the reward that only a wholly right image gets, so that almost right is worth leaving behind."""

AXIS: Final[Mapping[Relation, tuple[int, int]]] = MappingProxyType(
    {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
)


@dataclass(frozen=True)
class Thresholds:
    """Detections count above these confidences; counting rows have their own."""

    found: float
    counting: float


OFFICIAL_THRESHOLDS: Final = Thresholds(found=0.3, counting=0.9)
"""GenEval's, for Mask2Former."""
SHAPES_THRESHOLDS: Final = Thresholds(found=0.3, counting=0.3)
"""The shapes detector never reports an object twice, which is what the stricter counting threshold guards against."""


@dataclass(frozen=True)
class GenevalScore:
    """`correct` is the official rule whatever rule made `reward`; `reason` lists what is wrong, "" if nothing is."""

    correct: bool
    reward: float
    reason: str


Found = Mapping[str, Sequence[Detection]]
"""Kept detections by class, most confident first."""


def score(
    row: GenevalRow,
    detections: Sequence[Detection],
    rule: Rule = "clamped",
    thresholds: Thresholds = OFFICIAL_THRESHOLDS,
) -> GenevalScore:
    """Judges one image. Asserts that the row has clauses: a text row is no GenEval row."""
    assert row.include, row.tag
    found = keep(detections, thresholds.counting if row.tag == "counting" else thresholds.found)
    faults = official_faults(row, found)
    return GenevalScore(correct=not faults, reward=_REWARDS[rule](row, found), reason="; ".join(faults))


def keep(detections: Sequence[Detection], threshold: float) -> Found:
    """By class: confidence above the threshold, best first, at most OBJECTS_MAX."""
    found: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda detection: -detection.score):
        if detection.score > threshold:
            found.setdefault(detection.class_name, []).append(detection)
    return {name: objects[:OBJECTS_MAX] for name, objects in found.items()}


# ---- official: right or wrong -----------------------------------------------------------------------------------------------------


def official_faults(row: GenevalRow, found: Found) -> list[str]:
    """What is wrong by the official rule, at most one fault a clause; empty: the image is correct."""
    faults: list[str] = []
    matched: list[Sequence[Detection] | None] = []
    for clause in row.include:
        chosen = _chosen(clause, found)
        fault = _fault(clause, chosen, matched)
        matched.append(None if fault else chosen)
        if fault:
            faults.append(fault)
    for clause in row.exclude:
        number = len(found.get(clause.class_name, ()))
        if number >= clause.count:
            faults.append(f"expected {clause.class_name} < {clause.count}, found {number}")
    return faults


def _chosen(clause: GenevalObject, found: Found) -> Sequence[Detection]:
    return found.get(clause.class_name, ())[: clause.count]


def _fault(clause: GenevalObject, chosen: Sequence[Detection], matched: Sequence[Sequence[Detection] | None]) -> str:
    if len(chosen) < clause.count:
        return f"expected {clause.class_name} >= {clause.count}, found {len(chosen)}"
    if _right_colors(clause, chosen) < clause.count:
        colors = ", ".join(detection.color for detection in chosen)
        return f"expected {clause.count} {clause.color} {clause.class_name}, found {colors}"
    if clause.position is None:
        return ""
    targets = matched[clause.position.index]
    if targets is None:
        return f"no target for {clause.class_name} to be {clause.position.relation}"
    for thing, target in product(chosen, targets):
        relations = relations_of(thing.box, target.box)
        if clause.position.relation not in relations:
            return f"expected {clause.class_name} {clause.position.relation} target, found {_named(relations)}"
    return ""


def _right_colors(clause: GenevalObject, chosen: Sequence[Detection]) -> int:
    return sum(clause.color in (None, detection.color) for detection in chosen)


def _named(relations: Sequence[str]) -> str:
    return " and ".join(relations) or "no relation"


def direction(box: Box, target: Box) -> tuple[float, float]:
    """Where `box` is from `target`, as a vector of at most unit length; (0, 0) within the margin.

    With offset o = centre(box) - centre(target) and sizes s, s': (sign(o) max(|o| - POSITION_MARGIN (s + s'), 0)) / |o|, each axis its own
    o and s above the bar.
    """
    offset = [(box[axis] + box[axis + 2] - target[axis] - target[axis + 2]) / 2 for axis in (0, 1)]
    size = [abs(box[axis + 2] - box[axis]) + abs(target[axis + 2] - target[axis]) for axis in (0, 1)]
    beyond = [math.copysign(max(abs(o) - POSITION_MARGIN * s, 0.0), o) for o, s in zip(offset, size, strict=True)]
    if max(map(abs, beyond)) < OFFSET_PX_MIN:
        return 0.0, 0.0
    distance = math.hypot(*offset)
    return beyond[0] / distance, beyond[1] / distance


def relations_of(box: Box, target: Box) -> tuple[Relation, ...]:
    """All relations in which `box` stands to `target`: none, one, or two near a diagonal."""
    return tuple(relation for relation in AXIS if _along(relation, box, target) > DIRECTION_MIN)


def _along(relation: Relation, box: Box, target: Box) -> float:
    """Component of `direction` towards where the relation asks the box to be: -1..1."""
    dx, dy = direction(box, target)
    axis_x, axis_y = AXIS[relation]
    return dx * axis_x + dy * axis_y


# ---- rewards ----------------------------------------------------------------------------------------------------------------------


def _official(row: GenevalRow, found: Found) -> float:
    """1 if correct, else 0."""
    return 0.0 if official_faults(row, found) else 1.0


def _soft(row: GenevalRow, found: Found) -> float:
    """Mean of terms as Flow-GRPO's GenEval reward has them (arXiv 2505.05470).

    Unbounded below: one asked and sixteen found is -14. It asks for exact counts, ignores exclude clauses, and a wrong position
    adds a 0 and a 1, so that two right objects in the wrong relation still make .75.
    """
    terms: list[float] = []
    matched: list[Sequence[Detection] | None] = []
    for clause in row.include:
        objects = found.get(clause.class_name, ())
        clause_terms, is_matched = _soft_terms(clause, objects, matched)
        terms.extend(clause_terms)
        matched.append(objects if is_matched else None)
    return sum(terms) / len(terms)


def _soft_terms(
    clause: GenevalObject, objects: Sequence[Detection], matched: Sequence[Sequence[Detection] | None]
) -> tuple[list[float], bool]:
    terms = [1 - abs(clause.count - len(objects)) / clause.count]
    if len(objects) != clause.count:
        has_more = clause.color is not None or clause.position is not None
        return terms + [0.0] * has_more, False
    right = _right_colors(clause, objects)
    if clause.color is not None:
        terms.append(1 - abs(clause.count - right) / clause.count)
    if right != clause.count or clause.position is None:
        return terms, right == clause.count
    targets = matched[clause.position.index]
    if targets is None:
        return [*terms, 0.0], False
    relation = clause.position.relation
    holds = all(relation in relations_of(thing.box, target.box) for thing, target in product(objects, targets))
    return terms + ([1.0] if holds else [0.0, 1.0]), holds


def _clamped(row: GenevalRow, found: Found) -> float:
    """(1 - CORRECT_SHARE) * mean(credits) + CORRECT_SHARE * correct: within [0, 1], and 1 if and only if correct.

    Credits are count, colour and relation of each include clause and every exclude clause of a class that is not asked for; each is 1 where
    its part of the official rule holds and grows as the image comes nearer to that.
    """
    asked = {clause.class_name for clause in row.include}
    credits = [credit for clause in row.include for credit in _credits(clause, row, found, asked)]
    credits += [_exclude_credit(clause, found) for clause in row.exclude if clause.class_name not in asked]
    return (1 - CORRECT_SHARE) * sum(credits) / len(credits) + CORRECT_SHARE * _official(row, found)


def _credits(clause: GenevalObject, row: GenevalRow, found: Found, asked: set[str]) -> list[float]:
    credits = [_count_credit(clause, row, found)]
    if clause.color is not None:
        credits.append(_color_credit(clause, found, asked))
    if clause.position is not None:
        target = row.include[clause.position.index]
        credits.append(_position_credit(clause.position.relation, clause, target, found))
    return credits


def _count_credit(clause: GenevalObject, row: GenevalRow, found: Found) -> float:
    """Share of the asked number that is there, less where an exclude clause says that it is too many."""
    credit = len(_chosen(clause, found)) / clause.count
    for exclude in row.exclude:
        if exclude.class_name == clause.class_name:
            credit *= _exclude_credit(exclude, found)
    return credit


def _exclude_credit(clause: GenevalObject, found: Found) -> float:
    """1 below the forbidden number n, then 1 - 1/n, 1 - 2/n, ... down to 0."""
    excess = len(found.get(clause.class_name, ())) - clause.count + 1
    return min(max(1 - excess / clause.count, 0.0), 1.0)


def _color_credit(clause: GenevalObject, found: Found, asked: set[str]) -> float:
    """Share of the asked number with the right colour; STAND_IN for each missing one whose colour is on something not asked for."""
    right = sum(detection.color == clause.color for detection in _chosen(clause, found))
    stand_ins = sum(
        detection.color == clause.color
        for class_name, objects in found.items()
        if class_name not in asked
        for detection in objects
    )
    return (right + STAND_IN * min(stand_ins, clause.count - right)) / clause.count


def _position_credit(relation: Relation, clause: GenevalObject, target: GenevalObject, found: Found) -> float:
    """Mean over asked pairs: 1 where the relation holds, else from 0 (opposite side) up to 1/2; 0 for a pair that is not there."""
    pairs = product(_chosen(clause, found), _chosen(target, found))
    total = sum(_pair_credit(_along(relation, thing.box, other.box)) for thing, other in pairs)
    return total / (clause.count * target.count)


def _pair_credit(along: float) -> float:
    return 1.0 if along > DIRECTION_MIN else (along + 1) / 3


_REWARDS: Final[Mapping[Rule, Callable[[GenevalRow, Found], float]]] = MappingProxyType(
    {"official": _official, "soft": _soft, "clamped": _clamped}
)
