"""From a store URL to the blobs behind it. Owns which URLs there are; never imports s3fs unless the URL is `s3://`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from spot_runtime.errors import InputError, StoreError
from spot_runtime.store.blobs import Blobs
from spot_runtime.store.files import TEMP_FOLDER, FileBlobs
from spot_runtime.store.keys import check_prefix
from spot_runtime.store.memory import MemoryBlobs

SHARED_FORMS = "file:///folder, a path or s3://bucket/prefix"
DEADLINE_S_MIN = 0.1
DEADLINE_S_MAX = 3600.0
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_S3_QUERY = ("endpoint_url", "region")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def open_blobs(url: str, deadline_s: float) -> Blobs:
    """Blobs of `file:///folder`, a plain path, `memory://name` or `s3://bucket/prefix?endpoint_url=…&region=…`.

    A file URL may be percent-encoded, as `Path.as_uri` does; a path is taken letter by letter.

    Raises InputError for any other URL, StoreError for a deadline out of bounds.
    """
    if not DEADLINE_S_MIN <= deadline_s <= DEADLINE_S_MAX:
        raise StoreError(f"deadline_s = {deadline_s}: must be {DEADLINE_S_MIN} to {DEADLINE_S_MAX}")
    scheme, rest = _split(url)
    if scheme == "memory":
        return MemoryBlobs(_prefix(url, rest))
    if scheme == "s3":
        bucket, prefix, query = _bucket(url)
        from spot_runtime.store.s3 import S3Address, S3Blobs  # a second of imports that only s3 needs

        return S3Blobs(S3Address(bucket, prefix, query.get("endpoint_url", ""), query.get("region", "")), deadline_s)
    return FileBlobs(_folder(url, rest), deadline_s)


def check_shared(url: str) -> str:
    """A URL as a person gave it, unchanged. Raises InputError where it is none that several processes can use; opens nothing."""
    scheme, rest = _split(url)
    if scheme == "memory":
        raise InputError(f"store = {url!r}: must be {SHARED_FORMS}: no other process sees one in memory")
    if scheme == "s3":
        _bucket(url)
    else:
        _folder(url, rest)
    return url


def same_store(one: str, other: str) -> bool:
    """Whether two URLs mean the same folder or prefix, however they are spelt. Raises InputError where one is none."""
    return one == other or _canonical(one) == _canonical(other)


def local_folder(url: str) -> Path | None:
    """The folder of a file store; None for another one."""
    scheme, rest = _split(url)
    return _folder(url, rest) if scheme in ("", "file") else None


def folders_to_make(url: str) -> tuple[Path, ...]:
    """What is not there of the folders that a file store makes for its first object, innermost first; none for another store."""
    scheme, rest = _split(url)
    if scheme not in ("", "file"):
        return ()
    folder = _folder(url, rest)
    return tuple(each for each in (folder / TEMP_FOLDER, folder, *folder.parents) if not each.exists())


def remove_empty(folders: Sequence[Path]) -> None:
    """Removes those of `folders` in which nothing is."""
    for folder in folders:
        with contextlib.suppress(OSError):  # somebody else's things are in it, or it was never made
            folder.rmdir()


def recorded(url: str) -> str:
    """As a run records it, for any working directory: a plain path as an absolute one. Raises InputError."""
    return url if "://" in url or (folder := local_folder(url)) is None else str(folder)


def _canonical(url: str) -> object:
    folder = local_folder(url)
    if folder is not None:
        return folder.resolve()
    if not url.startswith("s3:"):
        return url.rstrip("/")
    bucket, prefix, query = _bucket(url)
    return bucket, prefix.strip("/"), query


def _split(url: str) -> tuple[str, str]:
    """Scheme ("" for a path) and what is behind it."""
    found = _SCHEME.match(url)
    if not found:
        return "", url
    scheme = found[1]
    if scheme == "file" and not url.startswith("file:///"):
        raise InputError(f"store = {url!r}: a file URL must name an absolute folder: file:///folder")
    if scheme not in ("file", "memory", "s3") or not url.startswith(f"{scheme}://"):
        raise InputError(f"store = {url!r}: must be {SHARED_FORMS}")
    rest = url.removeprefix(f"{scheme}://")
    return scheme, unquote(rest) if scheme == "file" else rest


def _folder(url: str, path: str) -> Path:
    if not path.strip() or "\0" in path:
        raise InputError(f"store = {url!r}: must name a folder")
    try:
        folder = Path(path).expanduser().absolute()
        if folder.exists() and not folder.is_dir():
            raise InputError(f"store = {url!r}: {folder} is not a folder")
    except (OSError, RuntimeError) as error:  # too long, nobody's home
        raise InputError(f"store = {shortened(url)!r}: {getattr(error, 'strerror', '') or error}") from error
    return folder


def shortened(text: str, chars_max: int = 200) -> str:
    """What a line can hold of what a person gave."""
    return text if len(text) <= chars_max else f"{text[:chars_max]}…"


def _prefix(url: str, prefix: str) -> str:
    try:
        return check_prefix(prefix)
    except StoreError as error:
        raise InputError(f"store = {url!r}: {error}") from error


def _bucket(url: str) -> tuple[str, str, dict[str, str]]:
    """Bucket, prefix and options of an s3 URL."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InputError(f"store = {url!r}: {error}") from error
    query = dict(parse_qsl(parts.query))
    unknown = sorted(set(query) - set(_S3_QUERY))
    if unknown:
        raise InputError(
            f"store = s3://{parts.netloc}{parts.path}: option {unknown[0]!r} must be one of {', '.join(_S3_QUERY)};"
            " secrets come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if not _BUCKET.fullmatch(parts.netloc):
        raise InputError(f"store = {url!r}: bucket {parts.netloc!r} must be 3 to 63 of a-z, 0-9, dot and dash")
    return parts.netloc, _prefix(url, parts.path.strip("/")), query
