"""How well an image shows the text that its prompt quotes (dataset deepseek_ocr). Owns the rule and the engines' common shape.

Never reads pixels: an engine does, and one that fails is an error of the item, not an empty text.

    target = quoted text, read = what the engine saw, both without spaces and in lower case
    d = 0 if target is part of read, else min(levenshtein(target, read), len(target))
    reward = 1 - d / len(target), correct where d = 0

The rule is the one that Flow-GRPO trains on (arXiv 2505.05470).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

import numpy as np

from spot_runtime.errors import InputError
from spot_runtime.rewards.detection import Image
from spot_runtime.rewards.glyphs import FONT, LENGTH_MAX, read_text
from spot_runtime.rewards.prompts import GenevalRow, quoted_text
from spot_runtime.rewards.scorer import Verdict

Reader = Callable[[Image], str]
"""All text in an H x W x 3 image, "" where there is none. Raises where it could not look."""


class TextJudge:
    """The rule over one engine. Raises InputError on a row without a text; whatever the engine raises passes through."""

    def __init__(self, read: Reader = read_text) -> None:
        self._read = read

    def __call__(self, row: GenevalRow, image: Image) -> Verdict:
        target = target_text(row)
        return text_verdict(target, normalised(self._read(image)))


def target_text(row: GenevalRow) -> str:
    """The quoted text, normalised. Raises InputError where there is none: nothing could be right or wrong."""
    target = normalised(quoted_text(row.prompt))
    if not target:
        raise InputError(f'prompt = {row.prompt!r}: must quote a text in "double quotes"')
    return target


def normalised(text: str) -> str:
    """Without white space, in lower case, each letter one character with its accents."""
    return unicodedata.normalize("NFC", "".join(text.split()).lower())


def text_verdict(target: str, read: str) -> Verdict:
    """Both normalised, `target` not empty."""
    assert target
    distance = 0 if target in read else capped_distance(target, read)
    reason = "" if distance == 0 else f"expected {target!r}, read {read[: 2 * len(target)]!r}"
    return Verdict(reward=1 - distance / len(target), correct=distance == 0, reason=reason)


def capped_distance(target: str, read: str) -> int:
    """min(Levenshtein distance, len(target)).

    With c_j the distance of a prefix of `target` to read[:j], the next row is c'_j = min over i <= j of (u_i + j - i), where
    u_i = min(c_i + 1, c_{i-1} + [characters differ]): insertions are a running minimum of u_i - i.
    """
    if len(read) >= 2 * len(target):
        return len(target)  # too many characters to delete
    places = np.arange(len(read) + 1)
    characters = np.array(list(read), dtype="U1")
    row = places
    for character in target:
        without_insertions = row + 1
        without_insertions[1:] = np.minimum(without_insertions[1:], row[:-1] + (characters != character))
        row = np.minimum.accumulate(without_insertions - places) + places
    return min(int(row[-1]), len(target))


def check_glyphs(row: GenevalRow) -> None:
    """Raises InputError where the embedded font cannot show the quoted text."""
    target = target_text(row)
    strange = sorted({character for character in target.upper() if character not in FONT})
    if strange:
        raise InputError(f"text {target!r}: has {strange[0]!r}, the embedded reader knows only A-Z and 0-9")
    if len(target) > LENGTH_MAX:
        raise InputError(f"text {target!r}: has {len(target)} characters, the embedded reader reads <= {LENGTH_MAX}")
