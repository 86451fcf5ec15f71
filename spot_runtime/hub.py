"""Models that are named by a hub id. The only user of huggingface_hub. Owns deadlines and what failures mean; never loads a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

TIMEOUT_S: Final = 20.0
"""For each question to the hub, and for the silence of a download."""
WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt"})
"""Suffixes of files that hold weights."""

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class HubError(Exception):
    """The hub did not give what was asked, and why. For who knows which option named the model, and says so."""


def is_hub_id(model: str) -> bool:
    """Whether it looks like one, such as Qwen/Qwen-Image."""
    return _HUB_ID.fullmatch(model) is not None


def snapshot(model: str, patterns: Sequence[str], *, cached: bool = False) -> Path:
    """Folder of the files that match, fetched where they are not in the local cache; with `cached` nobody is asked. Raises HubError."""
    with _asked():
        from huggingface_hub import snapshot_download

        path = snapshot_download(model, allow_patterns=list(patterns), etag_timeout=TIMEOUT_S, local_files_only=cached)
        return Path(path)


def file_names(model: str) -> frozenset[str]:
    """Names of all files that the hub has of a model. Raises HubError."""
    with _asked():
        from huggingface_hub import HfApi

        return frozenset(file.rfilename for file in HfApi().model_info(model, timeout=TIMEOUT_S).siblings or ())


def require_weights(model: str) -> None:
    """Raises HubError where neither the local cache has weights of it nor the hub would give any. Fetches nothing."""
    if _has_weights(_cached_names(model)):
        return
    if not _has_weights(file_names(model)):
        raise HubError("the hub has no weights of that name")


def _cached_names(model: str) -> frozenset[str]:
    try:
        folder = snapshot(model, ["*"], cached=True)
    except HubError:
        return frozenset()
    return frozenset(path.name for path in folder.rglob("*"))


def _has_weights(names: frozenset[str]) -> bool:
    return any(Path(name).suffix in WEIGHTS for name in names)


@contextmanager
def _asked() -> Iterator[None]:
    try:
        yield
    except (
        Exception
    ) as error:  # the hub's client passes on its HTTP library's errors, and changes that library between versions
        said = "the hub does not give it" if _answered(error) else "the hub cannot be reached from here"
        raise HubError(f"{said}: {type(error).__name__}") from error


def _answered(error: Exception) -> bool:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    return isinstance(error, HfHubHTTPError | HFValidationError) and not isinstance(error, LocalEntryNotFoundError)
