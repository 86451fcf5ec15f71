"""Garbage collection: what nobody refers to and has outlived its time. Owns the rule; the caller says what is referenced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spot_runtime.errors import CorruptObjectError, StoreError
from spot_runtime.store.blobs import Blobs
from spot_runtime.store.files import TEMP_FOLDER
from spot_runtime.store.keys import in_folder, key_of
from spot_runtime.store.objects import Objects
from spot_runtime.store.parts import PARTS_FOLDER, upload_of


@dataclass(frozen=True)
class Collected:
    """What a collection removed: objects by key, and how many blobs that no object owned (parts, temp files)."""

    keys: tuple[str, ...]
    orphans: int


def collect(
    blobs: Blobs,
    objects: Objects,
    prefix: str,
    older_than_s: float,
    referenced: Callable[[str], bool],
    upload_s_max: float,
) -> Collected:
    """Removes objects in the folder `prefix` that are older than `older_than_s` and not `referenced(key)`, and orphans.

    Ages are taken on the place's own clock. Parts that no marker names are orphans once the newest of their upload is older than
    `older_than_s` and than `upload_s_max`, within which a living writer adds another part. Raises StoreError for a negative age.
    """
    if not older_than_s >= 0:
        raise StoreError(f"older_than_s = {older_than_s}: must be >= 0")
    now_s = blobs.now_s()
    removed = []
    for info in list(blobs.list(prefix)):
        key = key_of(info.name)
        if key and in_folder(key, prefix) and now_s - info.modified_s >= older_than_s and not referenced(key):
            objects.delete(key)
            removed.append(key)
    orphans = _orphans(blobs, objects, prefix, now_s - max(older_than_s, upload_s_max))
    for name in orphans:
        blobs.delete(name)
    return Collected(tuple(sorted(removed)), len(orphans))


def _is_uploaded(objects: Objects, key: str, upload_id: str) -> bool:
    try:
        marker = objects.marker(key)
    except CorruptObjectError:
        return True  # damaged, of another version or badly read: only a marker that is gone or another's makes these parts nobody's
    return marker is not None and marker.upload == upload_id


def _orphans(blobs: Blobs, objects: Objects, prefix: str, before_s: float) -> list[str]:
    uploads: dict[tuple[str, str], list[str]] = {}
    newest_s: dict[tuple[str, str], float] = {}
    for info in blobs.list(f"{PARTS_FOLDER}/{prefix}"):
        upload = upload_of(info.name)
        if upload and in_folder(upload[0], prefix):
            uploads.setdefault(upload, []).append(info.name)
            newest_s[upload] = max(info.modified_s, newest_s.get(upload, 0.0))
    names = [info.name for info in blobs.list(f"{TEMP_FOLDER}/") if info.modified_s < before_s]
    for (key, upload_id), parts in uploads.items():
        if newest_s[key, upload_id] < before_s and not _is_uploaded(objects, key, upload_id):
            names.extend(parts)
    return names
