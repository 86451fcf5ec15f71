"""Models of judges that a variable of the environment names, as a folder or a hub id. Owns finding and loading them; never runs one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from spot_runtime.errors import InputError
from spot_runtime.hub import HubError, is_hub_id, require_weights

DEVICE_VARIABLE: Final = "SPOTLIGHT_REWARD_DEVICE"


def loaded(cls: Any, model: str) -> Any:
    """A part of a model folder or hub id. Raises InputError."""
    try:
        return cls.from_pretrained(model)
    except Exception as error:  # files of strangers, and the hub, whose client passes on its HTTP library's errors
        raise InputError(f"model {model!r}: {cls.__name__} cannot load it: {type(error).__name__}: {error}") from error


def check_model_name(variable: str, default: str, environment: Mapping[str, str]) -> None:
    """Raises InputError for what is neither a model folder nor a hub id with weights that are cached or can be fetched. Loads nothing."""
    model = model_name(variable, default, environment)
    if (Path(model).expanduser() / "config.json").is_file():
        return
    if not is_hub_id(model):
        raise InputError(f"{variable} = {model!r}: must be a folder with config.json, or a hub id")
    try:
        require_weights(model)
    except HubError as error:
        raise InputError(
            f"{variable} = {model!r}: is not cached here, and {error}: fetch it first, or name a folder"
        ) from error


def model_name(variable: str, default: str, environment: Mapping[str, str]) -> str:
    """Folder or hub id."""
    return environment.get(variable, "").strip() or default


def device_name(environment: Mapping[str, str]) -> str:
    return environment.get(DEVICE_VARIABLE, "").strip() or "cpu"
