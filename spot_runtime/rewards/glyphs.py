"""The 5 x 7 bitmap font of the tiny world, its layout, and a reader that matches templates.

Owns glyphs and where they sit in an image; the renderer of training images uses the same layout. Never scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from PIL import Image as Pillow

from spot_runtime.rewards.detection import Image
from spot_runtime.rewards.shapes import Bools, Floats
from spot_runtime.rewards.world import BACKGROUND

FONT: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "A": (".###.", "#...#", "#...#", "#####", "#...#", "#...#", "#...#"),
        "B": ("####.", "#...#", "#...#", "####.", "#...#", "#...#", "####."),
        "C": (".####", "#....", "#....", "#....", "#....", "#....", ".####"),
        "D": ("###..", "#..#.", "#...#", "#...#", "#...#", "#..#.", "###.."),
        "E": ("#####", "#....", "#....", "####.", "#....", "#....", "#####"),
        "F": ("#####", "#....", "#....", "####.", "#....", "#....", "#...."),
        "G": (".####", "#....", "#....", "#..##", "#...#", "#...#", ".####"),
        "H": ("#...#", "#...#", "#...#", "#####", "#...#", "#...#", "#...#"),
        "I": ("#####", "..#..", "..#..", "..#..", "..#..", "..#..", "#####"),
        "J": ("..###", "...#.", "...#.", "...#.", "...#.", "#..#.", ".##.."),
        "K": ("#...#", "#..#.", "#.#..", "##...", "#.#..", "#..#.", "#...#"),
        "L": ("#....", "#....", "#....", "#....", "#....", "#....", "#####"),
        "M": ("#...#", "##.##", "#.#.#", "#.#.#", "#...#", "#...#", "#...#"),
        "N": ("#...#", "##..#", "##..#", "#.#.#", "#..##", "#..##", "#...#"),
        "O": (".###.", "#...#", "#...#", "#...#", "#...#", "#...#", ".###."),
        "P": ("####.", "#...#", "#...#", "####.", "#....", "#....", "#...."),
        "Q": (".###.", "#...#", "#...#", "#...#", "#.#.#", "#..#.", ".##.#"),
        "R": ("####.", "#...#", "#...#", "####.", "#.#..", "#..#.", "#...#"),
        "S": (".####", "#....", "#....", ".###.", "....#", "....#", "####."),
        "T": ("#####", "..#..", "..#..", "..#..", "..#..", "..#..", "..#.."),
        "U": ("#...#", "#...#", "#...#", "#...#", "#...#", "#...#", ".###."),
        "V": ("#...#", "#...#", "#...#", "#...#", ".#.#.", ".#.#.", "..#.."),
        "W": ("#...#", "#...#", "#...#", "#.#.#", "#.#.#", "##.##", "#...#"),
        "X": ("#...#", "#...#", ".#.#.", "..#..", ".#.#.", "#...#", "#...#"),
        "Y": ("#...#", "#...#", ".#.#.", "..#..", "..#..", "..#..", "..#.."),
        "Z": ("#####", "....#", "...#.", "..#..", ".#...", "#....", "#####"),
        "0": (".###.", "#..##", "#..##", "#.#.#", "##..#", "##..#", ".###."),
        "1": ("..#..", ".##..", "#.#..", "..#..", "..#..", "..#..", ".###."),
        "2": (".###.", "#...#", "....#", "..##.", ".#...", "#....", "#####"),
        "3": ("####.", "....#", "....#", "..##.", "....#", "....#", "####."),
        "4": ("...#.", "..##.", ".#.#.", "#..#.", "#####", "...#.", "...#."),
        "5": ("#####", "#....", "###..", "...#.", "....#", "#...#", ".###."),
        "6": ("..##.", ".#...", "#....", "####.", "#...#", "#...#", ".###."),
        "7": ("#####", "....#", "...#.", "..#..", "..#..", ".#...", ".#..."),
        "8": (".###.", "#...#", "#...#", ".###.", "#...#", "#...#", ".###."),
        "9": (".###.", "#...#", "#...#", ".####", "....#", "...#.", ".##.."),
    }
)
"""Rows of each glyph, top to bottom; `#` is ink."""
GLYPH_WIDTH: Final = 5
GLYPH_HEIGHT: Final = 7
GLYPH_ADVANCE: Final = 6
"""Glyph cells from one glyph's left edge to the next one's."""
CELLS_PER_SIDE: Final = 32
"""The image is so many glyph cells wide and high: a cell is 2 px at 64 px."""
INK: Final = (20, 20, 20)
"""sRGB of the text."""
LENGTH_MAX: Final = 4
SHIFT_PX_MAX: Final = 3
"""A drawn line may be so many pixels (at 64 px) off its place in each direction."""
MATCH_MIN: Final = 0.55
"""Correlation between ink and glyph below which a place holds no readable character."""
READER_SIDE_PX: Final = 64


def text_mask(text: str, side_px: int) -> Bools:
    """Where ink is in a `side_px` square image: one centred line of 1 to LENGTH_MAX characters of FONT, True on ink.

    Asserts that side_px is a multiple of CELLS_PER_SIDE and that the text fits.
    """
    assert side_px % CELLS_PER_SIDE == 0, side_px
    assert 1 <= len(text) <= LENGTH_MAX, text
    cell_px = side_px // CELLS_PER_SIDE
    mask = np.zeros((side_px, side_px), np.bool_)
    for index, character in enumerate(text):
        top, left = _glyph_corner(len(text), index, cell_px)
        glyph = _scaled(character, cell_px)
        mask[top : top + glyph.shape[0], left : left + glyph.shape[1]] = glyph > 0
    return mask


def read_text(image: Image) -> str:
    """The text in a square H x W x 3 image, by the length and shift whose templates leave the least unexplained ink.

    "" where there is no ink; a place whose ink is like no glyph is left out of the text.
    """
    ink_HW = _ink(image)
    glyph_GP = np.stack([_scaled(character, _CELL_PX).ravel() for character in FONT])
    if ink_HW.sum() < MATCH_MIN * glyph_GP.sum(1).min():
        return ""
    window_YXP = _windows(ink_HW)
    error_YXG = (glyph_GP**2).sum(1) - 2 * window_YXP @ glyph_GP.T
    shifts = range(-SHIFT_PX_MAX, SHIFT_PX_MAX + 1)
    lines = [_places(length, dy, dx) for length in range(1, LENGTH_MAX + 1) for dy in shifts for dx in shifts]
    best = min(lines, key=lambda line: sum(float(error_YXG[place].min()) for place in line))
    return "".join(_character(window_YXP[place], glyph_GP, error_YXG[place]) for place in best)


_CELL_PX: Final = READER_SIDE_PX // CELLS_PER_SIDE


def _places(length: int, dy: int, dx: int) -> list[tuple[int, int]]:
    """Top left pixels of a shifted line's glyphs."""
    corners = (_glyph_corner(length, index, _CELL_PX) for index in range(length))
    return [(top + dy, left + dx) for top, left in corners]


