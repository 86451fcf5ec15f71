"""`--cfg`: what a run changes of its configuration, as JSON, a JSON file or a YAML file. Owns how such a text is found and read.

Flyte's own type for a dict reads the same texts, but a mistake is a traceback there and one line here. Never knows which fields exist.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from flytekit.core.context_manager import FlyteContext
from flytekit.core.type_engine import SimpleTransformer, TypeEngine
from flytekit.models.literals import Literal, Primitive, Scalar
from flytekit.models.types import LiteralType, SimpleType

from spot_runtime.errors import InputError

YAML_SUFFIXES = (".yaml", ".yml")


class Changes(str):
    """JSON text of an object: fields of TrainConfig that differ from their defaults."""

    def fields(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self or "{}")
        return values


NO_CHANGES = Changes()


def read_changes(given: str | dict[str, Any]) -> Changes:
    """`given` is an object, its JSON text, or the path of a JSON or YAML file. Raises InputError with one line."""
    if isinstance(given, dict):
        return Changes(json.dumps(given))
    if isinstance(given, Changes) or not given.strip():
        return Changes(given.strip())
    if given.lstrip().startswith(("{", "[")):
        return _object("cfg", _json("cfg", given))
    path, field = Path(given), f"cfg = {given}"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(f"{field}: neither a JSON object nor a file") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{field}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return _object(field, _yaml(field, text) if path.suffix in YAML_SUFFIXES else _json(field, text))


def _object(field: str, values: Any) -> Changes:
    if not isinstance(values, dict):
        raise InputError(f"{field}: must be an object of fields, is {'empty' if values is None else repr(values)[:60]}")
    try:
        return Changes(json.dumps(values))
    except (TypeError, ValueError) as error:  # YAML has dates and keys that are no text
        raise InputError(f"{field}: must be an object that JSON can write: {error}") from error


def _json(field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{field}: not JSON: {error}") from error


def _yaml(field: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{field}: not YAML: {' '.join(str(error).split())}") from error


class ChangesTransformer(SimpleTransformer[Changes]):  # type: ignore[misc]
    """As a Flyte string, read where the run is started: a remote task has no use for the name of a file on somebody's laptop."""

    type_assertions_enabled = False

    def __init__(self) -> None:
        super().__init__("Changes", Changes, LiteralType(simple=SimpleType.STRING), _literal, _changes)

    def to_literal(
        self, ctx: FlyteContext, python_val: Any, python_type: type[Changes], expected: LiteralType
    ) -> Literal:
        made: Literal = super().to_literal(ctx, read_changes(python_val), python_type, expected)
        return made


def _literal(changes: Changes) -> Literal:
    return Literal(scalar=Scalar(primitive=Primitive(string_value=str(changes))))


def _changes(literal: Literal) -> Changes:
    return Changes(literal.scalar.primitive.string_value)


TypeEngine.register(ChangesTransformer())
