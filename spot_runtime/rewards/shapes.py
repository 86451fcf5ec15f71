"""The shapes world and its detector: plain shapes of six colours on a light background, found by colour and connected components.

Owns shape outlines and detection; `world` has the names and colours. Never knows what was asked for, and never scores.

The detector unmixes colours. A pixel on the edge of an object of colour c is background + coverage * (c - background): each pixel goes to
the colour whose mixing line is nearest, and belongs to the object where its coverage is at least one half. Nearest palette colour alone
would see a purple rim around a black object and a yellow one around a red.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from spot_runtime.rewards.detection import Box, Detection, Image
from spot_runtime.rewards.world import BACKGROUND, OTHER, PALETTE, SHAPES

__all__ = ["BACKGROUND", "OTHER", "PALETTE", "SHAPES", "Detection", "Image", "coverage", "detect", "unmix"]

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

SIDE_PX_MIN: Final = 16
SIDE_PX_MAX: Final = 1024
"""Eight times what the largest model of this world draws; the time it takes grows with the square."""
AREA_SHARE_MIN: Final = 0.004
"""Smaller components are specks: a triangle of radius .085 covers .0117 of the image."""
THICKNESS_SHARE_MIN: Final = 0.05
"""Blobs that are thinner than this share of the image's side are seams, where two colours mix into a third."""
RESIDUAL_MAX: Final = 80.0
"""Distance in sRGB units from the mixing line beyond which a pixel has none of our colours."""
ASPECT_MAX: Final = 1.6
OVERLAP_MIN: Final = 0.6
"""Soft overlap with the best shape below which a blob is OTHER."""


def detect(image: Image) -> list[Detection]:
    """All objects in an H x W x 3 image, best score first: the overlap with the ideal outline.

    Asserts dtype uint8 and a side of at least SIDE_PX_MIN.
    """
    assert image.dtype == np.uint8, image.dtype
    assert image.ndim == 3, image.shape
    assert image.shape[2] == 3, image.shape
    assert min(image.shape[:2]) >= SIDE_PX_MIN, image.shape
    nearest_HW, coverage_HW = unmix(image)
    found: list[Detection] = []
    for index, color in enumerate(PALETTE):
        color_coverage_HW = np.where(nearest_HW == index, coverage_HW, np.float32(0))
        found.extend(_components(color, color_coverage_HW))
    return sorted(found, key=lambda detection: -detection.score)


def unmix(image: Image) -> tuple[NDArray[np.intp], Floats]:
    """Index of the palette colour that explains each pixel best (-1: none does), and how much of the pixel it covers (0..1).

    With p = pixel - background and d_c = c - background: coverage_c = clip(p.d_c / d_c.d_c, 0, 1.1), residual_c = |p - coverage_c d_c|.
    """
    direction_C3 = np.array(list(PALETTE.values()), np.float32) - np.array(BACKGROUND, np.float32)
    pixel_HW3 = image.astype(np.float32) - np.array(BACKGROUND, np.float32)
    coverage_HWC = pixel_HW3 @ direction_C3.T / (direction_C3**2).sum(1)
    coverage_HWC = coverage_HWC.clip(0, 1.1)
    squared_HWC = (
        (pixel_HW3**2).sum(-1, keepdims=True)
        - 2 * coverage_HWC * (pixel_HW3 @ direction_C3.T)
        + coverage_HWC**2 * (direction_C3**2).sum(1)
    )
    nearest_HW = squared_HWC.argmin(-1)
    residual_HW = np.take_along_axis(squared_HWC, nearest_HW[..., None], -1)[..., 0]
    coverage_HW = np.take_along_axis(coverage_HWC, nearest_HW[..., None], -1)[..., 0].clip(0, 1)
    return np.where(residual_HW > RESIDUAL_MAX**2, -1, nearest_HW), coverage_HW


ARM: Final = 0.36
"""Width of a cross's bars as a share of its box."""


