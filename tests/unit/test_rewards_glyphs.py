"""The bitmap font and its reader."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest
from scipy import ndimage

from spot_runtime.rewards.detection import Image
from spot_runtime.rewards.glyphs import FONT, GLYPH_HEIGHT, GLYPH_WIDTH, INK, read_text, text_mask
from spot_runtime.rewards.prompts import TEXT_CHARACTERS
from spot_runtime.rewards.world import BACKGROUND


def draw(text: str, side_px: int = 64, shift: tuple[int, int] = (0, 0), blur_px: float = 0, noise: float = 0) -> Image:
    mask = text_mask(text, side_px)[..., None]
    image = np.where(mask, np.array(INK), np.array(BACKGROUND)).astype(np.float64)
    image = ndimage.gaussian_filter(np.roll(image, shift, (0, 1)), (blur_px, blur_px, 0))
    image += np.random.default_rng(len(text)).normal(0, noise, image.shape)
    return image.clip(0, 255).round().astype(np.uint8)


def test_the_font_has_every_character_that_prompts_ask_for_and_no_two_alike() -> None:
    assert set(FONT) == set(TEXT_CHARACTERS)
    assert {len(rows) for rows in FONT.values()} == {GLYPH_HEIGHT}
    assert {len(row) for rows in FONT.values() for row in rows} == {GLYPH_WIDTH}
    flat = {character: "".join(rows) for character, rows in FONT.items()}
    distances = [sum(x != y for x, y in zip(flat[a], flat[b], strict=True)) for a, b in combinations(flat, 2)]
    assert min(distances) >= 3


@pytest.mark.parametrize("character", TEXT_CHARACTERS)
def test_every_character_is_read(character: str) -> None:
    assert read_text(draw(character)) == character


@pytest.mark.parametrize(("blur_px", "noise", "shift_px"), [(0.0, 0.0, 3), (0.8, 8.0, 2), (1.0, 15.0, 3)])
def test_short_texts_are_read_though_soft_noisy_and_off_their_place(
    blur_px: float, noise: float, shift_px: int
) -> None:
    rng = random.Random(0)
    right = 0
    for _ in range(60):
        text = "".join(rng.choices(TEXT_CHARACTERS, k=rng.randint(1, 4)))
        shift = rng.randint(-shift_px, shift_px), rng.randint(-shift_px, shift_px)
        right += read_text(draw(text, 64, shift, blur_px, noise)) == text
    assert right >= 58


@pytest.mark.parametrize("side_px", [32, 128, 256])
def test_other_sizes_are_read(side_px: int) -> None:
    assert read_text(draw("AB7", side_px)) == "AB7"


def test_a_line_is_centred_dark_on_light_with_two_pixels_a_cell() -> None:
    ink = np.argwhere(text_mask("HHHH", 64))
    assert ink.min(0).tolist() == [25, 9]
    assert ink.max(0).tolist() == [38, 54]


def test_nothing_is_read_from_an_empty_a_black_or_a_random_image() -> None:
    assert read_text(np.full((64, 64, 3), BACKGROUND, np.uint8)) == ""
    assert read_text(np.zeros((64, 64, 3), np.uint8)) == ""
    assert read_text(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)) == ""


def test_an_unreadable_place_is_left_out() -> None:
    image = draw("A7")
    half = image.copy()
    half[:, 32:] = BACKGROUND
    half[28:36, 40:44] = INK
    assert read_text(half) in ("A", "")
    assert read_text(image) == "A7"


def test_a_text_that_does_not_fit_is_a_programmers_error() -> None:
    for text, side_px in (("ABCDE", 64), ("", 64), ("A", 60)):
        with pytest.raises(AssertionError):
            text_mask(text, side_px)
