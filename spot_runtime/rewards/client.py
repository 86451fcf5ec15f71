"""The client of the reward service. Owns deadlines, retries and what counts as an answer; never scores and never invents a reward."""

from __future__ import annotations

import base64
import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import httpx
import msgspec
from PIL import Image as Pillow

from spot_runtime.errors import RewardError
from spot_runtime.rewards.detection import Image
from spot_runtime.rewards.prompts import reward_of
from spot_runtime.rewards.wire import (
    HEALTH_PATH,
    SCORE_PATH,
    Failure,
    Health,
    ItemAnswer,
    ScoreItem,
    ScoreRequest,
    ScoreResponse,
)

ANSWER_BYTES_MAX: Final = 16 * 2**20
BATCH_BYTES_MAX: Final = 16 * 2**20
"""PNG bytes in one request, so that its body stays well below the service's bound."""
BACK_OFF_FIRST_S: Final = 0.05
BACK_OFF_MAX_S: Final = 5.0
CONNECTIONS_MAX: Final = 16
REWARD_MAX: Final = 1e15
"""A reward further from 0 is an error of its scorer: sums and squares of rewards stay far from the end of floats."""
PNG_COMPRESS_LEVEL: Final = 1
_RETRIED_STATUS: Final = frozenset({408, 500, 502, 503, 504})


@dataclass(frozen=True)
class Item:
    """One image to score. `row_json` is the prompt row, `png` the encoded image (see `encode_png`).

    `dataset` names the reward; empty takes what the row asks for (`prompts.reward_of`).
    """

    id: str
    row_json: str
    png: bytes
    dataset: str = ""

    @property
    def reward(self) -> str:
        return self.dataset or reward_of(self.row_json)


@dataclass(frozen=True)
class Score:
    """A finite reward, the dataset's yes or no, and what is wrong ("" if nothing is)."""

    id: str
    reward: float
    correct: bool
    reason: str


@dataclass(frozen=True)
class ScoreError:
    """This item has no reward, after all retries that made sense."""

    id: str
    error: str


def encode_png(image: Image) -> bytes:
    """PNG of an H x W x 3 uint8 image, compressed quickly rather than well."""
    buffer = io.BytesIO()
    Pillow.fromarray(image).save(buffer, "PNG", compress_level=PNG_COMPRESS_LEVEL)
    return buffer.getvalue()


class _PassingFailure(Exception):
    """The whole request failed in a way that may pass.

    `retry_after_s` is set where the service asked for patience. `counts`: it uses up a try.
    """

    def __init__(self, error: str, retry_after_s: float | None = None, *, counts: bool = True) -> None:
        super().__init__(error)
        self.retry_after_s = retry_after_s
        self.counts = counts and retry_after_s is None


class _Patience:
    """When one call of `score` gives up: `deadline_s` after the last word that the service is busy, `patience_s` after it began."""

    def __init__(self, now_s: float, deadline_s: float, patience_s: float) -> None:
        self._deadline_s = deadline_s
        self._last_s = now_s + max(deadline_s, patience_s)
        self.until_s = now_s + deadline_s

    def heard(self, now_s: float) -> None:
        self.until_s = min(now_s + self._deadline_s, self._last_s)


