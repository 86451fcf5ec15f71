"""The reward service on a real socket: scores, per-item errors, bounds, back-pressure, and clients that misbehave."""

from __future__ import annotations

import base64
import io
import json
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from msgspec.structs import replace
from PIL import Image as Pillow

from spot_runtime.errors import InputError, RewardError, UnreachableError
from spot_runtime.rewards.client import Item, RewardClient, Score, ScoreError, encode_png
from spot_runtime.rewards.desk import ServiceLimits
from spot_runtime.rewards.detection import Image
from spot_runtime.rewards.glyphs import text_mask
from spot_runtime.rewards.prompts import parse_row, row_json
from spot_runtime.rewards.scorer import Scorer, ShapesJudge, Verdict
from spot_runtime.rewards.service import create_app
from spot_runtime.rewards.world import BACKGROUND, PALETTE

RED_SQUARE = (
    '{"tag":"colors","include":[{"class":"square","count":1,"color":"red"}],"prompt":"a photo of a red square"}'
)
EMBEDDED = ["geneval", "geneval-official", "geneval-soft", "deepseek_ocr", "jpeg"]
START_DEADLINE_S = 20.0


@contextmanager
def serving(scorer: Scorer | None = None, limits: ServiceLimits | None = None, token: str = "") -> Iterator[str]:
    """A service in a thread on a free loopback port; yields its URL."""
    app = create_app(scorer, limits, token)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each answer waits 40 ms for an ACK
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        until_s = time.monotonic() + START_DEADLINE_S
        while not server.started and time.monotonic() < until_s:
            time.sleep(0.01)
        assert server.started
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(START_DEADLINE_S)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as url:
        yield url


def square(color: str, x: int = 20, y: int = 20) -> Image:
    image = np.full((64, 64, 3), BACKGROUND, np.uint8)
    image[y : y + 20, x : x + 20] = PALETTE[color]
    return image


def item(name: str, image: Image, row: str = RED_SQUARE) -> Item:
    return Item(id=name, row_json=row, png=encode_png(image))


def wire_item(name: str, png: bytes, row: Any = None) -> dict[str, Any]:
    return {"id": name, "row": row or json.loads(RED_SQUARE), "image_b64": base64.b64encode(png).decode()}


def post(url: str, *items: dict[str, Any], dataset: str = "geneval") -> httpx.Response:
    return httpx.post(f"{url}/v1/score", json={"dataset": dataset, "items": items}, timeout=30)


def score_once(url: str, *items: Item, **options: Any) -> list[Score | ScoreError]:
    client = RewardClient(url, **options)
    try:
        return client.score(items)
    finally:
        client.close()


@dataclass
class Scripted:
    """A scorer that pops its next act: a verdict to give, an exception to raise, or an event to wait for first."""

    acts: list[Verdict | Exception | threading.Event]
    datasets: tuple[str, ...] = ("geneval", "deepseek_ocr")
    lock: threading.Lock = field(default_factory=threading.Lock)

    def score(self, dataset: str, row_json: bytes, image: Image) -> Verdict:
        with self.lock:
            act = self.acts.pop(0) if len(self.acts) > 1 else self.acts[0]
        if isinstance(act, Exception):
            raise act
        if isinstance(act, threading.Event):
            assert act.wait(30)
            return Verdict(0.0, False, "waited")
        return act


GOOD = Verdict(1.0, True, "")


def test_right_and_wrong_images_are_scored_end_to_end(url: str) -> None:
    circle_row = row_json(parse_row(RED_SQUARE.replace("square", "circle")))
    results = score_once(
        url, item("right", square("red")), item("colour", square("blue")), item("shape", square("red"), circle_row)
    )
    assert results == [
        Score("right", 1.0, True, ""),
        Score("colour", 0.25, False, "expected 1 red square, found blue"),
        Score("shape", 0.125, False, "expected circle >= 1, found 0"),
    ]


def test_health_names_the_datasets(url: str) -> None:
    answer = httpx.get(f"{url}/health")
    assert answer.status_code == 200
    assert answer.json() == {"status": "ok", "datasets": EMBEDDED, "queued_items": 0}


