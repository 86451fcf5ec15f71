"""The bounded queue in front of a scorer. Owns admission, threads and per-item verdicts and errors; never speaks HTTP.

An item is counted from admission until its thread is done with it, also when its request has given up: a scorer that hangs keeps its
threads, and what waits behind it is handed back as not begun. Waiting is no failure: whoever asked may ask again.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import math
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from PIL import Image as Pillow
from pydantic import Field

from spot_runtime.config import Frozen
from spot_runtime.errors import InputError, SpotlightError
from spot_runtime.rewards.detection import Image
from spot_runtime.rewards.scorer import Scorer, Verdict
from spot_runtime.rewards.wire import ITEMS_MAX, ItemAnswer, ScoreItem

REASON_CHARACTERS_MAX = 2000
MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA"})
"""Pillow's names of what becomes RGB without losing what is seen; it clips deeper channels."""


class ServiceLimits(Frozen):
    """Bounds of one reward service."""

    items_max: int = Field(64, ge=1, le=ITEMS_MAX)
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
    queued_bytes_max: int = Field(2**30, ge=1024)
    """Encoded images of these items; a request that comes alone may be larger."""
    threads: int = Field(2, ge=1, le=256)
    """Items judged at the same time."""
    begin_deadline_s: float = Field(15.0, gt=0)
    """An item whose turn has not come within this after admission is handed back."""
    score_deadline_s: float = Field(20.0, gt=0)
    """An item that is not judged within this after its turn came is answered with an error."""
    retry_after_s: int = Field(1, ge=1)
    """What a refused client is told to wait."""


@dataclass(eq=False, frozen=True)
class _Ticket:
    """One item on its way through the desk."""

    dataset: str
    item: ScoreItem
    begun: Future[None] = field(default_factory=Future)
    answer: Future[ItemAnswer] = field(default_factory=Future)

    @property
    def size_bytes(self) -> int:
        return len(self.item.image_b64)


class Desk:
    """Judges batches on its own threads, first come, first served."""

    def __init__(self, scorer: Scorer, limits: ServiceLimits) -> None:
        self._scorer = scorer
        self._limits = limits
        self._changed = threading.Condition()
        self._waiting: deque[_Ticket] = deque()
        self._queued = 0
        self._queued_bytes = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    @property
    def queued_items(self) -> int:
        return self._queued

    def admit(self, items: Sequence[ScoreItem]) -> str:
        """Takes items into the queue if all fit, and says what is full where they do not. Each must then be passed to `judge`."""
        size_bytes = sum(len(item.image_b64) for item in items)
        with self._changed:
            if self._queued + len(items) > self._limits.queued_items_max:
                return f"{self._queued} of {self._limits.queued_items_max} items"
            if self._queued and self._queued_bytes + size_bytes > self._limits.queued_bytes_max:
                return f"{self._queued_bytes} of {self._limits.queued_bytes_max} bytes"
            self._queued += len(items)
            self._queued_bytes += size_bytes
            return ""

    def _let_go(self, ticket: _Ticket) -> None:
        self._queued -= 1
        self._queued_bytes -= ticket.size_bytes

    async def judge(self, dataset: str, items: Sequence[ScoreItem]) -> tuple[ItemAnswer, ...]:
        """One answer for each admitted item, in order, within begin_deadline_s + score_deadline_s."""
        tickets = [_Ticket(dataset, item) for item in items]
        with self._changed:
            self._start_threads()
            self._waiting.extend(tickets)
            self._changed.notify_all()
        return tuple(await asyncio.gather(*map(self._settle, tickets)))

    def close(self) -> None:
        """Drops what has not begun; does not wait for what has."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    async def _settle(self, ticket: _Ticket) -> ItemAnswer:
        """Its answer, or what kept it from having one: its turn did not come, or its judge is late."""
        begun, answer = asyncio.wrap_future(ticket.begun), asyncio.wrap_future(ticket.answer)
        await asyncio.wait([begun], timeout=self._limits.begin_deadline_s)
        if not begun.done() and self._withdraw(ticket):
            error = f"not begun within {self._limits.begin_deadline_s:g} s: the queue is long"
            return ItemAnswer(id=ticket.item.id, error=error, may_pass=True, queued=True)
        await asyncio.wait([answer], timeout=self._limits.score_deadline_s)
        if answer.done():
            return answer.result()
        answer.cancel()
        error = f"not judged within {self._limits.score_deadline_s:g} s"
        return ItemAnswer(id=ticket.item.id, error=error, may_pass=True)

    def _withdraw(self, ticket: _Ticket) -> bool:
        """Takes back what no thread has begun, so that a scorer that hangs holds no images but those in its hands."""
        with self._changed:
            if ticket not in self._waiting:
                return False
            self._waiting.remove(ticket)
            self._let_go(ticket)
            return True

    def _start_threads(self) -> None:
        while len(self._threads) < self._limits.threads:
            thread = threading.Thread(target=self._work, name=f"score-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while (ticket := self._next()) is not None:
            ticket.answer.set_running_or_notify_cancel()
            ticket.begun.set_result(None)
            answer = self._answer(ticket)
            with self._changed:
                self._let_go(ticket)
            ticket.answer.set_result(answer)

    def _next(self) -> _Ticket | None:
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            return self._waiting.popleft()

    def _answer(self, ticket: _Ticket) -> ItemAnswer:
        """Never raises: whatever goes wrong is an error of this item, and no error is a reward."""
        item = ticket.item
        try:
            image = decode_png(item.image_b64, self._limits)
            return _checked(item.id, self._scorer.score(ticket.dataset, bytes(item.row), image))
        except SpotlightError as error:
            return ItemAnswer(id=item.id, error=_told(error), may_pass=not isinstance(error, InputError))
        except BaseException as error:  # noqa: BLE001 - a scorer may fail in any way, and must fail only its own item
            return ItemAnswer(
                id=item.id, error=_brief(f"scorer failed: {type(error).__name__}: {_told(error)}"), may_pass=True
            )


def _checked(item_id: str, verdict: Verdict) -> ItemAnswer:
    if not math.isfinite(verdict.reward):
        return ItemAnswer(id=item_id, error=f"scorer failed: reward = {verdict.reward}: must be finite", may_pass=True)
    if not isinstance(verdict.reason, str):
        raise TypeError(f"reason is a {type(verdict.reason).__name__}, must be text")
    return ItemAnswer(
        id=item_id, reward=float(verdict.reward), correct=bool(verdict.correct), reason=_brief(verdict.reason)
    )


def _told(error: BaseException) -> str:
    try:
        return _brief(str(error))
    except BaseException as other:  # noqa: BLE001 - the text of a stranger's error may fail as well
        return f"its text cannot be read: {type(other).__name__}"


def _brief(text: str) -> str:
    """So much that an answer stays small, and nothing that JSON cannot hold."""
    return text[:REASON_CHARACTERS_MAX].encode("utf-8", "replace").decode()


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
            if picture.mode not in MODES:
                raise InputError(f"image of mode {picture.mode}: must have 8 bits a channel")
            return np.array(picture.convert("RGB"))  # a copy: a judge may write into it
    except SpotlightError:
        raise
    except Exception as error:  # Pillow has no common class for broken files
        raise InputError(f"image: not a whole PNG: {type(error).__name__}: {error}") from error