def coverage(shape: str, x: Any, y: Any, radius_x: float, radius_y: float, edge: float) -> Floats:
    """How much of the points (x, y), relative to the centre, a shape covers: 0..1, linear over `edge` across the outline.

    Every shape fills its box of 2 radius_x by 2 radius_y. Coordinates, radii and edge share one unit; y grows downwards.
    """
    u, v, scale = np.asarray(x) / radius_x, np.asarray(y) / radius_y, min(radius_x, radius_y)
    match shape:
        case "square":
            outside = np.maximum(abs(u), abs(v)) - 1
        case "circle":
            outside = np.sqrt(u**2 + v**2) - 1
        case "triangle":  # apex up: half width grows from 0 at v = -1 to 1 at v = 1
            outside = np.maximum(v - 1, (2 * abs(u) - (v + 1)) / 5**0.5)
        case "cross":  # two bars, each ARM of the box wide
            outside = np.minimum(np.maximum(abs(u) - 1, abs(v) - ARM), np.maximum(abs(u) - ARM, abs(v) - 1))
        case _:
            raise AssertionError(shape)
    covered: Floats = (0.5 - outside * scale / edge).clip(0, 1).astype(np.float32)
    return covered


def _components(color: str, coverage_HW: Floats) -> list[Detection]:
    """Every connected blob of one colour that is neither a speck nor the seam between two objects that touch."""
    mask_HW = coverage_HW >= 0.5
    label_HW, _ = ndimage.label(mask_HW)
    found = []
    for number, (rows, columns) in enumerate(ndimage.find_objects(label_HW), start=1):
        thickness = min(rows.stop - rows.start, columns.stop - columns.start)
        area = np.count_nonzero(label_HW[rows, columns] == number)
        if area >= AREA_SHARE_MIN * mask_HW.size and thickness >= THICKNESS_SHARE_MIN * min(mask_HW.shape):
            found.append(_measure(color, coverage_HW, label_HW == number, rows, columns))
    return found


def _measure(color: str, coverage_HW: Floats, blob_HW: Bools, rows: slice, columns: slice) -> Detection:
    """Fits every shape to the blob's box; its soft edge, one pixel around the blob, counts as part of it."""
    top, left = max(rows.start - 2, 0), max(columns.start - 2, 0)
    window = (slice(top, rows.stop + 2), slice(left, columns.stop + 2))
    soft_hw = np.where(ndimage.binary_dilation(blob_HW[window]), coverage_HW[window], np.float32(0))
    y0, y1 = _extent(soft_hw.max(1), top)
    x0, x1 = _extent(soft_hw.max(0), left)
    class_name, score = _best_shape(soft_hw, (x0, y0, x1, y1), (left, top))
    return Detection(class_name, color, (x0, y0, x1, y1), score, float(soft_hw.sum()))


def _extent(profile: Floats, offset: int) -> tuple[float, float]:
    """First and last edge of a profile of coverages, between pixels: a half-covered border pixel counts half."""
    inside = np.flatnonzero(profile >= 0.5)
    first, last = int(inside[0]), int(inside[-1])
    before = float(profile[first - 1]) if first > 0 else 0.0
    after = float(profile[last + 1]) if last + 1 < len(profile) else 0.0
    return offset + first + 1 - float(profile[first]) - before, offset + last + float(profile[last]) + after


def _best_shape(soft_hw: Floats, box: Box, origin: tuple[int, int]) -> tuple[str, float]:
    """The shape with the largest soft overlap sum(min) / sum(max), and that overlap."""
    x0, y0, x1, y1 = box
    width, height = x1 - x0, y1 - y0
    x = np.arange(soft_hw.shape[1]) + 0.5 + origin[0] - (x0 + x1) / 2
    y = np.arange(soft_hw.shape[0]) + 0.5 + origin[1] - (y0 + y1) / 2
    overlaps = {}
    for shape in SHAPES:
        ideal_hw = coverage(shape, x[None, :], y[:, None], width / 2, height / 2, edge=1.0)
        overlaps[shape] = float(np.minimum(soft_hw, ideal_hw).sum() / np.maximum(soft_hw, ideal_hw).sum())
    best = max(overlaps, key=lambda shape: overlaps[shape])
    if overlaps[best] < OVERLAP_MIN or max(width, height) > ASPECT_MAX * min(width, height):
        return OTHER, overlaps[best]
    return best, overlaps[best]
