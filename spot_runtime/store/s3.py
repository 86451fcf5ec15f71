"""Blobs in an S3 bucket, over the client that s3fs opens. Owns requests, conditions and what a failure means.

Never import this where the URL is not `s3://`: aiobotocore takes a second to import. Requests go to the client itself, since s3fs's own
calls retry without a deadline and turn a failed condition into OSError(22). Its event loop is one thread of the process: not fork-safe.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import secrets
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum, auto
from typing import Any, TypeVar

import aiohttp
import s3fs
from botocore.exceptions import (  # type: ignore[import-untyped, unused-ignore]
    BotoCoreError,
    ClientError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
)
from botocore.exceptions import (
    ConnectionError as BotoConnectionError,
)
from botocore.parsers import ResponseParserError  # type: ignore[import-untyped, unused-ignore]

from spot_runtime.errors import MissingObjectError, StoreError
from spot_runtime.store.blobs import Blob, BlobInfo, Body, too_large
from spot_runtime.store.files import TEMP_FOLDER
from spot_runtime.store.retry import ExhaustedError, Retry, TransientError

T = TypeVar("T")

CONNECT_TIMEOUT_S_MAX = 5.0
READ_TIMEOUT_S_MAX = 10.0
CONNECTIONS_MAX = 32
PAGE_KEYS = 1000
OPEN_S_MIN = 30.0
"""Opening loads the client's API description: seconds of CPU on a busy machine, whatever the deadline of a request."""
_READ_SHARE = 0.8
_PROBE_SHARE = 0.05
"""Of the deadline, for each request that tells lost content from a slow place."""
_TRANSPORT_ERRORS = (
    HTTPClientError,
    BotoConnectionError,
    ResponseParserError,
    aiohttp.ClientError,
    TimeoutError,
    OSError,
)
_DENIED = (401, 403)
_PROBE = b"probe"
_TRANSIENT_STATUS = (408, 409, 425, 429)
_TRANSIENT_CODES = ("RequestTimeout", "XAmzContentSHA256Mismatch", "BadDigest", "IncompleteBody", "SlowDown")


@dataclass(frozen=True)
class S3Address:
    """Where the blobs are. `endpoint_url` and `region` are "" where the environment says (AWS_ENDPOINT_URL, AWS_REGION)."""

    bucket: str
    prefix: str
    endpoint_url: str = ""
    region: str = ""


class _Try(Enum):
    """What one try of a read showed: no answer at all, the server's own failure, or anything that a network or a busy server explains."""

    SILENT = auto()
    FAILED = auto()
    OTHER = auto()


