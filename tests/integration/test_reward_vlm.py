"""The vision-language judge against a small chat service on a real socket: the question, the answer, and every way to fail."""

from __future__ import annotations

import base64
import io
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from spot_runtime.errors import InputError, RewardError
from spot_runtime.rewards.catalog import check_reward, load_judge
from spot_runtime.rewards.engines import vlm
from spot_runtime.rewards.engines.vlm import ANSWER_BYTES_MAX, VlmReader, cleaned, without_thoughts
from spot_runtime.rewards.prompts import GenevalRow
from spot_runtime.rewards.scorer import Verdict

IMAGE = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
ROW = GenevalRow(tag="text", include=(), prompt='a neon sign "Open Late"')


class ChatService(ThreadingHTTPServer):
    """Answers as told; keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []
        self.asked_for: tuple[str, str | None] | None = None
        self.models: Callable[[_Handler], None] = lambda handler: handler.serve("tiny-vlm", "other")
        self.reply: Callable[[_Handler], None] = lambda handler: handler.say("OPEN LATE")
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: ChatService

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers.get("Authorization"), body))
        self.server.reply(self)

    def do_GET(self) -> None:
        self.server.asked_for = (self.path, self.headers.get("Authorization"))
        self.server.models(self)

    def say(self, content: str | None) -> None:
        self.give(200, json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode())

    def serve(self, *names: str) -> None:
        self.give(200, json.dumps({"data": [{"id": name} for name in names]}).encode())

    def give(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[ChatService]:
    with ChatService() as service:
        thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield service
        service.shutdown()
        thread.join()


def test_an_image_is_asked_about_at_temperature_0_and_judged_by_what_the_model_read(service: ChatService) -> None:
    environment = {
        "SPOTLIGHT_VLM_URL": f"{service.url}/",
        "SPOTLIGHT_VLM_MODEL": "tiny-vlm",
        "SPOTLIGHT_VLM_KEY": "k3y",
    }
    assert load_judge("deepseek_ocr-vlm", environment)(ROW, IMAGE) == Verdict(1.0, True, "")
    ((path, authorization, question),) = service.asked
    assert (path, authorization) == ("/v1/chat/completions", "Bearer k3y")
    assert (question["model"], question["temperature"], question["max_tokens"]) == ("tiny-vlm", 0, 512)
    picture, text = question["messages"][0]["content"]
    assert "Transcribe all text" in text["text"]
    assert "Open Late" not in json.dumps(question)
    head, data = picture["image_url"]["url"].split(",")
    assert head == "data:image/png;base64"
    assert np.array_equal(np.asarray(Pillow.open(io.BytesIO(base64.b64decode(data)))), IMAGE)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("OPEN LATE", "OPEN LATE"),
        ("<think>It says SHUT.</think>\n\nOPEN", "OPEN"),
        ("It may say SHUT.\n</think>\n\nOPEN", "OPEN"),
        ("```text\nOPEN\nLATE\n```", "OPEN\nLATE"),
        ('"OPEN LATE"', "OPEN LATE"),
        ("The text in the image reads: “OPEN”", "OPEN"),
        ("Text: OPEN", "OPEN"),
        ("[no text]", ""),
        ("No text.", ""),
        ("no texting", "no texting"),
        ('say "hi"', 'say "hi"'),
    ],
)
def test_what_models_put_around_a_text_is_taken_off(answer: str, text: str) -> None:
    assert cleaned(without_thoughts(answer)) == text


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        (lambda handler: handler.give(500, b"out of memory"), "status 500: b'out of memory'"),
        (lambda handler: handler.give(404, b'{"error": "no such model"}'), "status 404"),
        (lambda handler: handler.give(200, b"<html>"), "not the answer of a chat service"),
        (lambda handler: handler.give(200, b'{"choices": []}'), "not the answer of a chat service"),
        (lambda handler: handler.give(200, bytes(ANSWER_BYTES_MAX + 1)), "answer must be <= 1048576 bytes"),
        (lambda handler: handler.say(None), "answered nothing"),
        (lambda handler: handler.say(" \n"), "answered nothing"),
        (lambda handler: handler.say("<think>I never come to an end"), "answered nothing"),
        (lambda handler: handler.say("<think>nothing but thoughts</think>\n"), "answered nothing"),
        (lambda handler: handler.connection.close(), "no answer within"),
    ],
)
def test_a_failing_model_is_an_error_and_never_a_reward(
    service: ChatService, reply: Callable[[_Handler], None], fault: str
) -> None:
    service.reply = reply
    with pytest.raises(RewardError, match=fault):
        VlmReader(service.url, "tiny-vlm")(IMAGE)


def trickle(handler: _Handler) -> None:
    """One byte at a time, so that no single read is late."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    try:
        for _ in range(200):
            handler.wfile.write(b" ")
            time.sleep(0.05)
    except OSError:
        pass


