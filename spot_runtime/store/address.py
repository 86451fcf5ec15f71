"""From a store URL to the blobs behind it. Owns which URLs there are; never imports s3fs unless the URL is `s3://`."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from spot_runtime.errors import StoreError
from spot_runtime.store.blobs import Blobs
from spot_runtime.store.files import FileBlobs
from spot_runtime.store.keys import check_prefix
from spot_runtime.store.memory import MemoryBlobs

DEADLINE_S_MIN = 0.1
DEADLINE_S_MAX = 3600.0
_S3_QUERY = ("endpoint_url", "region")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def open_blobs(url: str, deadline_s: float) -> Blobs:
    """Blobs of `file:///folder`, a plain path, `memory://name` or `s3://bucket/prefix?endpoint_url=…&region=…`.

    Raises StoreError for any other URL and for a deadline out of bounds.
    """
    if not DEADLINE_S_MIN <= deadline_s <= DEADLINE_S_MAX:
        raise StoreError(f"deadline_s = {deadline_s}: must be {DEADLINE_S_MIN} to {DEADLINE_S_MAX}")
    scheme, found, rest = url.partition("://")
    if not found:
        return FileBlobs(_folder(url, url), deadline_s)
    if scheme == "file":
        if not rest.startswith("/"):
            raise StoreError(f"store = {url!r}: a file URL must name an absolute folder: file:///folder")
        return FileBlobs(_folder(url, rest), deadline_s)
    if scheme == "memory":
        return MemoryBlobs(check_prefix(rest))
    if scheme == "s3":
        return _s3(url, deadline_s)
    raise StoreError(f"store = {url!r}: must be file:///folder, a path, memory://name or s3://bucket/prefix")


def _folder(url: str, path: str) -> Path:
    if not path.strip():
        raise StoreError(f"store = {url!r}: must name a folder")
    folder = Path(path).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"store = {url!r}: {folder} is not a folder")
    return folder


def _s3(url: str, deadline_s: float) -> Blobs:
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    unknown = sorted(set(query) - set(_S3_QUERY))
    if unknown:
        raise StoreError(
            f"store = s3://{parts.netloc}{parts.path}: option {unknown[0]!r} must be one of {', '.join(_S3_QUERY)};"
            " secrets come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if not _BUCKET.fullmatch(parts.netloc):
        raise StoreError(f"store = {url!r}: bucket {parts.netloc!r} must be 3 to 63 of a-z, 0-9, dot and dash")
    prefix = check_prefix(parts.path.strip("/"))
    from spot_runtime.store.s3 import S3Address, S3Blobs  # a second of imports that only s3 needs

    address = S3Address(parts.netloc, prefix, query.get("endpoint_url", ""), query.get("region", ""))
    return S3Blobs(address, deadline_s)
