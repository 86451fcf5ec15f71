"""From a store URL to the blobs behind it. Owns which URLs there are; never imports s3fs unless the URL is `s3://`."""

from __future__ import annotations

from pathlib import Path

from spot_runtime.errors import StoreError
from spot_runtime.store.blobs import Blobs
from spot_runtime.store.files import FileBlobs
from spot_runtime.store.memory import MemoryBlobs


def open_blobs(url: str, deadline_s: float) -> Blobs:
    """Blobs of `file:///folder`, a plain path, `memory://name` or `s3://bucket/prefix`. Raises StoreError for any other URL."""
    scheme, found, rest = url.partition("://")
    if not found:
        return FileBlobs(_folder(url, url), deadline_s)
    if scheme == "file":
        if not rest.startswith("/"):
            raise StoreError(f"store = {url!r}: a file URL must name an absolute folder: file:///folder")
        return FileBlobs(_folder(url, rest), deadline_s)
    if scheme == "memory":
        return MemoryBlobs(rest.strip("/"))
    raise StoreError(f"store = {url!r}: must be file:///folder, a path, memory://name or s3://bucket/prefix")


def _folder(url: str, path: str) -> Path:
    if not path.strip():
        raise StoreError(f"store = {url!r}: must name a folder")
    folder = Path(path).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"store = {url!r}: {folder} is not a folder")
    return folder
