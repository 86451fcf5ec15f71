"""Scenes as images, many at a time. Owns anti-aliased drawing on any device; never decides what a scene shows.

The outlines are those of `rewards.shapes.coverage` (a test compares the two), evaluated for a whole batch in torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from spot_runtime.models.scenes import OBJECTS_MAX, Scene
from spot_runtime.rewards.glyphs import INK, READER_SIDE_PX, text_mask
from spot_runtime.rewards.shapes import ARM, Bools
from spot_runtime.rewards.world import BACKGROUND, PALETTE, SHAPES

SHAPE_INDEX = {shape: index for index, shape in enumerate(SHAPES)}
COLOR_INDEX = {color: index for index, color in enumerate(PALETTE)}


def render(scenes: Sequence[Scene], side_px: int, device: torch.device) -> torch.Tensor:
    """Images of `scenes`: B x 3 x side_px x side_px in [-1, 1]."""
    background_3 = torch.tensor(BACKGROUND, device=device) / 255
    images_B3HW = background_3.view(1, 3, 1, 1).repeat(len(scenes), 1, side_px, side_px)
    for slot in range(OBJECTS_MAX):
        _draw_slot(images_B3HW, scenes, slot)
    _draw_texts(images_B3HW, scenes)
    return images_B3HW * 2 - 1


def _draw_slot(images_B3HW: torch.Tensor, scenes: Sequence[Scene], slot: int) -> None:
    """Paints the objects number `slot` of all scenes that have so many."""
    rows = [index for index, scene in enumerate(scenes) if len(scene.objects) > slot]
    if not rows:
        return
    device, side_px = images_B3HW.device, images_B3HW.shape[-1]
    items = [scenes[row].objects[slot] for row in rows]
    shape_N = torch.tensor([SHAPE_INDEX[item.shape] for item in items], device=device)
    color_N = torch.tensor([COLOR_INDEX[item.color] for item in items], device=device)
    palette_P3 = torch.tensor(list(PALETTE.values()), device=device) / 255
    geometry_N3 = torch.tensor([(item.x, item.y, item.radius) for item in items], device=device) * side_px
    covered_NHW = coverage(shape_N, geometry_N3, side_px)[:, None]
    row_N = torch.tensor(rows, device=device)
    paint_N311 = palette_P3[color_N][:, :, None, None]
    images_B3HW[row_N] = images_B3HW[row_N] * (1 - covered_NHW) + paint_N311 * covered_NHW


def _draw_texts(images_B3HW: torch.Tensor, scenes: Sequence[Scene]) -> None:
    """Paints the texts of all scenes that have one."""
    rows = [index for index, scene in enumerate(scenes) if scene.text]
    if not rows:
        return
    device, side_px = images_B3HW.device, images_B3HW.shape[-1]
    masks_N1HW = torch.from_numpy(np.stack([_ink_mask(scenes[row], side_px) for row in rows]))[:, None].to(device)
    row_N = torch.tensor(rows, device=device)
    ink_13 = torch.tensor([INK], device=device) / 255
    images_B3HW[row_N] = torch.where(masks_N1HW, ink_13[:, :, None, None], images_B3HW[row_N])


def _ink_mask(scene: Scene, side_px: int) -> Bools:
    shift_x, shift_y = (shift * side_px // READER_SIDE_PX for shift in scene.shift)
    return np.roll(text_mask(scene.text, side_px), (shift_y, shift_x), (0, 1))


def coverage(shape_N: torch.Tensor, geometry_N3: torch.Tensor, side_px: int) -> torch.Tensor:
    """How much of each pixel each shape covers, 0..1.

    Args:
        shape_N: index into SHAPES.
        geometry_N3: centre x, centre y and radius, in pixels.
        side_px: side of the square image.

    Returns:
        N x side_px x side_px.
    """
    pixel = torch.arange(side_px, device=geometry_N3.device) + 0.5
    x_N11, y_N11, radius_N11 = (geometry_N3[:, i, None, None] for i in range(3))
    u, v = (pixel[None, None, :] - x_N11) / radius_N11, (pixel[None, :, None] - y_N11) / radius_N11
    u, v = u.abs().expand(-1, side_px, -1), v.expand(-1, -1, side_px)
    outlines = {
        "square": torch.maximum(u, v.abs()) - 1,
        "circle": (u.square() + v.square()).sqrt() - 1,
        "triangle": torch.maximum(v - 1, (2 * u - (v + 1)) / 5**0.5),
        "cross": torch.minimum(torch.maximum(u - 1, v.abs() - ARM), torch.maximum(u - ARM, v.abs() - 1)),
    }
    outside_SNHW = torch.stack([outlines[shape] for shape in SHAPES])
    outside_NHW = outside_SNHW[shape_N, torch.arange(len(shape_N), device=shape_N.device)]
    return (0.5 - outside_NHW * radius_N11).clamp(0, 1)
