"""What a detector found. Owns the record that detectors make and scoring rules read; never finds or judges anything."""

from __future__ import annotations

from dataclasses import dataclass

Box = tuple[float, float, float, float]
"""(x0, y0, x1, y1) in pixels, y downwards."""


@dataclass(frozen=True)
class Detection:
    """One found object. `score` in [0, 1] is the detector's confidence; `area` counts pixels."""

    class_name: str
    color: str
    box: Box
    score: float
    area: float
