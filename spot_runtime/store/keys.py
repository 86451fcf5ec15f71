"""Object keys: what a key may look like and the blob names it maps to. Owns validation; never does I/O.

A key is `/`-joined components. Blob names put `.obj` behind the last component, so that `a/b` and `a/b/c` can both exist on a file
system too; components that begin with a dot stay free for the store's own folders.
"""

from __future__ import annotations

import re

from spot_runtime.errors import StoreError

KEY_CHARS_MAX = 512
COMPONENT_CHARS_MAX = 128
OBJECT_SUFFIX = ".obj"

_COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+@,-]*", re.ASCII)


def check_key(key: str) -> str:
    """Returns `key` unchanged.

    Raises StoreError where it is empty, too long, or has a component that is not a letter or digit followed by letters, digits or
    `._=+@,-` (so no `..`, no absolute path, no space, no unicode), is longer than 128 characters or ends in `.obj`.
    """
    if not key:
        raise StoreError("key = '': must not be empty")
    if len(key) > KEY_CHARS_MAX:
        raise StoreError(f"key = {key[:40]!r}…: {len(key)} characters, must be <= {KEY_CHARS_MAX}")
    for component in key.split("/"):
        _check_component(key, component)
    return key


def _check_component(key: str, component: str) -> None:
    if len(component) > COMPONENT_CHARS_MAX:
        raise StoreError(
            f"key = {key!r}: component of {len(component)} characters, must be <= {COMPONENT_CHARS_MAX} characters"
        )
    if not _COMPONENT.fullmatch(component):
        raise StoreError(
            f"key = {key!r}: component {component!r} must be a letter or digit, then letters, digits or ._=+@,- only"
        )
    if component.endswith(OBJECT_SUFFIX):
        raise StoreError(f"key = {key!r}: component {component!r} must not end in {OBJECT_SUFFIX}")


def check_prefix(prefix: str) -> str:
    """A prefix is "" (everything) or a key, with or without a slash at its end. Returns it without that slash."""
    bare = prefix.removesuffix("/")
    return check_key(bare) if bare else ""


def blob_name(key: str) -> str:
    """Name of the blob that holds (or marks) the object `key`."""
    return key + OBJECT_SUFFIX


def key_of(name: str) -> str | None:
    """Key of an object blob; None for any other blob."""
    if not name.endswith(OBJECT_SUFFIX):
        return None
    key = name.removesuffix(OBJECT_SUFFIX)
    try:
        return check_key(key)
    except StoreError:
        return None


def in_folder(key: str, prefix: str) -> bool:
    """Whether `key` is `prefix` or lies below it as a folder: `runs/a` has `runs/a/b` but not `runs/ab`."""
    return not prefix or key == prefix or key.startswith(prefix + "/")