def test_each_broken_item_is_its_own_error_and_never_a_reward(url: str) -> None:
    png = encode_png(square("red"))
    tiny = encode_png(np.zeros((4, 4, 3), np.uint8))
    jpeg = io.BytesIO()
    Pillow.fromarray(square("red")).save(jpeg, "JPEG")
    text_row = {"tag": "text", "include": [], "prompt": 'the text "A"'}
    answer = post(
        url,
        wire_item("good", png),
        wire_item("torn", png[: len(png) // 2]),
        wire_item("nothing", b""),
        wire_item("jpeg", jpeg.getvalue()),
        wire_item("garbage", b"\x89PNG\r\n\x1a\n" + bytes(100)),
        wire_item("tiny", tiny),
        {"id": "base64", "row": json.loads(RED_SQUARE), "image_b64": "***"},
        wire_item("row", png, {"tag": "colors", "include": []}),
        wire_item("text", png, text_row),
        wire_item("list", png, [1]),
    )
    assert answer.status_code == 200
    good, *broken = answer.json()["items"]
    assert good == {"id": "good", "reward": 1.0, "correct": True, "reason": ""}
    assert all(set(entry) == {"id", "error"} for entry in broken)
    errors = {entry["id"]: entry["error"] for entry in broken}
    assert list(errors) == ["torn", "nothing", "jpeg", "garbage", "tiny", "base64", "row", "text", "list"]
    assert all(errors[name].startswith("image: not a whole PNG") for name in ("torn", "nothing", "jpeg", "garbage"))
    assert errors["tiny"] == "image of 4 x 4 px: must be 16 to 1024 on each side"
    assert "not base64" in errors["base64"]
    assert "not a GenEval row" in errors["row"]
    assert "geneval judges objects, not texts" in errors["text"]


def test_texts_and_objects_are_judged_in_one_call_by_what_their_rows_ask_for(url: str) -> None:
    text = np.where(text_mask("AB", 64)[..., None], np.uint8(20), np.uint8(237)).repeat(3, 2)
    text_row = '{"tag":"text","include":[],"prompt":"a photo of the text \\"AB\\""}'
    jpeg_row = RED_SQUARE.replace('"prompt"', '"reward":"jpeg","prompt"')
    official_row = RED_SQUARE.replace('"prompt"', '"reward":"geneval-official","prompt"')
    results = score_once(
        url,
        item("object", square("red")),
        item("text", text, text_row),
        item("jpeg", square("red"), jpeg_row),
        item("misread", square("red"), text_row),
        item("official", square("blue"), official_row),
    )
    assert [result.id for result in results] == ["object", "text", "jpeg", "misread", "official"]
    rewards = [result.reward for result in results if isinstance(result, Score)]
    assert (rewards[:2], rewards[3:]) == ([1.0, 1.0], [0.0, 0.0])
    assert 0.8 < rewards[2] < 1


def test_a_reward_that_the_service_does_not_have_is_an_error_and_another_item_keeps_its_score(url: str) -> None:
    missing, good = score_once(
        url,
        item("a", square("red"), RED_SQUARE.replace('"prompt"', '"reward":"faces","prompt"')),
        item("b", square("red")),
    )
    assert isinstance(missing, ScoreError)
    assert "dataset = 'faces': must be one of geneval, " in missing.error
    assert good == Score("b", 1.0, True, "")


def test_images_beyond_the_limits_are_errors_before_they_are_decoded() -> None:
    limits = ServiceLimits(image_bytes_max=20_000, image_side_px_max=256)
    noise = np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    with serving(limits=limits) as url:
        wide, heavy = post(
            url, wire_item("wide", encode_png(np.zeros((16, 300, 3), np.uint8))), wire_item("heavy", encode_png(noise))
        ).json()["items"]
    assert wide == {"id": "wide", "error": "image of 300 x 16 px: must be <= 256 on each side"}
    assert "image must be <= 20000 bytes" in heavy["error"]


def test_a_picture_with_transparency_or_a_palette_is_read_as_rgb(url: str) -> None:
    for mode in ("RGBA", "P", "L"):
        buffer = io.BytesIO()
        Pillow.fromarray(square("black")).convert(mode).save(buffer, "PNG")
        row = json.loads(RED_SQUARE.replace("red", "black"))
        assert post(url, wire_item("a", buffer.getvalue(), row)).json()["items"][0]["correct"] is True


@pytest.mark.parametrize(
    ("content", "status", "error"),
    [
        (b"", 400, "body: "),
        (b"{", 400, "body: "),
        (b"[]", 400, "Expected `object`"),
        (b'{"dataset": "geneval"}', 400, "missing required field `items`"),
        (b'{"dataset": "geneval", "items": [{"id": 1}]}', 400, "Expected `str`"),
        (b'{"dataset": "geneval", "items": []}', 422, "items: must have at least 1"),
        (b'{"dataset": "faces", "items": []}', 422, "dataset = 'faces': must be one of geneval, "),
        (b"\xff\xfe\x00", 400, "body: "),
        (b"[" * 200_000, 400, "body: "),
        (b'{"dataset": "geneval", "items": [{"id": "a", "row": ' + b"[" * 200_000, 400, "body: "),
    ],
)
def test_a_malformed_body_is_refused_with_one_line(url: str, content: bytes, status: int, error: str) -> None:
    answer = httpx.post(f"{url}/v1/score", content=content)
    assert answer.status_code == status
    assert error in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


def test_repeated_ids_and_oversized_batches_are_refused(url: str) -> None:
    png = encode_png(square("red"))
    repeated = post(url, wire_item("a", png), wire_item("a", png))
    assert (repeated.status_code, repeated.json()["error"]) == (422, "items: ids must differ")
    many = post(url, *(wire_item(str(index), png) for index in range(65)))
    assert (many.status_code, many.json()["error"]) == (413, "items: has 65, must be <= 64")


def test_a_body_beyond_the_bound_is_cut_off_whatever_its_length_claims() -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield bytes(1024)

    with serving(limits=ServiceLimits(body_bytes_max=10_000)) as url:
        assert httpx.post(f"{url}/v1/score", content=bytes(20_000)).status_code == 413
        with pytest.raises(httpx.HTTPError):
            httpx.post(f"{url}/v1/score", content=endless()).raise_for_status()
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_body_that_trickles_is_given_up() -> None:
    with serving(limits=ServiceLimits(body_deadline_s=0.3)) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as peer:
            peer.sendall(b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert peer.recv(64).startswith(b"HTTP/1.1 408")


def test_malformed_requests_by_the_hundred_leave_the_service_up(url: str) -> None:
    rng = random.Random(0)
    good = json.dumps({"dataset": "geneval", "items": [wire_item("a", encode_png(square("red")))]}).encode()
    with httpx.Client(base_url=url) as client:
        for _ in range(300):
            content = bytearray(good)
            for _ in range(rng.randint(1, 20)):
                content[rng.randrange(len(content))] = rng.randrange(256)
            answer = client.post("/v1/score", content=bytes(content[: rng.randint(1, len(content))]))
            assert answer.status_code in (200, 400, 422)
        assert client.post("/v1/score", content=good).json()["items"][0]["correct"] is True
        assert client.get("/health").json()["queued_items"] == 0


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_never_leaves_the_service(reward: float) -> None:
    with serving(Scripted([Verdict(reward, True, "")])) as url:
        (answer,) = post(url, wire_item("a", encode_png(square("red")))).json()["items"]
        assert answer == {"id": "a", "error": f"scorer failed: reward = {reward}: must be finite", "may_pass": True}
        (result,) = score_once(url, item("a", square("red")), retries=1)
        assert isinstance(result, ScoreError)


def test_a_scorer_failure_is_retried_and_then_scored() -> None:
    with serving(Scripted([RuntimeError("out of memory"), UnreachableError("judge is away"), GOOD])) as url:
        assert score_once(url, item("a", square("red"))) == [Score("a", 1.0, True, "")]


def test_a_scorer_that_always_fails_ends_as_an_error_of_the_item() -> None:
    with serving(Scripted([RuntimeError("out of memory")])) as url:
        (result,) = score_once(url, item("a", square("red")), retries=2)
        assert result == ScoreError("a", "scorer failed: RuntimeError: out of memory")


def test_a_full_queue_says_429_and_the_client_gets_through_later() -> None:
    gate = threading.Event()
    limits = ServiceLimits(queued_items_max=2, threads=1)
    with serving(Scripted([gate, gate, GOOD]), limits) as url, ThreadPoolExecutor() as pool:
        first = pool.submit(score_once, url, item("a", square("red")), item("b", square("red")))
        wait_for_queue(url, 2)
        refused = post(url, wire_item("c", encode_png(square("red"))))
        assert refused.status_code == 429
        assert refused.headers["Retry-After"] == "1"
        assert refused.json() == {"error": "queue is full: 2 of 2 items"}
        second = pool.submit(score_once, url, item("c", square("red")), retries=0)
        time.sleep(0.1)
        gate.set()
        assert [result.id for result in first.result(20)] == ["a", "b"]
        assert second.result(20) == [Score("c", 1.0, True, "")]
        assert httpx.get(f"{url}/health").json()["queued_items"] == 0


def test_a_scorer_that_hangs_costs_its_item_a_deadline_and_fills_the_queue() -> None:
    gate = threading.Event()
    limits = ServiceLimits(begin_deadline_s=3.0, score_deadline_s=0.3, queued_items_max=2, threads=1)
    with serving(Scripted([gate, GOOD]), limits) as url:
        png = encode_png(square("red"))
        stuck, late = post(url, wire_item("a", png), wire_item("b", png)).json()["items"]
        assert stuck == {"id": "a", "error": "not judged within 0.3 s", "may_pass": True}
        error = "not begun within 3 s: the queue is long"
        assert late == {"id": "b", "error": error, "may_pass": True, "queued": True}
        assert httpx.get(f"{url}/health").json()["queued_items"] == 1
        gate.set()
        wait_for_queue(url, 0)
        assert post(url, wire_item("c", png)).json()["items"][0]["reward"] == 1.0


def wait_for_queue(url: str, number: int) -> None:
    until_s = time.monotonic() + 10
    while httpx.get(f"{url}/health").json()["queued_items"] != number:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_nobody_at_the_address_is_a_reward_error_within_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    started_s = time.monotonic()
    with pytest.raises(RewardError, match=f"{address}: no scores within 2.0 s"):
        score_once(address, item("a", square("red")), deadline_s=2.0)
    assert time.monotonic() - started_s < 4


def test_a_server_that_accepts_and_says_nothing_is_left_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        started_s = time.monotonic()
        with pytest.raises(RewardError, match="no answer within"):
            score_once(address, item("a", square("red")), deadline_s=1.0)
        assert time.monotonic() - started_s < 4


def test_one_client_serves_many_threads(url: str) -> None:
    client = RewardClient(url, batch_items_max=4)
    colors = list(PALETTE)
    with ThreadPoolExecutor(8) as pool:
        calls = [
            pool.submit(client.score, [item(f"{call}/{color}", square(color)) for color in colors])
            for call in range(16)
        ]
        for call in calls:
            correct = [result.correct for result in call.result(60) if isinstance(result, Score)]
            assert correct == [color == "red" for color in colors]
    client.close()


def test_an_unknown_rule_is_one_line() -> None:
    with pytest.raises(InputError, match="rule = 'hard': must be one of official, soft, clamped"):
        ShapesJudge("hard")  # type: ignore[arg-type]


def test_metrics_count_items_refusals_and_seconds_by_reward() -> None:
    with serving() as url:
        png = encode_png(square("red"))
        post(url, wire_item("a", png), wire_item("b", b""))
        post(url, wire_item("a", png), dataset="jpeg")
        post(url)
        lines = httpx.get(f"{url}/metrics").text.splitlines()
    assert 'spotlight_reward_items_total{outcome="scored",reward="geneval"} 1.0' in lines
    assert 'spotlight_reward_items_total{outcome="error",reward="geneval"} 1.0' in lines
    assert 'spotlight_reward_items_total{outcome="scored",reward="jpeg"} 1.0' in lines
    assert 'spotlight_reward_refused_total{status="422"} 1.0' in lines
    assert 'spotlight_reward_request_seconds_count{reward="jpeg"} 1.0' in lines
    assert "spotlight_reward_queued_items 0.0" in lines


def test_with_a_token_only_who_has_it_gets_scores_and_metrics() -> None:
    with serving(token="s3cret") as url:
        (score,) = score_once(url, item("a", square("red")), token="s3cret")
        assert score == Score("a", 1.0, True, "")
        for wrong in ("", "s3cre", "s3cret2", "geheim\xfc"):
            with pytest.raises(RewardError, match="status 401: token: missing or wrong"):
                score_once(url, item("a", square("red")), token=wrong)
        assert httpx.get(f"{url}/metrics").status_code == 401
        assert httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer s3cret"}).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200


PIPELINED = 100


def malformed(rng: random.Random) -> bytes:
    """A request whose head is right, so that the connection lives on, and whose body is broken, cut or nonsense."""
    good = b'{"dataset":"geneval","items":[{"id":"a","row":{"tag":"colors","include":[],"prompt":"p"},"image_b64":"AAAA"}]}'
    body = bytearray(good[: rng.randint(0, len(good))])
    for _ in range(rng.randint(0, 8)):
        body.insert(rng.randint(0, len(body)), rng.choice(b'{}[]",:0\xff\x00\\'))
    return b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def statuses(peer: socket.socket, count: int) -> list[int]:
    """Reads until `count` answers have come."""
    received = b""
    while len(found := re.findall(rb"HTTP/1\.1 (\d{3})", received)) < count:
        chunk = peer.recv(65536)
        assert chunk, f"closed after {len(found)} answers"
        received += chunk
    return [int(status) for status in found]


def test_ten_thousand_malformed_requests_leave_the_service_up(url: str) -> None:
    rng = random.Random(1)
    host, port = url.removeprefix("http://").split(":")
    seen: list[int] = []
    with socket.create_connection((host, int(port)), timeout=20) as peer:
        for _ in range(10_000 // PIPELINED):
            peer.sendall(b"".join(malformed(rng) for _ in range(PIPELINED)))
            seen += statuses(peer, PIPELINED)
    assert len(seen) == 10_000
    assert set(seen) <= {200, 400, 422}
    assert seen.count(400) > 9_000
    for _ in range(50):
        with socket.create_connection((host, int(port)), timeout=20) as peer:
            peer.sendall(rng.randbytes(200) + b"\r\n\r\n")
    assert score_once(url, item("a", square("red"))) == [Score("a", 1.0, True, "")]
    assert httpx.get(f"{url}/health").json()["queued_items"] == 0


@dataclass
class Slow:
    """Takes its time over every item."""

    seconds_s: float
    datasets: tuple[str, ...] = ("geneval",)

    def score(self, dataset: str, row_json: bytes, image: Image) -> Verdict:
        time.sleep(self.seconds_s)
        return GOOD


def test_a_slow_scorer_costs_time_and_no_scores() -> None:
    with serving(Slow(2.0), ServiceLimits(threads=2, score_deadline_s=3.0)) as url:
        started_s = time.monotonic()
        scores = score_once(url, *(item(str(index), square("red")) for index in range(4)))
        assert scores == [Score(str(index), 1.0, True, "") for index in range(4)]
        assert time.monotonic() - started_s < 15


def test_more_work_than_fits_the_deadlines_waits_its_turn_and_fails_nothing() -> None:
    limits = ServiceLimits(threads=1, begin_deadline_s=0.2, score_deadline_s=5.0)
    with serving(Slow(0.1), limits) as url:
        scores = score_once(url, *(item(str(index), square("red")) for index in range(16)), retries=0)
        assert scores == [Score(str(index), 1.0, True, "") for index in range(16)]


def test_a_scorer_that_ends_its_thread_fails_only_its_item() -> None:
    class Leaving(Scripted):
        def score(self, dataset: str, row_json: bytes, image: Image) -> Verdict:
            super().score(dataset, row_json, image)
            raise SystemExit(3)

    with serving(Leaving([GOOD]), ServiceLimits(threads=1)) as url:
        for _ in range(2):
            assert score_once(url, item("a", square("red")), retries=0) == [
                ScoreError("a", "scorer failed: SystemExit: 3")
            ]


def test_a_dead_scorer_ends_as_errors_within_the_clients_deadline() -> None:
    gate = threading.Event()
    with serving(Scripted([gate]), ServiceLimits(threads=1, begin_deadline_s=0.5, score_deadline_s=0.5)) as url:
        items = item("a", square("red")), item("b", square("red"))
        results = score_once(url, *items, deadline_s=8.0, patience_s=8.0, retries=50)
        assert all(isinstance(result, ScoreError) and "within 0.5 s" in result.error for result in results)
        gate.set()


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (Unspeakable(), "scorer failed: Unspeakable: its text cannot be read: RuntimeError"),
        (ValueError("\ud800 x"), "scorer failed: ValueError: ? x"),
        (InputError("\ud800" + "x" * 9999), "?" + "x" * 1999),
        (Verdict(1.0, True, ["a"]), "scorer failed: TypeError: reason is a list, must be text"),  # type: ignore[arg-type]
    ],
)
def test_what_no_answer_can_hold_fails_only_its_item_and_no_thread(act: Verdict | Exception, error: str) -> None:
    with serving(Scripted([act, GOOD]), ServiceLimits(threads=1)) as url:
        both = score_once(url, item("a", square("red")), item("b", square("red")), retries=0)
        assert both == [ScoreError("a", error), Score("b", 1.0, True, "")]
        assert httpx.get(f"{url}/health").json()["queued_items"] == 0


def test_a_reason_that_json_cannot_hold_is_told_as_far_as_it_can() -> None:
    with serving(Scripted([Verdict(0.5, False, "\udfff!")])) as url:
        assert score_once(url, item("a", square("red"))) == [Score("a", 0.5, False, "?!")]


def test_a_judge_may_write_into_its_image() -> None:
    class Painting(Scripted):
        def score(self, dataset: str, row_json: bytes, image: Image) -> Verdict:
            image[:] = 0
            return super().score(dataset, row_json, image)

    with serving(Painting([GOOD])) as url:
        assert score_once(url, item("a", square("red"))) == [Score("a", 1.0, True, "")]


def test_an_image_with_more_than_8_bits_a_channel_is_refused_rather_than_clipped(url: str) -> None:
    deep = io.BytesIO()
    Pillow.fromarray(np.full((64, 64), 30_000, np.uint16)).save(deep, "PNG")
    (answer,) = post(url, wire_item("a", deep.getvalue())).json()["items"]
    assert answer["error"] == "image of mode I;16: must have 8 bits a channel"


def test_images_larger_than_the_shapes_world_are_refused_before_they_are_looked_at(url: str) -> None:
    black = encode_png(np.zeros((2048, 2048, 3), np.uint8))
    (answer,) = post(url, wire_item("a", black)).json()["items"]
    assert answer["error"] == "image of 2048 x 2048 px: must be 16 to 1024 on each side"


def test_the_queue_is_bounded_in_bytes_too() -> None:
    gate = threading.Event()
    with (
        serving(Scripted([gate]), ServiceLimits(threads=1, queued_bytes_max=1024)) as url,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(post, url, wire_item("a", encode_png(square("red"))), dataset="geneval")
        until_s = time.monotonic() + START_DEADLINE_S
        while httpx.get(f"{url}/health").json()["queued_items"] == 0 and time.monotonic() < until_s:
            time.sleep(0.01)
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        assert post(url, wire_item("b", encode_png(noise))).status_code == 429
        gate.set()
        assert first.result(30).status_code == 200


def test_a_name_is_as_long_in_a_message_as_in_a_row() -> None:
    name = "m" * 120 + ":f"
    with serving(Scripted([GOOD], datasets=(name,))) as url:
        row = row_json(replace(parse_row(RED_SQUARE), reward=name))
        assert score_once(url, item("a", square("red"), row)) == [Score("a", 1.0, True, "")]
