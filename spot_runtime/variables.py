"""Environment variables that people set, and the one way each is read. Imports nothing heavy: `--help` needs their names."""

from __future__ import annotations

import os
from pathlib import Path

from spot_runtime.errors import InputError

ENDPOINT = "SPOTLIGHT_ENDPOINT"
SECRET_KEY = "SPOTLIGHT_SECRET_KEY"
CONTROL_KEY = "SPOTLIGHT_CONTROL_KEY"
TRACEBACK = "SPOTLIGHT_TRACEBACK"
CACHE = "SPOTLIGHT_CACHE"
REWARD_TOKEN = "SPOTLIGHT_REWARD_TOKEN"


def given_endpoint() -> str:
    """Where control answers, or "" where nothing is said."""
    return os.environ.get(ENDPOINT, "").strip()


def given_keys() -> tuple[str, str]:
    """Files of the caller's secret key and of control's public key, for the endpoint that is given; "" where nothing is said."""
    return os.environ.get(SECRET_KEY, "").strip(), os.environ.get(CONTROL_KEY, "").strip()


def given_reward_token() -> str:
    """The bearer token of the reward service, for it and for who asks it; "" where nothing is said.

    Raises InputError for one that no HTTP header can carry, without showing it.
    """
    token = os.environ.get(REWARD_TOKEN, "").strip()
    if not (token.isascii() and (token + "x").isprintable() and " " not in token):
        raise InputError(f"{REWARD_TOKEN}: must be printable ASCII without spaces")
    return token


def wants_traceback() -> bool:
    """Whether an error is shown in full too: anything but "" and 0 says yes."""
    return os.environ.get(TRACEBACK, "").strip() not in ("", "0")


def cache_folder() -> Path:
    """Where this machine keeps what it fetched: SPOTLIGHT_CACHE, else `spotlight` in XDG_CACHE_HOME, else in ~/.cache."""
    given = os.environ.get(CACHE, "").strip()
    if given:
        return Path(given).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(shared) if shared else Path.home() / ".cache").absolute() / "spotlight"
