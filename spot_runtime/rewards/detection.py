"""What a detector sees and what it found. Owns the records that detectors make and rules read; never finds or judges anything."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]
"""H x W x 3, sRGB."""
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
