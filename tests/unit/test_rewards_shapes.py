"""The shapes detector on scenes drawn by another renderer (Pillow polygons, supersampled), blurred and noisy as a small VAE leaves them."""

from __future__ import annotations

import random
from itertools import permutations, product

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageDraw
from scipy import ndimage

from spot_runtime.rewards.detection import Image
from spot_runtime.rewards.shapes import ARM, coverage, detect, unmix
from spot_runtime.rewards.world import BACKGROUND, OTHER, PALETTE, SHAPES

SUPERSAMPLE = 6
Thing = tuple[str, str, float, float, float]
"""colour, shape, centre x, centre y, radius; shares of the side."""


def draw(things: list[Thing], side_px: int = 64, background: tuple[int, int, int] = BACKGROUND) -> Image:
    big = side_px * SUPERSAMPLE
    picture = Pillow.new("RGB", (big, big), background)
    pen = ImageDraw.Draw(picture)
    for color, shape, x, y, r in things:
        box = [big * (x - r), big * (y - r), big * (x + r), big * (y + r)]
        if shape == "circle":
            pen.ellipse(box, fill=PALETTE[color])
        for outline in outlines(shape):
            pen.polygon([(big * (x + r * u), big * (y + r * v)) for u, v in outline], fill=PALETTE[color])
    return np.asarray(picture.resize((side_px, side_px), Pillow.Resampling.BOX))


def outlines(shape: str) -> list[list[tuple[float, float]]]:
    square = [(-1, -1), (1, -1), (1, 1), (-1, 1)]
    bars = [[(u * a, v * b) for u, v in square] for a, b in ((1, ARM), (ARM, 1))]
    return {"square": [square], "triangle": [[(0, -1), (1, 1), (-1, 1)]], "cross": bars}.get(shape, [])


def smear(image: Image, blur_px: float, noise: float, rng: np.random.Generator) -> Image:
    soft = ndimage.gaussian_filter(image.astype(np.float64), (blur_px, blur_px, 0))
    return (soft + rng.normal(0, noise, soft.shape)).clip(0, 255).round().astype(np.uint8)


def scene(rng: random.Random, number: int, radius: float) -> list[Thing]:
    columns, rows = 3, 2
    cells = rng.sample(list(product(range(columns), range(rows))), number)
    slack_x, slack_y = 0.5 / columns - radius - 0.02, 0.5 / rows - radius - 0.02
    return [
        (
            rng.choice(list(PALETTE)),
            rng.choice(SHAPES),
            (column + 0.5) / columns + rng.uniform(-slack_x, slack_x),
            (row + 0.5) / rows + rng.uniform(-slack_y, slack_y),
            radius,
        )
        for column, row in cells
    ]


def names(things: list[Thing]) -> list[tuple[str, str]]:
    return sorted((color, shape) for color, shape, *_ in things)


def found(image: Image) -> list[tuple[str, str]]:
    return sorted((detection.color, detection.class_name) for detection in detect(image))


@pytest.mark.parametrize("radius", [0.085, 0.1, 0.13])
@pytest.mark.parametrize(("blur_px", "noise"), [(0.0, 0.0), (0.7, 4.0)])
def test_at_least_99_of_100_scenes_of_up_to_six_objects_are_read_exactly(
    radius: float, blur_px: float, noise: float
) -> None:
    rng, noise_rng = random.Random(0), np.random.default_rng(0)
    right = 0
    for _ in range(100):
        things = scene(rng, rng.randint(1, 6), radius)
        background = (BACKGROUND[0] + rng.randint(-8, 8),) * 3
        image = smear(draw(things, background=background), blur_px, noise, noise_rng)
        right += found(image) == names(things)
    assert right >= 99


@pytest.mark.parametrize("side_px", [48, 96, 256, 512])
def test_other_sizes_are_read_as_well(side_px: int) -> None:
    rng = random.Random(1)
    for _ in range(8):
        things = scene(rng, rng.randint(1, 6), 0.1)
        assert found(draw(things, side_px)) == names(things)


