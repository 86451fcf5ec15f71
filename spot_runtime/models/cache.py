"""Models on this machine: pulled from a store once, whoever asks. Owns the cache folder and its locks; never loads a model.

    CACHE/models/NAME-DIGEST/          the pipeline folder; `.complete` in it says that all files are there
    CACHE/models/NAME-DIGEST.lock      held while files are pulled into it

A file appears whole or not at all and a pull goes on where the last one ended, so it may be killed at any time. Processes that pull the
same model wait for the first and find its files.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from spot_runtime.errors import CorruptObjectError, StoreError
from spot_runtime.models.shelf import ModelFile, ModelListing, Progress, file_digest, read_listing
from spot_runtime.store.copies import PARTIAL_SUFFIX
from spot_runtime.store.tensors import TensorStore
from spot_runtime.variables import CACHE, cache_folder

COMPLETE = ".complete"
WAIT_S_MAX = 3600.0
_POLL_S = 0.1
_DIGEST_CHARS = 16
_WEIGHTS_SUFFIX = ".safetensors"


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    """What a pull did: the model, its folder here, and bytes that had to be fetched."""

    listing: ModelListing
    folder: str
    fetched_bytes: int


def pull_model(
    store: TensorStore,
    name: str,
    *,
    verify: bool = False,
    wait_s_max: float = WAIT_S_MAX,
    on_progress: Progress = lambda _done, _all: None,
) -> Pulled:
    """The model of that name as a folder on this machine, pulled where it is not here yet.

    What comes is compared with the listing's sha256. With `verify`, files that are here are read and those that are damaged are pulled
    again; without, those that are gone or of another size are. Another process that pulls the same model is
    waited for, `wait_s_max` at most. Raises ModelError where the store has none, StoreError where the disk has no room for it (before
    anything is fetched), and CorruptObjectError where the store's copy is damaged.
    """
    listing = read_listing(store, name)
    folder = model_cache(listing)
    if not verify and (folder / COMPLETE).exists() and not _missing(folder, listing.files, verify=False):
        return Pulled(listing=listing, folder=str(folder), fetched_bytes=0)
    with _locked(folder, wait_s_max):
        missing = _missing(folder, listing.files, verify=verify)
        fetched_bytes = _fetch(store, listing, folder, missing, on_progress)
        (folder / COMPLETE).touch()
    return Pulled(listing=listing, folder=str(folder), fetched_bytes=fetched_bytes)


def pull_small_files(store: TensorStore, name: str, *, wait_s_max: float = WAIT_S_MAX) -> Pulled:
    """As `pull_model`, of all but the weights: enough to check the model."""
    listing = read_listing(store, name)
    folder = model_cache(listing)
    small = [file for file in listing.files if not file.path.endswith(_WEIGHTS_SUFFIX)]
    missing = _missing(folder, small, verify=False)
    if not missing:
        return Pulled(listing=listing, folder=str(folder), fetched_bytes=0)
    with _locked(folder, wait_s_max):
        missing = _missing(folder, small, verify=False)
        fetched_bytes = _fetch(store, listing, folder, missing, lambda _done, _all: None)
    return Pulled(listing=listing, folder=str(folder), fetched_bytes=fetched_bytes)


def model_cache(listing: ModelListing) -> Path:
    """Folder of this very model in the cache."""
    return cache_folder() / "models" / f"{listing.name}-{listing.digest[:_DIGEST_CHARS]}"


def _missing(folder: Path, files: Sequence[ModelFile], *, verify: bool) -> list[ModelFile]:
    """Files that are not here whole."""
    return [file for file in files if not _is_here(folder / file.path, file, verify=verify)]


def _is_here(path: Path, file: ModelFile, *, verify: bool) -> bool:
    if not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    return not verify or file_digest(path) == file.sha256


def _fetch(
    store: TensorStore, listing: ModelListing, folder: Path, missing: Sequence[ModelFile], on_progress: Progress
) -> int:
    """Fetches files one after the other, each in parallel parts. Returns their bytes."""
    wanted_bytes = sum(file.size_bytes for file in missing)
    _check_space(folder, missing)
    (folder / COMPLETE).unlink(missing_ok=True)
    counter = _Counter(listing.size_bytes - wanted_bytes, listing.size_bytes, on_progress)
    for file in missing:
        try:
            store.get_file(listing.key(file), folder / file.path, on_bytes=counter.add)
        except CorruptObjectError as error:
            raise CorruptObjectError(f"{error}; pushing {listing.name} again repairs it") from error
        if not _is_here(folder / file.path, file, verify=True):
            (folder / file.path).unlink()
            raise CorruptObjectError(
                f"{listing.key(file)}: not the content that the listing names; `spotlight models remove {listing.name}`"
                " and pushing it again repairs it"
            )
    return wanted_bytes


class _Counter:
    """Adds up what several threads fetch."""

    def __init__(self, done_bytes: int, all_bytes: int, on_progress: Progress) -> None:
        self._done_bytes, self._all_bytes, self._on_progress = done_bytes, all_bytes, on_progress
        self._lock = threading.Lock()

    def add(self, size_bytes: int) -> None:
        with self._lock:
            self._done_bytes += size_bytes
            self._on_progress(self._done_bytes, self._all_bytes)


def _check_space(folder: Path, missing: Sequence[ModelFile]) -> None:
    """All that is missing must fit, less what an interrupted pull has fetched of it."""
    partial = [folder / f"{file.path}{PARTIAL_SUFFIX}" for file in missing]
    held_bytes = sum(path.stat().st_blocks * 512 for path in partial if path.exists())
    needed_bytes = sum(file.size_bytes for file in missing) - held_bytes
    free_bytes = shutil.disk_usage(folder.parent).free
    if needed_bytes > free_bytes:
        raise StoreError(
            f"{folder.parent}: {free_bytes} bytes free, must be >= {needed_bytes} for {folder.name};"
            f" {CACHE} names another folder"
        )


@contextlib.contextmanager
def _locked(folder: Path, wait_s_max: float) -> Iterator[None]:
    """One process at a time pulls into `folder`. The lock goes with its holder, however that ends."""
    until_s = time.monotonic() + wait_s_max
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with folder.with_name(folder.name + ".lock").open("ab") as lock:
            while not _try_lock(lock.fileno()):
                if time.monotonic() > until_s:
                    raise StoreError(f"{folder}: pulled by another process for more than {wait_s_max} s")
                time.sleep(_POLL_S)
            yield
    except OSError as error:
        raise StoreError(f"{folder}: {error.strerror}; {CACHE} names another folder") from error


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
