"""Models in the tensor store: a pipeline folder's files under one name. Owns keys and the listing that commits a model; never loads one.

    models/NAME/files/SHA256    one file, under the digest of its content
    models/NAME/model.json      the listing; written last, so a model that was pushed in part is not there

A name is given once: another model under it is refused. Whoever pushes again after an interruption sends only what is missing, and reads
what is there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

import msgspec

from spot_runtime.diffusion.geometry import check_model, pipeline_files
from spot_runtime.errors import CorruptObjectError, InputError, MissingObjectError, ModelError, StoreError
from spot_runtime.store.keys import check_key
from spot_runtime.store.tensors import TensorStore

FOLDER = "models"
LISTING = "model.json"
FILES_MAX = 10_000
_PIECE_BYTES = 16 * 1024 * 1024
_SHA256 = re.compile(r"[0-9a-f]{64}")
_Stamp = tuple[int, int, int]

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, from several threads."""


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file: its path in the pipeline folder, its size, and the sha256 of its content in hex."""

    path: str
    size_bytes: int
    sha256: str


class ModelListing(msgspec.Struct, frozen=True, kw_only=True):
    """A model as the store has it. `digest` is `check_model`'s, of the very same files."""

    name: str
    digest: str
    files: tuple[ModelFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def key(self, file: ModelFile) -> str:
        return f"{FOLDER}/{self.name}/files/{file.sha256}"


class Pushed(msgspec.Struct, frozen=True, kw_only=True):
    """What a push did: the model as it is in the store now, and bytes that had to be sent."""

    listing: ModelListing
    sent_bytes: int


def check_name(name: str) -> str:
    """Returns `name` unchanged. Raises InputError where it cannot be a part of a key."""
    try:
        if "/" in name:
            raise StoreError("has a slash")
        return check_key(name)
    except StoreError as error:
        raise InputError(
            f"name = {name!r}: must be a letter or digit, then letters, digits or ._=+@,-, at most 128 characters"
        ) from error


def push_model(store: TensorStore, name: str, folder: Path, on_progress: Progress = lambda _done, _all: None) -> Pushed:
    """Stores the pipeline in `folder` as `name`.

    A model that is complete already is read and repaired where an object of it is damaged. Raises ModelError where the folder is no
    pipeline, InputError where the store has another model of this name or a file changes meanwhile, StoreError.
    """
    check_name(name)
    stamps = _stamps(folder)
    listing = ModelListing(name=name, digest=check_model(str(folder)).digest, files=_files(folder))
    there = find_listing(store, name)
    _refuse_another(there, listing)
    done_bytes = sent_bytes = 0
    for file in sorted({file.sha256: file for file in listing.files}.values(), key=lambda file: file.path):
        key = listing.key(file)
        if there is not None or not _is_whole(store, key):
            store.put_file(key, folder / file.path)
            sent_bytes += file.size_bytes
        done_bytes += file.size_bytes
        on_progress(done_bytes, listing.size_bytes)
    _refuse_changed(store, listing, folder, stamps)
    store.put_bytes(_listing_key(name), msgspec.json.encode(listing))
    _refuse_another(find_listing(store, name), listing)  # of two who push at once, one is the first
    on_progress(listing.size_bytes, listing.size_bytes)
    return Pushed(listing=listing, sent_bytes=0 if there is not None else sent_bytes)


def read_listing(store: TensorStore, name: str) -> ModelListing:
    """The model of that name. Raises ModelError where the store has none or lists what cannot be trusted, StoreError."""
    found = find_listing(store, check_name(name))
    if found is None:
        others = ", ".join(model.name for model in list_models(store)) or "none"
        raise ModelError(
            f"model = {name!r}: not in the store, which has: {others}; `spotlight models push` puts it there"
        )
    return found


def find_listing(store: TensorStore, name: str) -> ModelListing | None:
    """None where there is none, or one that is damaged: it was not committed."""
    try:
        listing = msgspec.json.decode(store.get_bytes(_listing_key(name)), type=ModelListing)
    except (MissingObjectError, CorruptObjectError):
        return None
    except msgspec.MsgspecError as error:
        raise ModelError(f"model = {name!r}: its listing in the store cannot be read: {error}") from error
    _check_listing(name, listing)
    return listing


def list_models(store: TensorStore, on_unreadable: Callable[[str], None] = lambda _: None) -> list[ModelListing]:
    """All complete models, by name; `on_unreadable` hears why a listing is left out."""
    names = [key.split("/")[1] for key in store.list(FOLDER) if key.endswith(f"/{LISTING}") and key.count("/") == 2]
    found = []
    for name in names:
        try:
            found.append(find_listing(store, name))
        except ModelError as error:
            on_unreadable(str(error))
    return [listing for listing in found if listing is not None]


def remove_model(store: TensorStore, name: str) -> ModelListing:
    """Removes a model, its listing first. Raises ModelError where there is none."""
    listing = read_listing(store, name)
    store.delete(_listing_key(name))
    for key in store.list(f"{FOLDER}/{name}"):
        store.delete(key)
    return listing


def file_digest(path: Path) -> str:
    """sha256 of a file's content in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_whole(store: TensorStore, key: str) -> bool:
    try:
        store.verify(key)
    except (MissingObjectError, CorruptObjectError):
        return False
    return True


def _refuse_another(there: ModelListing | None, listing: ModelListing) -> None:
    if there is not None and there != listing:
        raise InputError(
            f"name = {listing.name!r}: the store has another model of this name, digest {there.digest[:12]}:"
            f" must be {listing.digest[:12]}, or take another name"
        )


def _refuse_changed(store: TensorStore, listing: ModelListing, folder: Path, before: Mapping[str, _Stamp]) -> None:
    """What was sent of a file that changed is not under its own digest: it goes again."""
    now = _stamps(folder)
    changed = [file for file in listing.files if before.get(file.path) != now.get(file.path)]
    for file in changed:
        if _stored_sha256(store, listing.key(file)) != file.sha256:
            store.delete(listing.key(file))
    if before != now:
        names = ", ".join(file.path for file in changed) or "a file came or went"
        raise InputError(f"{folder}: changed while it was pushed: {names}")


def _stored_sha256(store: TensorStore, key: str) -> str:
    state, start = hashlib.sha256(), 0
    while piece := store.get_range(key, start, start + _PIECE_BYTES):
        state.update(piece)
        start += len(piece)
    return state.hexdigest()


def _stamps(folder: Path) -> dict[str, _Stamp]:
    """What changes with a file's content, by path."""
    try:
        found = {name: (folder / name).stat() for name in sorted(pipeline_files(folder))}
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}") from error
    return {name: (status.st_mtime_ns, status.st_size, status.st_ino) for name, status in found.items()}


def _files(folder: Path) -> tuple[ModelFile, ...]:
    try:
        return tuple(
            ModelFile(path=name, size_bytes=(folder / name).stat().st_size, sha256=file_digest(folder / name))
            for name in sorted(pipeline_files(folder))
        )
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}") from error


def _listing_key(name: str) -> str:
    return f"{FOLDER}/{name}/{LISTING}"


def _check_listing(name: str, listing: ModelListing) -> None:
    """A listing says where files are written: nothing of it may lead out of the model's folder."""
    if listing.name != name or not 0 < len(listing.files) <= FILES_MAX:
        raise ModelError(f"model = {name!r}: its listing names {listing.name!r} and {len(listing.files)} files")
    for file in listing.files:
        path = PurePosixPath(file.path)
        plain = path.parts and not path.is_absolute() and not any(part.startswith(".") for part in path.parts)
        if not plain or "\\" in file.path or "\0" in file.path or file.size_bytes < 0:
            raise ModelError(f"model = {name!r}: its listing has the path {file.path!r}: must lie in the folder")
        if not _SHA256.fullmatch(file.sha256):
            raise ModelError(
                f"model = {name!r}: its listing has sha256 {file.sha256!r} of {file.path}: must be 64 hex digits"
            )
