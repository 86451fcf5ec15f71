"""The reward service over HTTP (paper section 4.1: scoring runs outside the GPU pool). Owns routes, status codes and body bounds.

Never judges anything itself: a `Scorer` does, behind a `Desk`. An item that cannot be judged is an error of that item, never a reward.

    400 body is not the JSON asked for     401 no or a wrong token      408 body came too slowly
    413 body or batch too large            422 unknown reward or repeated ids
    429 queue full, with Retry-After
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from spot_runtime.errors import InputError
from spot_runtime.rewards.catalog import load_judges
from spot_runtime.rewards.desk import Desk, ServiceLimits
from spot_runtime.rewards.figures import Figures
from spot_runtime.rewards.scorer import Scorer
from spot_runtime.rewards.wire import (
    HEALTH_PATH,
    METRICS_PATH,
    SCORE_PATH,
    Failure,
    Health,
    ScoreRequest,
    ScoreResponse,
)
from spot_runtime.variables import REWARD_TOKEN, given_reward_token

_BODY_UNREAD: Final = frozenset({401, 408, 413})


class Refusal(Exception):
    """A request that gets no scores."""

    def __init__(self, status: int, error: str, retry_after_s: int | None = None) -> None:
        super().__init__(error)
        self.status = status
        self.error = error
        self.retry_after_s = retry_after_s


def create_app(scorer: Scorer | None = None, limits: ServiceLimits | None = None, token: str = "") -> FastAPI:
    """The service around `scorer` (default: all embedded judges).

    With a `token`, scores and metrics are given only to who sends it as `Authorization: Bearer`; /health stays open.
    """
    scorer = scorer or load_judges()
    limits = limits or ServiceLimits()
    desk = Desk(scorer, limits)
    figures = Figures(queued_items=lambda: desk.queued_items)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        desk.close()

    async def score(request: Request) -> Response:
        _require(token, request)
        asked = _parse(await _body(request, limits), scorer, limits)
        if full := desk.admit(asked.items):
            raise Refusal(429, f"queue is full: {full}", limits.retry_after_s)
        with figures.judging(asked.dataset) as answered:
            answers = answered(await desk.judge(asked.dataset, asked.items))
        return _json(200, ScoreResponse(items=answers))

    async def health(_: Request) -> Response:
        return _json(200, Health(status="ok", datasets=tuple(scorer.datasets), queued_items=desk.queued_items))

    async def metrics(request: Request) -> Response:
        _require(token, request)
        return Response(figures.text(), media_type=figures.media_type)

    async def refuse(_: Request, refusal: Exception) -> Response:
        assert isinstance(refusal, Refusal)
        figures.refused(refusal.status)
        return _refused(refusal)

    app = FastAPI(title="Spotlight rewards", lifespan=lifespan, openapi_url=None)
    app.add_api_route(SCORE_PATH, score, methods=["POST"])
    app.add_api_route(HEALTH_PATH, health, methods=["GET"])
    app.add_api_route(METRICS_PATH, metrics, methods=["GET"])
    app.add_exception_handler(Refusal, refuse)
    return app


def _require(token: str, request: Request) -> None:
    """Compares in constant time."""
    given = request.headers.get("Authorization", "").encode("latin-1")
    if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
        raise Refusal(401, f"token: missing or wrong, must be that of the service ({REWARD_TOKEN})")


def _refused(refusal: Refusal) -> Response:
    response = _json(refusal.status, Failure(error=refusal.error))
    if refusal.retry_after_s is not None:
        response.headers["Retry-After"] = str(refusal.retry_after_s)
    if refusal.status in _BODY_UNREAD:
        response.headers["Connection"] = "close"  # else the server reads on, for as long as the client sends
    return response


def _json(status: int, content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def _body(request: Request, limits: ServiceLimits) -> bytes:
    try:
        async with asyncio.timeout(limits.body_deadline_s):
            return await _bounded_body(request, limits.body_bytes_max)
    except TimeoutError as error:
        raise Refusal(408, f"body did not arrive within {limits.body_deadline_s} s") from error
    except ClientDisconnect as error:
        raise Refusal(400, "body: ended early") from error


async def _bounded_body(request: Request, bytes_max: int) -> bytes:
    """Reads no more than the bound, whatever Content-Length claims."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > bytes_max:
            raise Refusal(413, f"body: must be <= {bytes_max} bytes")
    return bytes(body)


def _parse(body: bytes, scorer: Scorer, limits: ServiceLimits) -> ScoreRequest:
    try:
        asked = msgspec.json.decode(body, type=ScoreRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(400, f"body: {error}") from error
    if asked.dataset not in scorer.datasets:
        raise Refusal(422, f"dataset = {asked.dataset!r}: must be one of {', '.join(scorer.datasets)}")
    if not asked.items:
        raise Refusal(422, "items: must have at least 1")
    if len(asked.items) > limits.items_max:
        raise Refusal(413, f"items: has {len(asked.items)}, must be <= {limits.items_max}")
    if len({item.id for item in asked.items}) < len(asked.items):
        raise Refusal(422, "items: ids must differ")
    return asked


def main() -> None:
    """`python -m spot_runtime.rewards.service`: serves until interrupted; the token, if any, comes from the environment."""
    parser = argparse.ArgumentParser(description="Spotlight reward service")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, choices=range(65536), metavar="0..65535", default=8188)
    parser.add_argument("--threads", type=int, default=ServiceLimits().threads, help="items judged at the same time")
    parser.add_argument("--reward", action="append", default=[], help="load this one too; may be repeated")
    options = parser.parse_args()
    try:
        limits = ServiceLimits.parse({"threads": options.threads})
        scorer, token = load_judges(options.reward), given_reward_token()
    except InputError as error:
        parser.exit(error.exit_code, f"error: {error}\n")
    app = create_app(scorer, limits, token=token)
    uvicorn.run(app, host=options.host, port=options.port, access_log=False)


if __name__ == "__main__":
    main()
