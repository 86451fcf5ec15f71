"""CURVE keys: pairs, their files, and who may connect. Owns formats and permissions; never decides where a daemon listens.

A pair NAME is two files of one line in Z85: `NAME.secret`, readable by its owner alone, and `NAME.public`, which goes into the folder of
allowed keys of those it connects to.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from spot_runtime.errors import InputError

PUBLIC_SUFFIX, SECRET_SUFFIX = ".public", ".secret"
ALLOWED_MAX = 4096
_Z85 = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_LOG_EVERY_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeyPair:
    """Z85, 40 bytes each. The secret stays out of every log and message."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class ServerKeys:
    """Of a bound socket: its own pair and the public keys that may connect."""

    own: KeyPair
    allowed: frozenset[bytes]


@dataclass(frozen=True)
class ClientKeys:
    """Of a connecting socket: its own pair and the public key that the server must prove to have."""

    own: KeyPair
    server: bytes


def new_pair() -> KeyPair:
    return KeyPair(*zmq.curve_keypair())


def write_pair(folder: Path, name: str, pair: KeyPair) -> tuple[Path, Path]:
    """Writes NAME.public and NAME.secret (mode 0600) and returns their paths. Raises InputError; never replaces a key."""
    if not _NAME.fullmatch(name):
        raise InputError(f"name = {name!r}: must be 1 to 63 lower-case letters, digits or -, the first no -")
    public_path, secret_path = folder / f"{name}{PUBLIC_SUFFIX}", folder / f"{name}{SECRET_SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, key, mode in ((secret_path, pair.secret, 0o600), (public_path, pair.public, 0o644)):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(key + b"\n")
    except FileExistsError as error:
        raise InputError(f"name = {name!r}: {error.filename} exists already") from error
    except OSError as error:
        raise InputError(f"folder = {folder}: {error.strerror}") from error
    return public_path, secret_path


def read_pair(path: Path) -> KeyPair:
    """The pair of a NAME.secret. Raises InputError, also where others than the owner may read the file."""
    key = _read(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise InputError(f"secret key {path} has mode {mode:04o}: must be 0600")
    return KeyPair(zmq.curve_public(key), key)


def read_public(path: Path) -> bytes:
    """The key of a NAME.public. Raises InputError."""
    return _read(path)


def read_allowed(folder: Path) -> frozenset[bytes]:
    """The keys of all *.public files of a folder. Raises InputError where there is none."""
    paths = sorted(folder.glob(f"*{PUBLIC_SUFFIX}"))
    if not 1 <= len(paths) <= ALLOWED_MAX:
        raise InputError(f"allowed keys {folder}: {len(paths)} *{PUBLIC_SUFFIX} files: must be 1 to {ALLOWED_MAX}")
    return frozenset(_read(path) for path in paths)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            key = file.read(64).strip()
    except OSError as error:
        raise InputError(f"key {path}: {error.strerror}") from error
    if not _Z85.fullmatch(key):
        raise InputError(f"key {path}: must be one line of 40 characters in Z85")
    return key


class AllowList:
    """Answers, on the authenticator's thread, whether a key may connect; counts and logs those that may not."""

    def __init__(self, allowed: Collection[bytes]) -> None:
        self._allowed = frozenset(allowed)
        self._logged_at_s = -_LOG_EVERY_S
        self.refused = 0

    def callback(self, _domain: str, key: bytes) -> bool:
        """The name that pyzmq's authenticator calls; `key` is in Z85."""
        if key in self._allowed:
            return True
        self.refused += 1
        now_s = time.monotonic()
        if now_s - self._logged_at_s >= _LOG_EVERY_S:
            self._logged_at_s = now_s
            _log.warning("peer refused", extra={"key": key.decode(errors="replace"), "refused": self.refused})
        return False
