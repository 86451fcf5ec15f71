"""The digest of stored content. Owns which function that is (decision 019); never knows what is hashed.

What others compare keeps the function that they ask for: files of a model and checksums of S3 requests are SHA-256.
"""

from __future__ import annotations

from blake3 import blake3


def content_hash(data: bytes | memoryview = b"") -> blake3:
    """BLAKE3 of 32 bytes, begun with `data`; `update`, `digest` and `hexdigest` as in hashlib. Lets other threads run meanwhile."""
    return blake3(data)
