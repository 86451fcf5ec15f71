"""Which reward judges which row of a run. Owns the defaults that follow from the model, and refusing what cannot work.

Never loads a model and never judges. A model made for at most SHAPES_SIDE_PX_MAX draws the shapes world and its short texts; any other one
draws photographs, whose objects and texts take real detectors and readers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from spot_runtime.errors import InputError, RewardError
from spot_runtime.rewards.catalog import COCO, EMBEDDED, ENGINES, check_reward, check_row, kind_of_reward
from spot_runtime.rewards.client import RewardClient
from spot_runtime.rewards.engines.vlm import URL_VARIABLE
from spot_runtime.rewards.prompts import OBJECTS_REWARD, TEXT_REWARD, GenevalRow, reward_of

SHAPES_SIDE_PX_MAX: Final = 128
"""Default resolution up to which a model is one of the shapes world: at that size no detector of photographs sees anything."""
OFFERED_TIMEOUT_S: Final = 5.0
RAPID: Final = f"{TEXT_REWARD}-rapidocr"
VLM: Final = f"{TEXT_REWARD}-vlm"


def draws_photographs(default_resolution: int) -> bool:
    """Whether a model made for so many pixels a side draws photographs."""
    return default_resolution > SHAPES_SIDE_PX_MAX


def rewarded(
    rows: Sequence[GenevalRow],
    reward: str,
    *,
    photographs: bool,
    here: bool = True,
    source: str = "",
    environment: Mapping[str, str] = os.environ,
) -> tuple[GenevalRow, ...]:
    """Rows that say who judges them: a row's own word first, then `reward` where it can judge the row, then the model's default.

    `source`: the file that the rows are from, for an error in one of them. `here`: the service will run in this environment, so what a
    reward needs is looked for. Raises InputError: a reward that is unknown, lacks what it needs, does not fit the model, or can judge no
    row; or a row that its reward can never judge.
    """
    named = tuple(
        row if row.reward else replace(row, reward=_reward(row, reward, photographs, environment)) for row in rows
    )
    names = {reward_of(row) for row in named}
    if reward and reward not in names:
        raise InputError(f"reward = {reward!r}: judges {kind_of_reward(reward)}, and no prompt asks for any")
    for name in sorted(names):
        _check_world(name, photographs)
        if here:
            check_reward(name, environment)
    for row in named:
        try:
            check_row(row)
        except InputError as error:
            raise InputError(
                f"{f'prompts = {source}: ' if source else ''}prompt = {row.prompt[:80]!r}: {error}"
            ) from error
    return named


def check_offered(rows: Sequence[GenevalRow], service: RewardClient) -> None:
    """Raises InputError for a reward that a given service does not have. One that does not answer may be starting."""
    try:
        offered = service.offered(OFFERED_TIMEOUT_S)
    except RewardError as error:
        raise InputError(f"reward service of the cluster: {error}") from error
    if offered is None:
        return
    for name in sorted({reward_of(row) for row in rows} - offered):
        raise InputError(
            f"reward = {name!r}: the cluster's service at {service.url} judges by {', '.join(sorted(offered))}: "
            f"start it with --reward {name}"
        )


def _reward(row: GenevalRow, reward: str, photographs: bool, environment: Mapping[str, str]) -> str:
    """ "" for what the row's tag says anyway: the row and its id stay as they are."""
    kind = "texts" if row.tag == "text" else "objects"
    if reward and kind_of_reward(reward) in (kind, "any"):
        return "" if reward == reward_of(row) else reward
    if not photographs:
        return ""
    if kind == "objects":
        return COCO
    return VLM if environment.get(URL_VARIABLE) else RAPID


def _check_world(name: str, photographs: bool) -> None:
    """Plug-ins, JPEG and vision-language models judge both worlds."""
    of_shapes = name in EMBEDDED and kind_of_reward(name) != "any"
    of_photographs = name in ENGINES and name != VLM
    if photographs and of_shapes:
        instead = name.replace(OBJECTS_REWARD, COCO) if name.startswith(OBJECTS_REWARD) else f"{RAPID} or {VLM}"
        raise InputError(
            f"reward = {name!r}: judges models made for <= {SHAPES_SIDE_PX_MAX} px, this one draws photographs: take {instead}"
        )
    if of_photographs and not photographs:
        raise InputError(f"reward = {name!r}: judges photographs, this model was made for <= {SHAPES_SIDE_PX_MAX} px")