class S3Blobs:
    """Blobs under one prefix of a bucket. Credentials come from the environment as botocore reads it (AWS_ACCESS_KEY_ID, …)."""

    def __init__(self, address: S3Address, deadline_s: float) -> None:
        self._bucket = address.bucket
        self._prefix = f"{address.prefix}/" if address.prefix else ""
        self._deadline_s = deadline_s
        self._fs: Any = _filesystem(address, deadline_s)
        self._where = f"s3://{address.bucket}/{address.prefix}"
        self._client: Any = self._request("open", "", self._fs.set_session, max(deadline_s, OPEN_S_MIN))
        self._where += f" at {self._client.meta.endpoint_url}"

    def create(self, name: str, body: Body) -> bool:
        return self._put(name, body, {"IfNoneMatch": "*"})

    def replace(self, name: str, body: Body, version: str) -> bool:
        return self._put(name, body, {"IfMatch": version})

    def read(self, name: str, bytes_max: int) -> Blob:
        return self._read(name, {}, bytes_max)

    def read_tail(self, name: str, size_bytes: int) -> Blob:
        return self._read(name, {"Range": f"bytes=-{size_bytes}"}, size_bytes)

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        params = {"Bucket": self._bucket, "Prefix": self._prefix + prefix, "MaxKeys": PAGE_KEYS}
        while True:
            page = self._request("list", prefix, lambda: self._client.list_objects_v2(**params))
            for entry in page.get("Contents", ()):
                yield BlobInfo(
                    entry["Key"].removeprefix(self._prefix), entry["Size"], entry["LastModified"].timestamp()
                )
            if not page.get("IsTruncated"):
                return
            params["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, name: str) -> None:
        self._request("delete", name, lambda: self._client.delete_object(**self._params(name)))

    def now_s(self) -> float:
        ask = {"Bucket": self._bucket, "Prefix": self._prefix, "MaxKeys": 1}
        answer = self._request("list", "", lambda: self._client.list_objects_v2(**ask))
        return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()

    def _put(self, name: str, body: Body, condition: dict[str, str]) -> bool:
        data = b"".join(body.pieces())
        checksum = base64.b64encode(hashlib.sha256(data).digest()).decode()
        params = self._params(name) | {"Body": data, "ChecksumSHA256": checksum} | condition
        try:
            self._request("put", name, lambda: self._client.put_object(**params))
        except _ConditionFailedError:
            return False
        except MissingObjectError:  # how some servers say that what was to be replaced has gone
            if "IfMatch" not in condition:
                raise
            return False
        return True

    def _read(self, name: str, params: dict[str, str], bytes_max: int) -> Blob:
        tries: dict[int, _Try] = {}
        asked = self._params(name) | params
        try:
            return self._attempts(
                "get",
                name,
                lambda: self._get(name, asked, bytes_max, tries, len(tries)),
                self._deadline_s * _READ_SHARE,
            )
        except ExhaustedError as failure:
            if _Try.OTHER in tries.values() or (lost := self._lost(name)) is None:
                raise StoreError(str(failure)) from failure
            return lost

    async def _get(
        self, name: str, params: dict[str, Any], bytes_max: int, tries: dict[int, _Try], number: int
    ) -> Blob:
        tries[number] = _Try.SILENT  # so it stays where time is up
        try:
            answer = await self._client.get_object(**params)
        except ClientError as error:
            tries[number] = _Try.FAILED if _status(error) == 500 else _Try.OTHER
            if _status(error) == 416:  # a tail of nothing
                return Blob(memoryview(b""), 0, "")
            raise
        except Exception as error:
            tries[number] = _Try.SILENT if isinstance(error, ReadTimeoutError) else _Try.OTHER
            raise
        tries[number] = _Try.OTHER
        async with answer["Body"] as body:
            if answer["ContentLength"] > bytes_max:
                raise too_large(name, answer["ContentLength"], bytes_max)
            data = await body.read()
        if len(data) != answer["ContentLength"]:
            raise TransientError(f"{len(data)} bytes of {answer['ContentLength']} came")
        _, _, whole = answer.get("ContentRange", "").rpartition("/")
        return Blob(memoryview(data), int(whole) if whole else len(data), answer["ETag"])

    def _lost(self, name: str) -> Blob | None:
        """A server that crashed may list an object and have lost its content: such a blob reads as empty, hence as torn.

        None where that is not sure. It is where the server has the name, and a blob that is written now can be read at once: whoever
        takes a slow place for a loss replaces what is intact.
        """
        probe = f"{TEMP_FOLDER}/probe-{secrets.token_hex(8)}"
        ask, mine = self._params(name), self._params(probe)
        deadline_s = self._deadline_s * _PROBE_SHARE
        try:
            head = self._attempts("head", name, lambda: self._client.head_object(**ask), deadline_s)
            self._attempts("put", probe, lambda: self._client.put_object(**mine, Body=_PROBE), deadline_s)
            try:
                self._attempts("get", probe, lambda: self._get(probe, mine, len(_PROBE), {}, 0), deadline_s)
            finally:
                self._attempts("delete", probe, lambda: self._client.delete_object(**mine), deadline_s)
        except (ExhaustedError, StoreError):
            return None
        return Blob(memoryview(b""), head["ContentLength"], head["ETag"])

    def _request(
        self, verb: str, name: str, start: Callable[[], Coroutine[Any, Any, T]], deadline_s: float | None = None
    ) -> T:
        try:
            return self._attempts(verb, name, start, deadline_s or self._deadline_s)
        except ExhaustedError as error:
            raise StoreError(str(error)) from error

    def _attempts(self, verb: str, name: str, start: Callable[[], Coroutine[Any, Any, T]], deadline_s: float) -> T:
        what = f"{verb} {name or '/'} in {self._where}"
        return Retry(deadline_s).run(what, lambda timeout_s: self._try(what, start, timeout_s))

    def _try(self, what: str, start: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        try:
            return self._wait(start(), timeout_s)
        except ClientError as error:
            raise self._meaning(what, error) from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise StoreError(f"{what}: no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") from error
        except _TRANSPORT_ERRORS as error:
            raise TransientError(str(error) or f"no answer within {timeout_s:.1f} s") from error
        except (BotoCoreError, ValueError) as error:
            raise StoreError(f"{what}: {error}") from error

    def _wait(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._fs.loop)
        try:
            return future.result(timeout_s)
        finally:
            future.cancel()

    def _meaning(self, what: str, error: ClientError) -> Exception:
        status, code = _status(error), error.response.get("Error", {}).get("Code", "")
        if status == 412:
            return _ConditionFailedError()
        if code == "NoSuchBucket":
            return StoreError(f"{what}: no bucket {self._bucket!r}")
        if status == 404:
            return MissingObjectError(f"{what}: no such object")
        if status >= 500 or status in _TRANSIENT_STATUS or code in _TRANSIENT_CODES:
            return TransientError(f"{status} {code}")
        if status in _DENIED:
            return StoreError(
                f"{what}: access denied ({code}): check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and their rights on the bucket"
            )
        return StoreError(f"{what}: {status} {code}: {error.response.get('Error', {}).get('Message', '')}")

    def _params(self, name: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}


class _ConditionFailedError(Exception):
    """412: somebody else's object is there, or the object has changed."""


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _filesystem(address: S3Address, deadline_s: float) -> Any:
    endpoint_url = address.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    style = {"addressing_style": "path"} if endpoint_url else {}
    config = {
        "retries": {"total_max_attempts": 1},  # ours have a deadline
        "connect_timeout": min(CONNECT_TIMEOUT_S_MAX, deadline_s / 3),
        "read_timeout": min(READ_TIMEOUT_S_MAX, deadline_s / 3),
        "max_pool_connections": CONNECTIONS_MAX,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "s3": {
            "payload_signing_enabled": False,
            **style,
        },  # ChecksumSHA256 says the same and is not computed on the event loop
    }
    client = {"region_name": address.region} if address.region else {}
    return s3fs.S3FileSystem(
        endpoint_url=endpoint_url,
        client_kwargs=client,
        config_kwargs=config,
        use_listings_cache=False,
        skip_instance_cache=True,
    )
