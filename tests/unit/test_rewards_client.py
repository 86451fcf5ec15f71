"""The reward client against scripted answers, on a clock of its own: retries, deadlines, and never an invented reward."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image as Pillow

from spot_runtime.errors import RewardError
from spot_runtime.rewards.client import BACK_OFF_MAX_S, Item, RewardClient, Score, ScoreError, encode_png

Reply = Callable[[dict[str, Any]], httpx.Response]


class Script:
    """Plays replies one after the other, the last one for ever; time passes only while the client sleeps."""

    def __init__(self, *replies: Reply | Exception) -> None:
        self.replies = list(replies)
        self.requests: list[dict[str, Any]] = []
        self.sleeps: list[float] = []
        self.now_s = 0.0

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(json.loads(request.content))
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply(self.requests[-1])

    def sleep(self, wait_s: float) -> None:
        self.sleeps.append(wait_s)
        self.now_s += wait_s

    def client(self, **options: Any) -> RewardClient:
        return RewardClient(
            "http://rewards",
            **options,
            clock=lambda: self.now_s,
            sleep=self.sleep,
            transport=httpx.MockTransport(self.handle),
        )


def answered(request: dict[str, Any], **fields: Any) -> httpx.Response:
    answer = {"reward": 0.5, "correct": False, "reason": "r"} | fields
    return httpx.Response(200, json={"items": [{"id": item["id"], **answer} for item in request["items"]]})


def status(code: int, headers: dict[str, str] | None = None) -> Reply:
    return lambda _: httpx.Response(code, json={"error": "told so"}, headers=headers)


def body(content: bytes) -> Reply:
    return lambda _: httpx.Response(200, content=content)


def item(name: str, dataset: str = "geneval") -> Item:
    return Item(id=name, row_json='{"tag": "colors"}', png=b"png of " + name.encode(), dataset=dataset)


def test_items_go_out_with_row_and_image_and_scores_come_back_in_order() -> None:
    def reversed_answers(request: dict[str, Any]) -> httpx.Response:
        items = [
            {"id": "b", "reward": 1, "correct": True, "reason": ""},
            {"id": "a", "reward": 0.25, "correct": False, "reason": "few"},
        ]
        return httpx.Response(200, json={"items": items})

    script = Script(reversed_answers)
    assert script.client().score([item("a"), item("b")]) == [Score("a", 0.25, False, "few"), Score("b", 1.0, True, "")]
    (request,) = script.requests
    assert request["dataset"] == "geneval"
    assert request["items"][0]["row"] == {"tag": "colors"}
    assert base64.b64decode(request["items"][1]["image_b64"]) == b"png of b"


def test_no_items_make_no_request() -> None:
    script = Script(answered)
    assert script.client().score([]) == []
    assert script.requests == []


def test_batches_are_bounded_and_of_one_dataset() -> None:
    script = Script(answered)
    items = [item(str(index), "geneval" if index % 2 else "deepseek_ocr") for index in range(10)]
    scores = script.client(batch_items_max=3).score(items)
    assert [score.id for score in scores] == [str(index) for index in range(10)]
    sent = [(request["dataset"], [i["id"] for i in request["items"]]) for request in script.requests]
    assert sent == [
        ("deepseek_ocr", ["0", "2", "4"]),
        ("deepseek_ocr", ["6", "8"]),
        ("geneval", ["1", "3", "5"]),
        ("geneval", ["7", "9"]),
    ]


def test_large_images_are_sent_in_smaller_batches() -> None:
    script = Script(answered)
    large = [Item(id=str(index), row_json="{}", png=bytes(7 * 2**20)) for index in range(5)]
    assert len(script.client().score(large)) == 5
    assert [len(request["items"]) for request in script.requests] == [2, 2, 1]


@pytest.mark.parametrize(
    "failure", [httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), status(503), status(500), status(408)]
)
def test_a_failure_that_may_pass_is_retried_with_growing_waits(failure: Reply | Exception) -> None:
    script = Script(failure, failure, answered)
    assert script.client().score([item("a")]) == [Score("a", 0.5, False, "r")]
    assert script.sleeps == pytest.approx([0.1, 0.2])


def test_retries_are_bounded_and_end_in_a_reward_error() -> None:
    script = Script(httpx.ReadError("reset"))
    with pytest.raises(RewardError, match=r"http://rewards: no scores within 120.0 s and 4 failed tries: ReadError"):
        script.client(retries=3).score([item("a")])
    assert len(script.requests) == 4
    assert max(script.sleeps) <= BACK_OFF_MAX_S


def test_the_deadline_ends_retries_however_many_are_left() -> None:
    script = Script(status(503))
    with pytest.raises(RewardError, match="status 503: told so"):
        script.client(deadline_s=3.0, retries=1000).score([item("a")])
    assert script.now_s <= 3.0
    assert len(script.requests) <= 6


def test_a_full_queue_is_waited_for_as_told_without_using_up_retries() -> None:
    script = Script(*[status(429, {"Retry-After": "2"})] * 10, answered)
    assert script.client(retries=0).score([item("a")]) == [Score("a", 0.5, False, "r")]
    assert script.sleeps == [2.0] * 10


@pytest.mark.parametrize("header", ["Wed, 21 Oct 2026 07:28:00 GMT", "nan", "-1", ""])
def test_a_retry_after_that_is_no_number_falls_back_to_a_short_wait(header: str) -> None:
    script = Script(status(429, {"Retry-After": header}), answered)
    script.client().score([item("a")])
    assert script.sleeps == pytest.approx([0.05])


def test_a_queue_that_stays_full_ends_at_the_deadline() -> None:
    script = Script(status(429, {"Retry-After": "2"}))
    with pytest.raises(RewardError, match="status 429"):
        script.client(deadline_s=9.0, patience_s=9.0).score([item("a")])
    assert script.now_s <= 9.0


def test_a_service_that_is_busy_is_waited_for_beyond_the_deadline_as_long_as_patience_lasts() -> None:
    script = Script(*[status(429, {"Retry-After": "5"})] * 20, answered)
    assert script.client(deadline_s=9.0).score([item("a")]) == [Score("a", 0.5, False, "r")]
    assert script.now_s == 100.0
    script = Script(status(429, {"Retry-After": "5"}))
    with pytest.raises(RewardError, match="status 429"):
        script.client(deadline_s=9.0, patience_s=60.0).score([item("a")])
    assert 50.0 <= script.now_s <= 60.0


def test_an_item_whose_turn_did_not_come_is_sent_again_without_using_up_retries() -> None:
    def long_queue(request: dict[str, Any]) -> httpx.Response:
        return answered(request, error="not begun within 15 s", may_pass=True, queued=True)

    script = Script(*[long_queue] * 10, answered)
    assert script.client(retries=0).score([item("a")]) == [Score("a", 0.5, False, "r")]
    script = Script(long_queue)
    assert script.client(patience_s=2.0, deadline_s=2.0).score([item("a")]) == [
        ScoreError("a", "not begun within 15 s")
    ]


def test_a_service_that_is_not_there_is_waited_for_until_the_deadline_with_growing_waits() -> None:
    script = Script(*[httpx.ConnectError("refused")] * 20, answered)
    assert script.client(retries=0).score([item("a")]) == [Score("a", 0.5, False, "r")]
    assert script.sleeps[:3] == pytest.approx([0.1, 0.2, 0.4])
    assert script.sleeps[-1] == BACK_OFF_MAX_S
    script = Script(httpx.ConnectError("refused"))
    with pytest.raises(RewardError, match=r"no scores within 120\.0 s and 0 failed tries: ConnectError"):
        script.client().score([item("a")])
    assert 110.0 <= script.now_s <= 120.0


@pytest.mark.parametrize("code", [400, 401, 404, 413, 422, 301])
def test_a_refusal_that_cannot_pass_is_not_retried(code: int) -> None:
    script = Script(status(code))
    with pytest.raises(RewardError, match=f"status {code}: told so"):
        script.client().score([item("a")])
    assert len(script.requests) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"<html>",
        b'{"items": [{"id": "a", "reward": NaN, "correct": true}]}',
        b'{"items": []}',
        b'{"items": [{"id": "b", "reward": 1, "correct": true}]}',
        b'{"items": [{"id": "a", "reward": 1, "correct": true}, {"id": "a", "reward": 0, "correct": false}]}',
        b'{"items": [{"id": "a", "reward": "high", "correct": true}]}',
        b"\xff\xfe",
    ],
)
def test_what_is_not_an_answer_is_a_reward_error(content: bytes) -> None:
    with pytest.raises(RewardError, match="http://rewards"):
        Script(body(content)).client().score([item("a")])


@pytest.mark.parametrize(
    "fields", [{}, {"reward": None, "correct": True}, {"reward": 1.0}, {"reward": -1e200, "correct": False}]
)
def test_an_answer_without_a_reward_is_an_error_of_the_item(fields: dict[str, Any]) -> None:
    content = json.dumps({"items": [{"id": "a", **fields}]}).encode()
    (result,) = Script(body(content)).client().score([item("a")])
    assert isinstance(result, ScoreError)
    assert "without a finite reward" in result.error


def test_an_error_of_one_item_is_no_reward_and_leaves_the_others_alone() -> None:
    def one_broken(request: dict[str, Any]) -> httpx.Response:
        items = [{"id": "a", "error": "not a PNG"}, {"id": "b", "reward": 1, "correct": True, "reason": ""}]
        return httpx.Response(200, json={"items": items})

    script = Script(one_broken)
    assert script.client().score([item("a"), item("b")]) == [ScoreError("a", "not a PNG"), Score("b", 1.0, True, "")]
    assert len(script.requests) == 1


def test_only_items_whose_error_may_pass_are_sent_again() -> None:
    def busy(request: dict[str, Any]) -> httpx.Response:
        items = [
            {"id": "a", "error": "scorer failed", "may_pass": True},
            {"id": "b", "reward": 1, "correct": True, "reason": ""},
            {"id": "c", "error": "not a PNG"},
        ]
        return httpx.Response(200, json={"items": items})

    script = Script(busy, answered)
    results = script.client().score([item("a"), item("b"), item("c")])
    assert results == [Score("a", 0.5, False, "r"), Score("b", 1.0, True, ""), ScoreError("c", "not a PNG")]
    assert [i["id"] for i in script.requests[1]["items"]] == ["a"]


def test_an_item_that_keeps_failing_ends_as_its_own_error() -> None:
    script = Script(lambda request: answered(request, error="scorer failed", may_pass=True))
    assert script.client(retries=2).score([item("a")]) == [ScoreError("a", "scorer failed")]
    assert len(script.requests) == 3


def test_scores_that_came_are_kept_when_the_service_dies_between_batches() -> None:
    script = Script(answered, httpx.ConnectError("refused"))
    first, second = script.client(batch_items_max=1, retries=1).score([item("a"), item("b")])
    assert first == Score("a", 0.5, False, "r")
    assert isinstance(second, ScoreError)
    assert "ConnectError" in second.error


def test_scores_that_came_are_kept_when_the_rest_is_refused_for_good() -> None:
    def half(request: dict[str, Any]) -> httpx.Response:
        first, second = request["items"]
        scored = {"id": first["id"], "reward": 1.0, "correct": True, "reason": ""}
        return httpx.Response(200, json={"items": [scored, {"id": second["id"], "error": "late", "may_pass": True}]})

    assert Script(half, status(413)).client().score([item("a"), item("b")]) == [
        Score("a", 1.0, True, ""),
        ScoreError("b", "late"),
    ]


def test_an_answer_beyond_the_bound_is_refused() -> None:
    with pytest.raises(RewardError, match="answer must be <="):
        Script(body(bytes(17 * 2**20))).client().score([item("a")])


def test_images_are_encoded_without_loss() -> None:
    image = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    with Pillow.open(io.BytesIO(encode_png(image))) as picture:
        assert picture.format == "PNG"
        assert np.array_equal(np.asarray(picture), image)


def test_repeated_ids_are_a_programmers_error() -> None:
    with pytest.raises(AssertionError, match="ids must differ"):
        Script(answered).client().score([item("a"), item("a")])
