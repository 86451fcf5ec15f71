"""The HTTP messages of the reward service: JSON, images as base64 PNG. Owns shapes and their field bounds; never does I/O.

    POST /v1/score  {"dataset": "geneval", "items": [{"id": "a", "row": {...}, "image_b64": "..."}]}
    200             {"items": [{"id": "a", "reward": 0.5, "correct": false, "reason": "..."}, {"id": "b", "error": "..."}]}
    4xx, 5xx        {"error": "..."}
    GET /health     {"status": "ok", "datasets": ["geneval"], "queued_items": 0}
    GET /metrics    Prometheus text

Fields are only ever added, with defaults.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from spot_runtime.rewards.prompts import REWARD_CHARACTERS_MAX

SCORE_PATH: Final = "/v1/score"
HEALTH_PATH: Final = "/health"
METRICS_PATH: Final = "/metrics"
ITEMS_MAX: Final = 4096
"""A message with more is none; a service may take fewer."""

Identifier = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class ScoreItem(msgspec.Struct, frozen=True, kw_only=True):
    """One image and the prompt row it is to be judged by."""

    id: Identifier
    row: msgspec.Raw
    image_b64: str


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A batch for one reward, which `dataset` names; ids differ."""

    dataset: Annotated[str, msgspec.Meta(min_length=1, max_length=REWARD_CHARACTERS_MAX)]
    items: Annotated[tuple[ScoreItem, ...], msgspec.Meta(max_length=ITEMS_MAX)]


class ItemAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Either `reward`, `correct` and `reason`, or `error`; `may_pass` says that the same item may succeed if sent again.

    `queued`: nobody has looked at it yet, its turn did not come.
    """

    id: str
    reward: float | None = None
    correct: bool | None = None
    reason: str | None = None
    error: str | None = None
    may_pass: bool = False
    queued: bool = False


class ScoreResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One answer for each item, in the order asked."""

    items: tuple[ItemAnswer, ...]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every status but 200."""

    error: str


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Liveness. `queued_items` counts items accepted and not yet judged."""

    status: str
    datasets: tuple[str, ...]
    queued_items: int