def test_an_image_need_not_be_square() -> None:
    image = draw([("red", "circle", 0.5, 0.5, 0.3)])
    assert found(np.concatenate([image, image], axis=1)) == [("red", "circle")] * 2


@pytest.mark.parametrize("gap", [0.0, 0.02])
def test_objects_of_different_colours_may_touch(gap: float) -> None:
    pairs = list(product(SHAPES, SHAPES))
    for index, (first, second) in enumerate(permutations(PALETTE, 2)):
        for shape, other in pairs[index % 4 :: 4]:
            things = [(first, shape, 0.35 - gap / 2, 0.5, 0.15), (second, other, 0.65 + gap / 2, 0.5, 0.15)]
            assert found(smear(draw(things), 0.5, 0, np.random.default_rng(0))) == names(things)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("color", PALETTE)
def test_box_area_and_score_are_those_of_the_object(color: str, shape: str) -> None:
    (detection,) = detect(draw([(color, shape, 0.4, 0.6, 0.2)]))
    assert (detection.class_name, detection.color) == (shape, color)
    assert detection.box == pytest.approx((12.8, 25.6, 38.4, 51.2), abs=1.2)
    share = {"square": 1.0, "circle": np.pi / 4, "triangle": 0.5, "cross": 1 - (1 - ARM) ** 2}[shape]
    assert detection.area == pytest.approx(share * 25.6**2, rel=0.05)
    assert 0.9 < detection.score <= 1


def test_an_empty_canvas_has_no_objects_and_noise_has_no_shapes() -> None:
    rng = np.random.default_rng(0)
    assert detect(draw([])) == []
    noise = rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert {detection.class_name for detection in detect(noise)} <= {OTHER}
    faint = np.full((64, 64, 3), 237, np.uint8) - rng.integers(0, 40, (64, 64, 1), dtype=np.uint8)
    assert detect(faint) == []


def test_specks_are_not_objects() -> None:
    assert detect(draw([("red", "square", 0.5, 0.5, 0.02)])) == []


def test_a_colour_outside_the_palette_is_not_an_object() -> None:
    image = draw([])
    image = image.copy()
    image[20:40, 20:40] = (0, 255, 255)
    assert detect(image) == []


def test_a_blob_that_is_no_shape_keeps_its_colour_and_is_called_other() -> None:
    bar = np.full((64, 64, 3), BACKGROUND, np.uint8)
    bar[30:36, 5:60] = PALETTE["green"]
    assert found(bar) == [("green", OTHER)]
    merged = [("blue", "circle", 0.35, 0.5, 0.16), ("blue", "circle", 0.65, 0.5, 0.16)]
    assert found(draw(merged)) == [("blue", OTHER)]


def test_the_most_ideal_outline_comes_first() -> None:
    rng = random.Random(5)
    for _ in range(20):
        scores = [detection.score for detection in detect(draw(scene(rng, 6, 0.11)))]
        assert scores == sorted(scores, reverse=True)


def test_the_edge_of_an_object_has_its_own_colour() -> None:
    for index, color in enumerate(PALETTE.values()):
        edge = ((np.array(color) + np.array(BACKGROUND)) / 2).round().astype(np.uint8)
        nearest, covered = unmix(np.broadcast_to(edge, (16, 16, 3)))
        assert set(nearest.ravel()) == {index}
        assert covered == pytest.approx(np.full((16, 16), 0.5), abs=0.01)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_ideal_outline_is_the_one_that_is_drawn(shape: str) -> None:
    points = np.arange(64) + 0.5 - 32
    ideal = coverage(shape, points[None, :], points[:, None], 19.2, 19.2, edge=1.0)
    drawn = unmix(draw([("black", shape, 0.5, 0.5, 0.3)]))[1]
    assert np.abs(ideal - drawn).mean() < 0.01
