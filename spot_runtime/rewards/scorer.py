"""What the service asks of a scorer, and the embedded one for the shapes world. Owns the choice of detector and rule; never speaks HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from spot_runtime.errors import InputError
from spot_runtime.rewards.detection import Image
from spot_runtime.rewards.geneval import RULES, SHAPES_THRESHOLDS, Rule, score
from spot_runtime.rewards.prompts import parse_row
from spot_runtime.rewards.shapes import SIDE_PX_MIN, detect


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
        """Names of the datasets it can judge."""
        ...

    def score(self, dataset: str, row_json: bytes, image: Image) -> Verdict:
        """Judges an H x W x 3 image against one prompt row; `dataset` is one of `datasets`.

        Raises InputError where row or image cannot be judged, now or ever; any other exception is a failure that may pass.
        """
        ...


class ShapesScorer:
    """Shapes detector and GenEval's rules, for images of the embedded tiny model. Raises InputError on an unknown rule."""

    datasets = ("geneval",)

    def __init__(self, rule: Rule = "clamped") -> None:
        if rule not in RULES:
            raise InputError(f"rule = {rule!r}: must be one of {', '.join(RULES)}")
        self._rule = rule

    def score(self, dataset: str, row_json: bytes, image: Image) -> Verdict:
        assert dataset in self.datasets, dataset
        row = parse_row(row_json)
        if row.tag == "text":
            raise InputError("tag = 'text': geneval judges objects, not texts")
        if min(image.shape[:2]) < SIDE_PX_MIN:
            raise InputError(f"image of {image.shape[1]} x {image.shape[0]} px: must be >= {SIDE_PX_MIN} on each side")
        judged = score(row, detect(image), self._rule, SHAPES_THRESHOLDS)
        return Verdict(reward=judged.reward, correct=judged.correct, reason=judged.reason)
