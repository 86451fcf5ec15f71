"""Rewards by name: ours, and those of other packages. Owns the names, what each needs, and finding plug-ins; never judges.

    geneval, geneval-official, geneval-soft     GenEval's rules over the shapes detector
    geneval-coco, -official, -soft              the same over Mask2Former and CLIP
    deepseek_ocr                                the quoted text, as the embedded reader sees it
    deepseek_ocr-rapidocr                       the same by RapidOCR (extra `ocr`)
    deepseek_ocr-vlm                            the same by any vision-language model behind an OpenAI-compatible service
    clip-score, pickscore, hpsv2                how well an image goes with its prompt, by CLIP, PickScore or HPS v2
    jpeg                                        compressibility, no model
    NAME                                        entry point NAME of group `spotlight.rewards`
    MODULE:FUNCTION                             a function of this environment

Names are looked up when a service starts, never because a request asks: a request can only choose among what is there.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Final, Literal

from spot_runtime.errors import InputError
from spot_runtime.rewards.coco import check_coco
from spot_runtime.rewards.engines.hpsv2 import check_hpsv2, load_hpsv2
from spot_runtime.rewards.engines.likeness import (
    check_clip_score,
    check_pickscore,
    load_clip_score,
    load_pickscore,
)
from spot_runtime.rewards.engines.photographs import check_photographs, load_photographs
from spot_runtime.rewards.engines.rapid import RapidReader, check_rapid
from spot_runtime.rewards.engines.vlm import VlmReader, check_vlm
from spot_runtime.rewards.geneval import Rule
from spot_runtime.rewards.jpeg import compressibility
from spot_runtime.rewards.ocr import TextJudge, check_glyphs, target_text
from spot_runtime.rewards.prompts import OBJECTS_REWARD, REWARD_CHARACTERS_MAX, TEXT_REWARD, GenevalRow, reward_of
from spot_runtime.rewards.scorer import Judge, JudgesByName, ShapesJudge
from spot_runtime.rewards.world import PALETTE, SHAPES

GROUP: Final = "spotlight.rewards"
"""Entry points of other packages."""
COCO: Final = f"{OBJECTS_REWARD}-coco"

Environment = Mapping[str, str]
Kind = Literal["objects", "texts", "any"]
"""Which prompt rows a reward can judge."""


def _shapes(rule: Rule, _: Environment) -> Judge:
    return ShapesJudge(rule)


def _glyphs(_: Environment) -> Judge:
    return TextJudge()


def _jpeg(_: Environment) -> Judge:
    return compressibility


EMBEDDED: Final[Mapping[str, Callable[[Environment], Judge]]] = MappingProxyType(
    {
        OBJECTS_REWARD: partial(_shapes, "clamped"),
        f"{OBJECTS_REWARD}-official": partial(_shapes, "official"),
        f"{OBJECTS_REWARD}-soft": partial(_shapes, "soft"),
        TEXT_REWARD: _glyphs,
        "jpeg": _jpeg,
    }
)
"""Every service has these: they need nothing but this package."""


@dataclass(frozen=True)
class Engine:
    """A judge that needs more than this package. `check` raises InputError where it cannot work here, and loads nothing."""

    check: Callable[[Environment], None]
    make: Callable[[Environment], Judge]


def _rapid(_: Environment) -> Judge:
    return TextJudge(RapidReader())


def _vlm(environment: Environment) -> Judge:
    return TextJudge(VlmReader.from_environment(environment))


ENGINES: Final[Mapping[str, Engine]] = MappingProxyType(
    {
        COCO: Engine(check_photographs, partial(load_photographs, "clamped")),
        f"{COCO}-official": Engine(check_photographs, partial(load_photographs, "official")),
        f"{COCO}-soft": Engine(check_photographs, partial(load_photographs, "soft")),
        f"{TEXT_REWARD}-rapidocr": Engine(lambda _: check_rapid(), _rapid),
        f"{TEXT_REWARD}-vlm": Engine(check_vlm, _vlm),
        "clip-score": Engine(check_clip_score, load_clip_score),
        "pickscore": Engine(check_pickscore, load_pickscore),
        "hpsv2": Engine(check_hpsv2, load_hpsv2),
    }
)
"""A service has these where it was asked for them: they load models or call others."""


def kind_of_reward(name: str) -> Kind:
    """Which rows a reward can judge; plug-ins may judge any."""
    if name == OBJECTS_REWARD or name.startswith(f"{OBJECTS_REWARD}-"):
        return "objects"
    return "texts" if name == TEXT_REWARD or name.startswith(f"{TEXT_REWARD}-") else "any"


def check_reward(name: str, environment: Environment = os.environ) -> None:
    """Raises InputError where `name` is no reward here or lacks what it needs; empty is the dataset's own. Loads no model."""
    if len(name) > REWARD_CHARACTERS_MAX:
        raise InputError(f"reward = {name!r}: has {len(name)} characters, must be <= {REWARD_CHARACTERS_MAX}")
    if name in ENGINES:
        ENGINES[name].check(environment)
    elif name and name not in EMBEDDED:
        plug_in(name)


