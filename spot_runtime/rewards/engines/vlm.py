"""Any vision-language model behind an OpenAI-compatible chat service as a reader of images. Owns the question and cleaning the answer.

Never scores, and never retries: whoever asks for the score does. `vllm serve Qwen/Qwen3-VL-8B-Instruct` is such a service.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import httpx
import msgspec

from spot_runtime.errors import InputError, RewardError
from spot_runtime.rewards.client import encode_png
from spot_runtime.rewards.detection import Image

URL_VARIABLE: Final = "SPOTLIGHT_VLM_URL"
"""Environment variable: base URL with the version, such as http://127.0.0.1:8000/v1."""
MODEL_VARIABLE: Final = "SPOTLIGHT_VLM_MODEL"
KEY_VARIABLE: Final = "SPOTLIGHT_VLM_KEY"
MODEL_DEFAULT: Final = "Qwen/Qwen3-VL-8B-Instruct"
DEADLINE_S: Final = 15.0
"""Shorter than the service's own for one item, so that the item's error says what was wrong."""
CHECK_TIMEOUT_S: Final = 5.0
SERVED_SHOWN_MAX: Final = 300
TOKENS_MAX: Final = 512
ANSWER_BYTES_MAX: Final = 2**20
NO_TEXT: Final = "[no text]"
QUESTION: Final = (
    "Transcribe all text that is visible in this image, exactly as written. Answer with the text alone: no quotes, no explanation. "
    f"If there is no text, answer {NO_TEXT}"
)


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message


class _Answer(msgspec.Struct, frozen=True):
    choices: Annotated[tuple[_Choice, ...], msgspec.Meta(min_length=1)]


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


class VlmReader:
    """Reads images by asking a model at temperature 0. Safe to share between threads.

    Calls raise RewardError where there is no answer within `deadline_s`, or none that can be used: it may pass.
    """

    def __init__(
        self,
        url: str,
        model: str = MODEL_DEFAULT,
        key: str = "",
        *,
        deadline_s: float = DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url.rstrip("/")
        self._model = model
        self._deadline_s = deadline_s
        self._clock = clock
        headers = {b"Authorization": f"Bearer {key}".encode()} if key else {}
        self._http = httpx.Client(headers=headers, timeout=deadline_s, trust_env=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], *, deadline_s: float = DEADLINE_S) -> VlmReader:
        """Raises InputError where URL_VARIABLE is not set, or no URL."""
        key = environment.get(KEY_VARIABLE, "").strip()
        return cls(_url(environment), _model(environment), key, deadline_s=deadline_s)

    def __call__(self, image: Image) -> str:
        status, content = self._ask("POST", "chat/completions", json=self._question(image))
        if status != 200:
            raise RewardError(f"{self._url}: status {status}: {content[:200]!r}")
        return cleaned(self._text(content))

    def models(self) -> tuple[int, bytes]:
        """Status and content of the list of models that are served. Raises RewardError where nobody answers in time."""
        return self._ask("GET", "models")

    def _ask(self, method: str, path: str, **options: Any) -> tuple[int, bytes]:
        until_s = self._clock() + self._deadline_s
        try:
            with self._http.stream(method, f"{self._url}/{path}", **options) as response:
                return response.status_code, self._content(response, until_s)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RewardError(
                f"{self._url}: no answer within {self._deadline_s:g} s: {type(error).__name__}"
            ) from error

    def _question(self, image: Image) -> dict[str, Any]:
        picture = f"data:image/png;base64,{base64.b64encode(encode_png(image)).decode()}"
        content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": QUESTION}]
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": TOKENS_MAX,
        }

    def _content(self, response: httpx.Response, until_s: float) -> bytes:
        content = bytearray()
        for chunk in response.iter_bytes():
            content += chunk
            if len(content) > ANSWER_BYTES_MAX:
                raise RewardError(f"{self._url}: answer must be <= {ANSWER_BYTES_MAX} bytes")
            if self._clock() >= until_s:
                raise RewardError(f"{self._url}: answer was not complete within {self._deadline_s:g} s")
        return bytes(content)

    def _text(self, content: bytes) -> str:
        """What the model said after its thoughts."""
        try:
            choice = msgspec.json.decode(content, type=_Answer).choices[0]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RewardError(f"{self._url}: not the answer of a chat service: {error}") from error
        text = without_thoughts(choice.message.content or "")
        if not text:
            raise RewardError(f"{self._url}: model {self._model} answered nothing")
        return text


def check_vlm(environment: Mapping[str, str]) -> None:
    """Raises InputError where nobody said where the model answers, or nobody answers there, or not for this model and key."""
    url = _url(environment)
    try:
        status, content = VlmReader.from_environment(environment, deadline_s=CHECK_TIMEOUT_S).models()
    except RewardError as error:
        raise InputError(f"{URL_VARIABLE} = {url!r}: nobody answers: {error}") from error
    if status in (401, 403):
        raise InputError(f"{KEY_VARIABLE}: {url} refuses it: status {status}")
    try:
        served = [model.id for model in msgspec.json.decode(content, type=_Models).data]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(
            f"{URL_VARIABLE} = {url!r}: no OpenAI-compatible service: {url}/models has status {status}"
        ) from error
    if _model(environment) not in served:
        raise InputError(
            f"{MODEL_VARIABLE} = {_model(environment)!r}: {url} serves {', '.join(served)[:SERVED_SHOWN_MAX] or 'no model'}"
        )


def _url(environment: Mapping[str, str]) -> str:
    url = environment.get(URL_VARIABLE, "").strip()
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host or " " in url:
        raise InputError(
            f"reward = 'deepseek_ocr-vlm': {URL_VARIABLE} = {url!r}: must be a URL such as http://127.0.0.1:8000/v1"
        )
    return url.rstrip("/")


def _model(environment: Mapping[str, str]) -> str:
    return environment.get(MODEL_VARIABLE, "").strip() or MODEL_DEFAULT


def without_thoughts(answer: str) -> str:
    """What follows the last </think>, whether the answer or the model's template opened it; nothing where one never closes."""
    return answer.rpartition("</think>")[2].partition("<think>")[0].strip()


def cleaned(answer: str) -> str:
    """What the image says, without what models like to put around it: code fences, an introduction, quotes."""
    text = re.sub(r"\A```\w*\n(.*?)\n?```\Z", r"\1", answer.strip(), flags=re.DOTALL).strip()
    text = re.sub(
        r"\A(the|all)?\s*(visible )?text( in (the|this) image)?( is| reads| says)?\s*:\s*", "", text, flags=re.I
    )
    for opening, closing in ('""', "''", "“”", "``"):
        if len(text) >= 2 and text.startswith(opening) and text.endswith(closing):
            text = text[1:-1]
    return "" if text.strip().lower().strip(".[]") == NO_TEXT.strip("[]") else text.strip()