def _windows(ink_HW: Floats) -> Floats:
    """The ink under a glyph placed at (y, x), flattened: Y x X x P."""
    shape = (GLYPH_HEIGHT * _CELL_PX, GLYPH_WIDTH * _CELL_PX)
    window_YXhw = np.lib.stride_tricks.sliding_window_view(ink_HW, shape)
    return window_YXhw.reshape(*window_YXhw.shape[:2], -1)


def _character(ink_P: Floats, glyph_GP: Floats, error_G: Floats) -> str:
    """The glyph that explains most: least |ink - glyph|^2 - |ink|^2; "" if even that one is unlike the ink."""
    best = int(error_G.argmin())
    return list(FONT)[best] if _correlation(ink_P, glyph_GP[best]) >= MATCH_MIN else ""


def _correlation(a: Floats, b: Floats) -> float:
    a, b = a - a.mean(), b - b.mean()
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norm if norm > 0 else 0.0


def _ink(image: Image) -> Floats:
    """Darkness between background (0) and INK (1), at READER_SIDE_PX."""
    grey = Pillow.fromarray(image).convert("L").resize((READER_SIDE_PX, READER_SIDE_PX), Pillow.Resampling.BOX)
    level = np.asarray(grey, np.float32)
    return ((BACKGROUND[0] - level) / (BACKGROUND[0] - INK[0])).clip(0, 1)


def _scaled(character: str, cell_px: int) -> Floats:
    """A glyph in pixels, 1 on ink."""
    bitmap = np.array([[mark == "#" for mark in row] for row in FONT[character]], np.float32)
    return np.kron(bitmap, np.ones((cell_px, cell_px), np.float32))


def _glyph_corner(length: int, index: int, cell_px: int) -> tuple[int, int]:
    """Top and left pixel of one glyph of a centred line."""
    line_cells = length * GLYPH_ADVANCE - (GLYPH_ADVANCE - GLYPH_WIDTH)
    left_px = (CELLS_PER_SIDE - line_cells) * cell_px // 2 + index * GLYPH_ADVANCE * cell_px
    return (CELLS_PER_SIDE - GLYPH_HEIGHT) * cell_px // 2, left_px
