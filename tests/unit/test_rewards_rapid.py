"""RapidOCR as a reader: with a stand-in everywhere, for real where the extra is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageDraw, ImageFont

from spot_runtime.errors import InputError
from spot_runtime.rewards.catalog import check_reward, load_judge
from spot_runtime.rewards.engines import rapid
from spot_runtime.rewards.engines.rapid import RapidReader
from spot_runtime.rewards.prompts import GenevalRow
from spot_runtime.rewards.scorer import Verdict


def test_lines_are_joined_and_no_line_is_no_text() -> None:
    seen: list[np.ndarray] = []

    def engine(image: np.ndarray) -> tuple[Any, Any]:
        seen.append(image)
        return ([[[], "Spring", 0.9], [[], "2024", 0.8]] if len(seen) == 1 else None), None

    reader = RapidReader(engine)
    red = np.zeros((64, 64, 3), np.uint8)
    red[..., 0] = 255
    assert [reader(red), reader(red)] == ["Spring\n2024", ""]
    assert seen[0][0, 0].tolist() == [0, 0, 255]


def test_an_image_that_is_too_small_is_an_error() -> None:
    with pytest.raises(InputError, match="image of 64 x 16 px: must be >= 32"):
        RapidReader(lambda image: (None, None))(np.zeros((16, 64, 3), np.uint8))


def test_without_the_extra_one_line_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rapid, "find_spec", lambda name: None)
    for ask in (check_reward, load_judge):
        with pytest.raises(InputError, match=r"needs RapidOCR: pip install 'spotlight-rl\[ocr\]'"):
            ask("deepseek_ocr-rapidocr")


@pytest.mark.skipif(find_spec("rapidocr_onnxruntime") is None, reason="needs the extra `ocr`")
def test_a_drawn_text_is_read() -> None:
    picture = Pillow.new("RGB", (384, 128), "white")
    ImageDraw.Draw(picture).text((40, 30), "Spring 2024", fill="black", font=ImageFont.load_default(48))
    row = GenevalRow(tag="text", include=(), prompt='a poster that says "SPRING 2024"')
    judge = load_judge("deepseek_ocr-rapidocr")
    assert judge(row, np.asarray(picture)) == Verdict(1.0, True, "")
    assert judge(row, np.full((128, 384, 3), 255, np.uint8)) == Verdict(0.0, False, "expected 'spring2024', read ''")
