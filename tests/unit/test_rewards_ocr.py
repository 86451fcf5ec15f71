"""The text rule: what counts as near, what counts as right, and that nothing to compare is no reward."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from spot_runtime.errors import InputError
from spot_runtime.rewards.glyphs import INK, text_mask
from spot_runtime.rewards.ocr import TextJudge, capped_distance, check_glyphs, normalised, text_verdict
from spot_runtime.rewards.prompts import GenevalObject, GenevalRow
from spot_runtime.rewards.scorer import Verdict
from spot_runtime.rewards.world import BACKGROUND

IMAGE = np.full((64, 64, 3), BACKGROUND, np.uint8)


def row(text: str) -> GenevalRow:
    return GenevalRow(tag="text", include=(), prompt=f'a sign that says "{text}", at night')


def levenshtein(a: str, b: str) -> int:
    """The textbook recursion."""
    if not a or not b:
        return len(a) + len(b)
    return min(levenshtein(a[1:], b) + 1, levenshtein(a, b[1:]) + 1, levenshtein(a[1:], b[1:]) + (a[0] != b[0]))


def test_the_distance_is_levenshteins_capped_at_the_target() -> None:
    words = ["".join(letters) for length in range(5) for letters in product("ab", repeat=length)]
    for target in words[1:]:
        for read in words:
            assert capped_distance(target, read) == min(levenshtein(target, read), len(target)), (target, read)


@pytest.mark.parametrize(
    ("target", "read", "reward"),
    [
        ("open", "open", 1.0),
        ("open", "weareopennow", 1.0),
        ("open", "opan", 0.75),
        ("open", "ope", 0.75),
        ("open", "", 0.0),
        ("open", "x" * 5000, 0.0),
        ("ab", "ba", 0.0),
        ("grüße", "grusse", 0.4),
    ],
)
def test_golden_rewards(target: str, read: str, reward: float) -> None:
    verdict = text_verdict(target, read)
    assert verdict.reward == pytest.approx(reward)
    assert verdict.correct == (reward == 1.0)
    assert bool(verdict.reason) == (not verdict.correct)


def test_spaces_and_case_do_not_count() -> None:
    judge = TextJudge(lambda image: "spring\nCOLLECTION  20 24")
    assert judge(row("Spring Collection 2024"), IMAGE) == Verdict(1.0, True, "")


def test_a_letter_is_the_same_with_its_accent_apart() -> None:
    assert normalised("Cafe\u0301") == normalised("CAF\u00c9") == "caf\u00e9"


def test_a_reason_says_what_was_read_within_bounds() -> None:
    assert text_verdict("ab", "z" * 10_000).reason == "expected 'ab', read 'zzzz'"


def test_an_empty_target_and_a_failing_engine_are_errors_and_never_a_reward() -> None:
    def broken(image: np.ndarray) -> str:
        raise RuntimeError("no model")

    for prompt in ("no quotes", '"  " is blank'):
        with pytest.raises(ValueError, match="must quote a text"):
            GenevalRow(tag="text", include=(), prompt=prompt)
    with pytest.raises(RuntimeError, match="no model"):
        TextJudge(broken)(row("A"), IMAGE)


def test_an_object_row_without_a_quoted_text_cannot_be_judged_as_text() -> None:
    clause = GenevalObject(class_name="circle", count=1)
    with pytest.raises(InputError, match="must quote a text"):
        TextJudge()(GenevalRow(tag="colors", include=(clause,), prompt="a photo of a circle"), IMAGE)


def test_the_embedded_reader_judges_drawn_text() -> None:
    image = np.where(text_mask("AB7", 64)[..., None], np.array(INK, np.uint8), np.array(BACKGROUND, np.uint8))
    assert TextJudge()(row("AB7"), image).reward == 1.0
    assert TextJudge()(row("AB1"), image).reward == pytest.approx(2 / 3)
    assert TextJudge()(row("XYZ"), IMAGE).reward == 0.0


def test_texts_that_the_embedded_font_cannot_show_are_refused() -> None:
    check_glyphs(row("ab 1 2"))
    with pytest.raises(InputError, match="has '!', the embedded reader knows only A-Z and 0-9"):
        check_glyphs(row("AB!"))
    with pytest.raises(InputError, match="has 5 characters, the embedded reader reads <= 4"):
        check_glyphs(row("ABCDE"))
