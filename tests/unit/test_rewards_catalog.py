"""Rewards by name: what is always there, what a name may be, and what each reward cannot judge."""

from __future__ import annotations

import json
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from spot_runtime.errors import InputError
from spot_runtime.rewards import catalog
from spot_runtime.rewards.catalog import check_reward, check_row, kind_of_reward, load_judge, load_judges
from spot_runtime.rewards.prompts import GenevalRow, parse_row
from spot_runtime.rewards.scorer import Verdict
from spot_runtime.rewards.world import BACKGROUND, PALETTE

DOCUMENT = Path(__file__).parents[2] / "docs" / "rewards.md"
EMBEDDED = ("geneval", "geneval-official", "geneval-soft", "deepseek_ocr", "jpeg")


def row(class_name: str = "square", color: str | None = "red", count: int = 1, reward: str = "") -> GenevalRow:
    clause = {"class": class_name, "count": count} | ({"color": color} if color else {})
    return parse_row(json.dumps({"tag": "colors", "include": [clause], "prompt": "p", "reward": reward}))


def text(prompt: str, reward: str = "") -> GenevalRow:
    return GenevalRow(tag="text", include=(), prompt=prompt, reward=reward)


def canvas(*squares: str) -> np.ndarray:
    image = np.full((64, 64, 3), BACKGROUND, np.uint8)
    for index, color in enumerate(squares):
        image[24:40, 4 + 20 * index : 20 + 20 * index] = PALETTE[color]
    return image


def score(name: str, of: GenevalRow, image: np.ndarray) -> Verdict | float:
    return load_judge(name, {})(of, image)


def test_a_service_always_has_the_embedded_rewards() -> None:
    assert load_judges(environment={}).datasets == EMBEDDED


@pytest.mark.parametrize(
    ("name", "rewards"),
    [("geneval", (1.0, 0.25, 1.0)), ("geneval-official", (1.0, 0.0, 1.0)), ("geneval-soft", (1.0, 0.5, -0.5))],
)
def test_genevals_rules_differ_by_name_and_agree_on_what_is_correct(name: str, rewards: tuple[float, ...]) -> None:
    images = (canvas("red"), canvas("blue"), canvas("red", "blue", "red"))
    verdicts = [score(name, row(), image) for image in images]
    assert all(isinstance(verdict, Verdict) for verdict in verdicts)
    assert [verdict.reward for verdict in verdicts] == list(rewards)  # type: ignore[union-attr]
    assert [verdict.correct for verdict in verdicts][:2] == [True, False]  # type: ignore[union-attr]


def test_a_smooth_image_is_rewarded_for_its_small_jpeg() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    smooth, rough = score("jpeg", row(), canvas()), score("jpeg", row(), noise)
    assert isinstance(smooth, Verdict)
    assert isinstance(rough, Verdict)
    assert smooth.correct
    assert 0.9 < smooth.reward < 1
    assert not rough.correct
    assert rough.reward < 0.2
    assert rough.reason.endswith("of the raw size")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("faces", "reward = 'faces': must be one of geneval, geneval-official, geneval-soft, deepseek_ocr, jpeg"),
        ("no_such_module:f", "reward = 'no_such_module:f': cannot be imported: ModuleNotFoundError"),
        ("json:no_such_function", "reward = 'json:no_such_function': cannot be imported: AttributeError"),
        ("json:__name__", "reward = 'json:__name__': is a str, must be a function of a row and an image"),
        ("json:loads", "reward = 'json:loads': cannot be called with a row and an image"),
        (":", "reward = ':': cannot be imported: ValueError"),
        ("leaving:f", "reward = 'leaving:f': cannot be imported: SystemExit: 0"),
        ("later:f", "reward = 'later:f': is async or a generator, must return its verdict"),
        ("later:g", "reward = 'later:g': is async or a generator, must return its verdict"),
        ("m" * 127 + ":f", "reward = '" + "m" * 127 + ":f': has 129 characters, must be <= 128"),
    ],
)
def test_a_reward_that_is_not_there_is_one_line(
    name: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaving.py").write_text("import sys; sys.exit(0)")
    (tmp_path / "later.py").write_text("async def f(row, image): ...\ndef g(row, image): yield 1.0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError) as caught:
        check_reward(name)
    assert str(caught.value).startswith(fault)
    assert "\n" not in str(caught.value)


def test_an_entry_point_of_another_package_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("depth", "spot_runtime.rewards.jpeg:compressibility", "spotlight.rewards")
    monkeypatch.setattr(catalog, "entry_points", lambda group, name="depth": [entry] if name == "depth" else [])
    assert load_judges(["depth"], {}).datasets == (*EMBEDDED, "depth")
    with pytest.raises(InputError, match=r"jpeg, .*depth, or MODULE:FUNCTION"):
        check_reward("width")


def test_the_example_of_the_document_runs_and_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(example.splitlines()) <= 20
    (tmp_path / "my_rewards.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    scorer = load_judges(["my_rewards:much_red"], {})
    line = json.dumps({"tag": "colors", "include": [{"class": "square", "count": 1, "color": "red"}], "prompt": "p"})
    full = scorer.score("my_rewards:much_red", line.encode(), np.full((8, 8, 3), PALETTE["red"], np.uint8))
    none = scorer.score("my_rewards:much_red", line.encode(), np.full((8, 8, 3), PALETTE["blue"], np.uint8))
    assert (full, none) == (Verdict(1.0, True, ""), Verdict(0.0, False, ""))
    with pytest.raises(InputError, match="much_red judges only rows that ask for red"):
        scorer.score("my_rewards:much_red", line.replace('"red"', '"blue"').encode(), canvas())


def test_the_document_names_every_reward() -> None:
    document = DOCUMENT.read_text()
    assert [name for name in (*catalog.EMBEDDED, *catalog.ENGINES) if f"`{name}`" not in document] == []


@pytest.mark.parametrize(
    ("of", "fault"),
    [
        (row("dog"), "class = 'dog': the shapes detector finds only square, circle, triangle, cross"),
        (row(color="brown"), "color = 'brown': the shapes detector knows only red, "),
        (row(reward="deepseek_ocr"), "must quote a text"),
        (text('"A"', "geneval-soft"), "reward = 'geneval-soft': judges objects, not texts"),
        (text('"Spring"'), "has 6 characters, the embedded reader reads <= 4"),
    ],
)
def test_a_row_that_its_reward_can_never_judge_is_refused(of: GenevalRow, fault: str) -> None:
    with pytest.raises(InputError, match=re.escape(fault)):
        check_row(of)


def test_rows_that_can_be_judged_pass() -> None:
    for fine in (row(), row(color=None), text('"A1"'), row("dog", reward="jpeg"), text('"Spring"', "jpeg")):
        check_row(fine)


def test_a_rewards_name_says_what_it_judges() -> None:
    kinds = [kind_of_reward(name) for name in ("geneval", "geneval-soft", "deepseek_ocr", "jpeg", "a:b", "genevalx")]
    assert kinds == ["objects", "objects", "texts", "any", "any", "any"]