class RewardClient:
    """Scores images at one service. Safe to share between threads. Close it after use."""

    def __init__(
        self,
        url: str,
        deadline_s: float = 120.0,
        retries: int = 5,
        *,
        patience_s: float = 600.0,
        token: str = "",
        batch_items_max: int = 32,
        request_timeout_s: float = 45.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """One call of `score` ends within `deadline_s`, plus at most one silence of `request_timeout_s`.

        A batch is tried 1 + `retries` times. What is not counted: that nobody answers at the address, which may be a service that starts;
        and a queue that is full or too long, with which the deadline begins anew, for `patience_s` in all.
        """
        assert deadline_s > 0
        assert retries >= 0
        assert batch_items_max >= 1
        assert request_timeout_s > 0
        self.url = url
        self._deadline_s = deadline_s
        self._patience_s = patience_s
        self._retries = retries
        self._batch_items_max = batch_items_max
        self._request_timeout_s = request_timeout_s
        self._clock = clock
        self._sleep = sleep
        limits = httpx.Limits(max_connections=CONNECTIONS_MAX)
        headers = {b"Authorization": f"Bearer {token}".encode()} if token else {}
        self._http = httpx.Client(base_url=url, transport=transport, trust_env=False, limits=limits, headers=headers)

    def close(self) -> None:
        self._http.close()

    def score(self, items: Sequence[Item]) -> list[Score | ScoreError]:
        """One result for each item, in order. Asserts that ids differ.

        Raises RewardError where the service answered for no item at all; if it answered for some, the others are ScoreErrors.
        """
        assert len({item.id for item in items}) == len(items), "item ids must differ"
        patience = _Patience(self._clock(), self._deadline_s, self._patience_s)
        results: dict[str, Score | ScoreError] = {}
        failure: RewardError | None = None
        answered = False
        for batch in self._batches(items):
            try:
                results |= self._score_batch(batch, patience)
                answered = True
            except RewardError as error:
                failure = error
                results |= {item.id: ScoreError(item.id, str(error)) for item in batch}
        if failure is not None and not answered:
            raise failure
        return [results[item.id] for item in items]

    def offered(self, timeout_s: float) -> frozenset[str] | None:
        """Names of the rewards that the service judges by; None where nobody answers, which may be a service that starts.

        Raises RewardError for an answer that is not a reward service's.
        """
        try:
            with self._http.stream("GET", HEALTH_PATH, timeout=timeout_s) as response:
                content = self._content(response, self._clock() + timeout_s)
        except (httpx.TransportError, _PassingFailure):
            return None
        try:
            return frozenset(msgspec.json.decode(content, type=Health).datasets)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RewardError(f"{self.url}: not the answer of a reward service: {error}") from error

    def _batches(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        """Items of one reward together, within both bounds of a batch."""
        by_reward: dict[str, list[Item]] = {}
        for item in items:
            by_reward.setdefault(item.reward, []).append(item)
        for alike in by_reward.values():
            batch: list[Item] = []
            for item in alike:
                batch_bytes = sum(len(other.png) for other in batch) + len(item.png)
                if batch and (len(batch) == self._batch_items_max or batch_bytes > BATCH_BYTES_MAX):
                    yield batch
                    batch = []
                batch.append(item)
            yield batch

    def _score_batch(self, batch: Sequence[Item], patience: _Patience) -> dict[str, Score | ScoreError]:
        """Tries until every item has a score or a lasting error. Raises RewardError if no try was answered."""
        results: dict[str, Score | ScoreError] = {}
        pending, tries, failures = list(batch), 0, 0
        while True:
            error, retry_after_s, counts = "", None, True
            try:
                answers = self._post(pending, patience.until_s)
                results |= {item.id: _result(answers[item.id]) for item in pending}
                pending = [item for item in pending if answers[item.id].may_pass]
                if pending and all(answers[item.id].queued for item in pending):
                    counts, retry_after_s = False, BACK_OFF_FIRST_S
            except _PassingFailure as failure:
                error, retry_after_s, counts = str(failure), failure.retry_after_s, failure.counts
            except RewardError:
                if results:
                    return results  # what was scored stays scored; the rest keeps the error it had
                raise
            if not pending:
                return results
            tries += counts
            failures += retry_after_s is None
            if retry_after_s is not None:
                patience.heard(self._clock())
            wait_s = max(min(BACK_OFF_FIRST_S * 2**failures, BACK_OFF_MAX_S), retry_after_s or 0.0)
            if tries > self._retries or self._clock() + wait_s >= patience.until_s:
                if results:
                    return results  # the last word on what is still pending was an error of its own
                raise RewardError(
                    f"{self.url}: no scores within {self._deadline_s} s and {tries} failed tries: {error}"
                )
            self._sleep(wait_s)

    def _post(self, items: Sequence[Item], until_s: float) -> dict[str, ItemAnswer]:
        """One request. Raises _PassingFailure, or RewardError where trying again cannot help."""
        timeout_s = min(self._request_timeout_s, until_s - self._clock())
        if timeout_s <= 0:
            raise _PassingFailure("deadline reached")
        try:
            with self._http.stream("POST", SCORE_PATH, content=_body(items), timeout=timeout_s) as response:
                content = self._content(response, until_s)
        except httpx.TimeoutException as error:
            raise _PassingFailure(f"no answer within {timeout_s:.1f} s ({type(error).__name__})") from error
        except httpx.ConnectError as error:
            raise _PassingFailure(f"{type(error).__name__}: {error}", counts=False) from error
        except httpx.TransportError as error:
            raise _PassingFailure(f"{type(error).__name__}: {error}") from error
        self._check_status(response, content)
        return self._answers(items, content)

    def _content(self, response: httpx.Response, until_s: float) -> bytes:
        content = bytearray()
        for chunk in response.iter_bytes():
            content += chunk
            if len(content) > ANSWER_BYTES_MAX:
                raise RewardError(f"{self.url}: answer must be <= {ANSWER_BYTES_MAX} bytes")
            if self._clock() >= until_s:
                raise _PassingFailure("answer was not complete at the deadline")
        return bytes(content)

    def _check_status(self, response: httpx.Response, content: bytes) -> None:
        if response.status_code == 200:
            return
        error = f"status {response.status_code}: {_failure_text(content)}"
        if response.status_code == 429:
            raise _PassingFailure(error, _retry_after_s(response))
        if response.status_code in _RETRIED_STATUS:
            raise _PassingFailure(error)
        raise RewardError(f"{self.url}: {error}")

    def _answers(self, items: Sequence[Item], content: bytes) -> dict[str, ItemAnswer]:
        try:
            answers = msgspec.json.decode(content, type=ScoreResponse).items
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RewardError(f"{self.url}: not the answer of a reward service: {error}") from error
        by_id = {answer.id: answer for answer in answers}
        if len(answers) != len(items) or by_id.keys() != {item.id for item in items}:
            raise RewardError(f"{self.url}: {len(answers)} answers do not match {len(items)} items")
        return by_id


def _body(items: Sequence[Item]) -> bytes:
    wire_items = tuple(
        ScoreItem(id=item.id, row=msgspec.Raw(item.row_json.encode()), image_b64=base64.b64encode(item.png).decode())
        for item in items
    )
    return msgspec.json.encode(ScoreRequest(dataset=items[0].reward, items=wire_items))


def _result(answer: ItemAnswer) -> Score | ScoreError:
    if answer.error is not None:
        return ScoreError(answer.id, answer.error)
    if answer.reward is None or answer.correct is None or not abs(answer.reward) <= REWARD_MAX:
        what = f"{answer.reward}, correct: {answer.correct}"
        return ScoreError(answer.id, f"answer without a finite reward within {REWARD_MAX:g} of 0: {what}")
    return Score(answer.id, answer.reward, answer.correct, answer.reason or "")


def _retry_after_s(response: httpx.Response) -> float:
    """Seconds to wait; dates and nonsense count as the first back-off."""
    try:
        wait_s = float(response.headers.get("Retry-After", ""))
    except ValueError:
        return BACK_OFF_FIRST_S
    return wait_s if 0 <= wait_s < math.inf else BACK_OFF_FIRST_S


def _failure_text(content: bytes) -> str:
    try:
        return msgspec.json.decode(content, type=Failure).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return repr(content[:200])
