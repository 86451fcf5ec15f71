"""The keys that a daemon's settings, or a client's environment, name. Owns which belong together; never makes any."""

from __future__ import annotations

from pathlib import Path

from spot_runtime import variables
from spot_runtime.errors import InputError
from spot_runtime.transport import ClientKeys, ServerKeys, read_allowed, read_pair, read_public


def server_keys(secret_key: str, allowed_keys: str) -> ServerKeys | None:
    """None where neither is named. Raises InputError for one without the other, or keys that cannot be used."""
    if bool(secret_key) != bool(allowed_keys):
        raise InputError(
            f"secret_key = {secret_key!r}, allowed_keys = {allowed_keys!r}: must both be given, or neither"
        )
    return ServerKeys(read_pair(Path(secret_key)), read_allowed(Path(allowed_keys))) if secret_key else None


def given_client_keys() -> ClientKeys | None:
    """Of whoever calls the control that SPOTLIGHT_ENDPOINT names; None where the environment names no key."""
    return client_keys(*variables.given_keys(), names=(variables.SECRET_KEY, variables.CONTROL_KEY))


def client_keys(
    secret_key: str, control_key: str, *, names: tuple[str, str] = ("secret_key", "control_key")
) -> ClientKeys | None:
    """None where neither is named. Raises InputError for one without the other, or keys that cannot be used."""
    if bool(secret_key) != bool(control_key):
        raise InputError(f"{names[0]} = {secret_key!r}, {names[1]} = {control_key!r}: must both be given, or neither")
    return ClientKeys(read_pair(Path(secret_key)), read_public(Path(control_key))) if secret_key else None
