"""RapidOCR as a reader of images. Owns its loading; never scores. Its models are in the wheel `rapidocr-onnxruntime` (extra `ocr`)."""

from __future__ import annotations

import importlib
import threading
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from spot_runtime.errors import InputError
from spot_runtime.rewards.detection import Image

_PACKAGE: Final = "rapidocr_onnxruntime"
SIDE_PX_MIN: Final = 32
"""Its detector finds nothing in smaller images."""


def check_rapid() -> None:
    """Raises InputError where the extra is not installed. Imports nothing."""
    if find_spec(_PACKAGE) is None:
        raise InputError("reward = 'deepseek_ocr-rapidocr': needs RapidOCR: pip install 'spotlight-rl[ocr]'")


class RapidReader:
    """All lines that RapidOCR finds, top to bottom, joined by newlines. Safe to share between threads: one image at a time."""

    def __init__(self, engine: Any = None) -> None:
        check_rapid() if engine is None else None
        self._engine = engine or importlib.import_module(_PACKAGE).RapidOCR()
        self._lock = threading.Lock()

    def __call__(self, image: Image) -> str:
        """Raises InputError for an image that is too small; RapidOCR's own errors pass through."""
        if min(image.shape[:2]) < SIDE_PX_MIN:
            raise InputError(f"image of {image.shape[1]} x {image.shape[0]} px: must be >= {SIDE_PX_MIN} on each side")
        with self._lock:
            lines, _ = self._engine(np.ascontiguousarray(image[..., ::-1]))  # it expects BGR
        return "\n".join(text for _, text, _ in lines or ())
