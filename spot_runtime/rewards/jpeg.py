"""How small an image becomes as a JPEG: a reward that needs no model and cannot be argued with. Never looks at the prompt.

    reward = 1 - size / raw size, size at JPEG_QUALITY without chroma subsampling, raw size = 3 bytes a pixel

The task is the one of DDPO (arXiv 2305.13301), there in negative kilobytes; as a share of the raw size it is comparable across resolutions.
"""

from __future__ import annotations

import io
from typing import Final

from PIL import Image as Pillow

from spot_runtime.errors import InputError
from spot_runtime.rewards.detection import Image
from spot_runtime.rewards.prompts import GenevalRow
from spot_runtime.rewards.scorer import Verdict

JPEG_QUALITY: Final = 95
SIDE_PX_MIN: Final = 32
CORRECT_SHARE_MAX: Final = 0.1
"""An image counts as compressible at a tenth of its raw size or less."""


def compressibility(row: GenevalRow, image: Image) -> Verdict:
    """Judges an H x W x 3 image; `row` is not looked at. Raises InputError where its headers alone would outweigh it."""
    del row
    if min(image.shape[:2]) < SIDE_PX_MIN:
        raise InputError(f"image of {image.shape[1]} x {image.shape[0]} px: must be >= {SIDE_PX_MIN} on each side")
    buffer = io.BytesIO()
    Pillow.fromarray(image).save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling=0)
    share = buffer.tell() / image.nbytes
    correct = share <= CORRECT_SHARE_MAX
    return Verdict(reward=1 - share, correct=correct, reason="" if correct else f"{share:.3f} of the raw size")
