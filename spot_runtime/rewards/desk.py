"""The bounded queue in front of a scorer. Owns admission, threads and per-item verdicts and errors; never speaks HTTP.

An item is counted from admission until its thread is done with it, also when its request has given up: a scorer that hangs fills the queue
and the desk refuses new work instead of growing.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from PIL import Image as Pillow
from pydantic import Field

from spot_runtime.config import Frozen
from spot_runtime.errors import InputError, SpotlightError
from spot_runtime.rewards.detection import Image
from spot_runtime.rewards.scorer import Scorer, Verdict
from spot_runtime.rewards.wire import ItemAnswer, ScoreItem

REASON_CHARACTERS_MAX = 2000


class ServiceLimits(Frozen):
    """Bounds of one reward service."""

    items_max: int = Field(64, ge=1, le=4096)
    """Items in one request."""
    body_bytes_max: int = Field(64 * 2**20, ge=1024)
    """Bytes of one request's body."""
    body_deadline_s: float = Field(30.0, gt=0)
    """A request's body must have arrived within this."""
    image_bytes_max: int = Field(16 * 2**20, ge=1024)
    """Bytes of one encoded image."""
    image_side_px_max: int = Field(4096, ge=16)
    """Width and height of one image."""
    queued_items_max: int = Field(1024, ge=1)
    """Items accepted and not yet judged; beyond it requests are refused."""
    threads: int = Field(2, ge=1, le=256)
    """Items judged at the same time."""
    score_deadline_s: float = Field(20.0, gt=0)
    """An item that is not judged within this after admission is answered with an error."""
    retry_after_s: int = Field(1, ge=1)
    """What a refused client is told to wait."""


class Desk:
    """Judges batches on its own threads."""

    def __init__(self, scorer: Scorer, limits: ServiceLimits) -> None:
        self._scorer = scorer
        self._limits = limits
        self._threads = ThreadPoolExecutor(limits.threads, thread_name_prefix="score")
        self._lock = threading.Lock()
        self._queued = 0

    @property
    def queued_items(self) -> int:
        return self._queued

    def admit(self, number: int) -> bool:
        """Takes `number` items into the queue if all fit. Each must then be passed to `judge`."""
        with self._lock:
            if self._queued + number > self._limits.queued_items_max:
                return False
            self._queued += number
            return True

    async def judge(self, dataset: str, items: Sequence[ScoreItem]) -> tuple[ItemAnswer, ...]:
        """One answer for each admitted item, in order, within score_deadline_s."""
        give_up_s = time.monotonic() + self._limits.score_deadline_s
        waiting = [self._submit(dataset, item, give_up_s) for item in items]
        await asyncio.wait(waiting, timeout=self._limits.score_deadline_s)
        answers = []
        for item, future in zip(items, waiting, strict=True):
            answers.append(future.result() if future.done() else self._late(item))
            future.cancel()
        return tuple(answers)

    def close(self) -> None:
        """Drops what has not begun; does not wait for what has."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _submit(self, dataset: str, item: ScoreItem, give_up_s: float) -> asyncio.Future[ItemAnswer]:
        future = self._threads.submit(self._answer, dataset, item, give_up_s)
        future.add_done_callback(self._release)
        return asyncio.wrap_future(future)

    def _release(self, _: Future[ItemAnswer]) -> None:
        with self._lock:
            self._queued -= 1

    def _late(self, item: ScoreItem) -> ItemAnswer:
        return ItemAnswer(id=item.id, error=f"not judged within {self._limits.score_deadline_s} s", may_pass=True)

    def _answer(self, dataset: str, item: ScoreItem, give_up_s: float) -> ItemAnswer:
        """Never raises: whatever goes wrong is an error of this item, and no error is a reward."""
        if time.monotonic() >= give_up_s:
            return self._late(item)
        try:
            image = decode_png(item.image_b64, self._limits)
            return _checked(item.id, self._scorer.score(dataset, bytes(item.row), image))
        except SpotlightError as error:
            return ItemAnswer(id=item.id, error=str(error), may_pass=not isinstance(error, InputError))
        except Exception as error:  # noqa: BLE001 - a scorer may fail in any way, and must fail only its own item
            return ItemAnswer(
                id=item.id, error=_brief(f"scorer failed: {type(error).__name__}: {error}"), may_pass=True
            )


def _checked(item_id: str, verdict: Verdict) -> ItemAnswer:
    if not math.isfinite(verdict.reward):
        return ItemAnswer(id=item_id, error=f"scorer failed: reward = {verdict.reward}: must be finite", may_pass=True)
    return ItemAnswer(
        id=item_id, reward=float(verdict.reward), correct=bool(verdict.correct), reason=_brief(verdict.reason)
    )


def _brief(text: str) -> str:
    return text[:REASON_CHARACTERS_MAX]


def decode_png(image_b64: str, limits: ServiceLimits) -> Image:
    """Base64 PNG as H x W x 3 uint8. Raises InputError: not base64, not a whole PNG, or beyond the limits."""
    if len(image_b64) > limits.image_bytes_max * 4 // 3 + 4:
        raise InputError(f"image_b64 of {len(image_b64)} characters: image must be <= {limits.image_bytes_max} bytes")
    try:
        data = base64.b64decode(image_b64, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"image_b64: not base64: {error}") from error
    try:
        with Pillow.open(io.BytesIO(data), formats=("PNG",)) as picture:
            if max(picture.size) > limits.image_side_px_max:
                width, height = picture.size
                raise InputError(f"image of {width} x {height} px: must be <= {limits.image_side_px_max} on each side")
            return np.asarray(picture.convert("RGB"))
    except SpotlightError:
        raise
    except Exception as error:  # Pillow has no common class for broken files
        raise InputError(f"image: not a whole PNG: {type(error).__name__}: {error}") from error
