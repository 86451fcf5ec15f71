"""What the service asks of a scorer, and the scorer that routes by name. Owns verdicts and routing; never speaks HTTP.

A judge is a function of a prompt row and an image. `catalog` has ours by name and finds others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from spot_runtime.errors import InputError
from spot_runtime.rewards.detection import Image
from spot_runtime.rewards.geneval import RULES, SHAPES_THRESHOLDS, Rule, score
from spot_runtime.rewards.prompts import GenevalRow, parse_row
from spot_runtime.rewards.shapes import SIDE_PX_MAX, SIDE_PX_MIN, detect


@dataclass(frozen=True)
class Verdict:
    """`reward` is what training sees, `correct` the dataset's own yes or no, `reason` what is wrong ("" if nothing is)."""

    reward: float
    correct: bool
    reason: str


class Scorer(Protocol):
    """Judges images. Called from several threads at once."""

    @property
    def datasets(self) -> tuple[str, ...]:
        """Names of the rewards it has."""
        ...

    def score(self, dataset: str, row_json: bytes, image: Image) -> Verdict:
        """Judges an H x W x 3 image against one prompt row; `dataset` is one of `datasets`.

        Raises InputError where row or image cannot be judged, now or ever; any other exception is a failure that may pass.
        """
        ...


Judge = Callable[[GenevalRow, Image], Verdict | float]
"""Judges an H x W x 3 uint8 image against one row, on several threads at once; a plain number counts as correct from 1 up.

Raises as `Scorer.score` does.
"""


class JudgesByName:
    """Routes each item to the judge of its name."""

    def __init__(self, judges: Mapping[str, Judge]) -> None:
        assert judges
        self._judges = dict(judges)

    @property
    def datasets(self) -> tuple[str, ...]:
        return tuple(self._judges)

    def score(self, dataset: str, row_json: bytes, image: Image) -> Verdict:
        judged = self._judges[dataset](parse_row(row_json), image)
        if isinstance(judged, Verdict):
            return judged
        return Verdict(reward=float(judged), correct=float(judged) >= 1, reason="")


class ShapesJudge:
    """Shapes detector and GenEval's rules, for images of the embedded tiny model. Raises InputError on an unknown rule."""

    def __init__(self, rule: Rule = "clamped") -> None:
        if rule not in RULES:
            raise InputError(f"rule = {rule!r}: must be one of {', '.join(RULES)}")
        self._rule = rule

    def __call__(self, row: GenevalRow, image: Image) -> Verdict:
        require_objects(row)
        require_sides(image, SIDE_PX_MIN, SIDE_PX_MAX)
        judged = score(row, detect(image), self._rule, SHAPES_THRESHOLDS)
        return Verdict(reward=judged.reward, correct=judged.correct, reason=judged.reason)


def require_sides(image: Image, side_px_min: int, side_px_max: int) -> None:
    """Raises InputError for an H x W x 3 image with a side outside the bounds."""
    height, width = image.shape[:2]
    if min(height, width) < side_px_min or max(height, width) > side_px_max:
        raise InputError(f"image of {width} x {height} px: must be {side_px_min} to {side_px_max} on each side")


def require_objects(row: GenevalRow) -> None:
    """Raises InputError for a text row."""
    if row.tag == "text":
        raise InputError("tag = 'text': geneval judges objects, not texts")