@pytest.mark.parametrize("reply", [lambda handler: time.sleep(2), trickle], ids=["silent", "trickling"])
def test_a_model_that_is_late_is_left_at_the_deadline(service: ChatService, reply: Callable[[_Handler], None]) -> None:
    service.reply = reply
    started_s = time.monotonic()
    with pytest.raises(RewardError, match=r"within 0\.5 s"):
        VlmReader(service.url, "tiny-vlm", deadline_s=0.5)(IMAGE)
    assert time.monotonic() - started_s < 1.9


def test_a_model_that_comes_back_is_asked_again(service: ChatService) -> None:
    reader = VlmReader(service.url, "tiny-vlm")
    service.reply = lambda handler: handler.give(503, b"loading")
    with pytest.raises(RewardError, match="status 503"):
        reader(IMAGE)
    service.reply = lambda handler: handler.say("OPEN")
    assert reader(IMAGE) == "OPEN"


@pytest.mark.parametrize("url", ["", "localhost:8000", "http://", "https://a b", "ftp://h/v1"])
def test_without_a_url_one_line_says_what_to_set(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTLIGHT_VLM_URL", url)
    with pytest.raises(InputError, match=r"SPOTLIGHT_VLM_URL = .*: must be a URL such as"):
        check_reward("deepseek_ocr-vlm")


def checked(url: str, monkeypatch: pytest.MonkeyPatch, model: str = "tiny-vlm") -> None:
    monkeypatch.setenv("SPOTLIGHT_VLM_URL", url)
    monkeypatch.setenv("SPOTLIGHT_VLM_MODEL", model)
    monkeypatch.setenv("SPOTLIGHT_VLM_KEY", "k3y")
    check_reward("deepseek_ocr-vlm")


def test_a_service_that_serves_the_model_is_taken(service: ChatService, monkeypatch: pytest.MonkeyPatch) -> None:
    checked(f"{service.url}/", monkeypatch)
    assert service.asked_for == ("/v1/models", "Bearer k3y")


@pytest.mark.parametrize(
    ("models", "fault"),
    [
        (lambda handler: handler.serve("other"), r"SPOTLIGHT_VLM_MODEL = 'tiny-vlm': http://\S+ serves other$"),
        (lambda handler: handler.give(401, b"{}"), r"SPOTLIGHT_VLM_KEY: http://\S+ refuses it: status 401$"),
        (lambda handler: handler.give(404, b"not found"), r"no OpenAI-compatible service: \S+/models has status 404$"),
    ],
)
def test_a_service_that_cannot_answer_is_refused_before_anything_starts(
    service: ChatService, monkeypatch: pytest.MonkeyPatch, models: Callable[[_Handler], None], fault: str
) -> None:
    service.models = models
    with pytest.raises(InputError, match=fault):
        checked(service.url, monkeypatch)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1", "http://[", "http://127.0.0.1:99999/v1"])
def test_nobody_at_the_url_is_one_line_before_anything_starts(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InputError, match=rf"SPOTLIGHT_VLM_URL = '{re.escape(url)}': nobody answers: .*no answer within 5 s: "
    ):
        checked(url, monkeypatch)


def test_a_service_that_trickles_is_not_waited_for_before_a_start(
    service: ChatService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.models = trickle
    monkeypatch.setattr(vlm, "CHECK_TIMEOUT_S", 0.5)
    with pytest.raises(InputError, match=r"nobody answers: .*answer was not complete within 0\.5 s"):
        checked(service.url, monkeypatch)