def check_row(row: GenevalRow) -> None:
    """Raises InputError where the row's reward can never judge this row."""
    name = reward_of(row)
    kind = kind_of_reward(name)
    if kind == "objects" and row.tag == "text":
        raise InputError(f"reward = {name!r}: judges objects, not texts")
    if kind == "texts":
        target_text(row)
    if name == TEXT_REWARD:
        check_glyphs(row)
    elif kind == "objects":
        check_coco(row) if name.startswith(COCO) else check_shapes(row)


def check_shapes(row: GenevalRow) -> None:
    """Raises InputError for a class or a colour that the shapes detector never finds."""
    for clause in (*row.include, *row.exclude):
        if clause.class_name not in SHAPES:
            raise InputError(f"class = {clause.class_name!r}: the shapes detector finds only {', '.join(SHAPES)}")
        if clause.color is not None and clause.color not in PALETTE:
            raise InputError(f"color = {clause.color!r}: the shapes detector knows only {', '.join(PALETTE)}")


def load_judges(names: Iterable[str] = (), environment: Environment = os.environ) -> JudgesByName:
    """All embedded judges and those of `names`. Raises InputError for one that is unknown or cannot be loaded."""
    judges = {name: make(environment) for name, make in EMBEDDED.items()}
    judges |= {name: load_judge(name, environment) for name in names if name not in judges}
    return JudgesByName(judges)


def load_judge(name: str, environment: Environment = os.environ) -> Judge:
    """The judge of one name. Raises InputError that says what is missing."""
    if name in EMBEDDED:
        return EMBEDDED[name](environment)
    return ENGINES[name].make(environment) if name in ENGINES else plug_in(name)


def plug_in(name: str) -> Judge:
    """An entry point of GROUP, or MODULE:FUNCTION. Raises InputError for one that is not there or cannot be called."""
    module, colon, function = name.partition(":")
    if colon:
        return _callable(name, lambda: getattr(importlib.import_module(module), function))
    for entry in entry_points(group=GROUP, name=name):
        return _callable(name, entry.load)
    known = [*EMBEDDED, *ENGINES, *sorted(entry.name for entry in entry_points(group=GROUP))]
    raise InputError(f"reward = {name!r}: must be one of {', '.join(known)}, or MODULE:FUNCTION")


def _callable(name: str, load: Callable[[], Judge]) -> Judge:
    try:
        found = load()
    except (Exception, SystemExit) as error:  # another package's import may fail in any way
        raise InputError(f"reward = {name!r}: cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise InputError(f"reward = {name!r}: is a {type(found).__name__}, must be a function of a row and an image")
    if any(is_other(found) for is_other in _ANSWER_LATER):
        raise InputError(f"reward = {name!r}: is async or a generator, must return its verdict")
    if not _takes_two(found):
        raise InputError(f"reward = {name!r}: cannot be called with a row and an image")
    return found


_ANSWER_LATER: Final = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def _takes_two(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a builtin that does not tell what it takes
        return True
    return True
