"""A run that goes on from a checkpoint: the same run, under its own name, in its own store.

Owns what may differ from what the run began with (only how many iterations it has, and its target). Never writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spot_runtime.config import RunSettings, TrainConfig
from spot_runtime.errors import InputError
from spot_runtime.models.address import find_model
from spot_runtime.store.address import local_folder, recorded, same_store
from spot_runtime.store.checkpoints import RUNS_FOLDER, FoundCheckpoint, find_checkpoint
from tasks.local_run import current_run
from tasks.models import Exploration, State
from tasks.options import UNSAID


def resumed_state(resume_from: str, given: Mapping[str, Any], cfg: Mapping[str, Any]) -> State:
    """The State to go on with.

    Args:
        resume_from: as `find_checkpoint`.
        given: options of the command line by name; an empty or default one means the run's own.
        cfg: fields of TrainConfig; each must be the run's own.

    A run that has all its iterations only validates its policy and makes its report again. Raises InputError with one line: no such
    checkpoint, or an option that is not the run's own.
    """
    config = _parsed(cfg, given["exploration"])
    lineage = config.lineage or given["dataset"].value
    found = find_checkpoint(resume_from, store_url=given["store"], lineage=lineage)
    state = State.model_validate_json(found.checkpoint.state_json)
    state = _where_it_was_found(state, found.store_url)
    settings = state.settings
    _check_options(settings, given)
    _check_config(settings.config, config, cfg)
    _check_model_unchanged(settings)
    state = _extended(state, given["iterations"], given["target_score"])
    _tell(found, state)
    folder = str(_folder(state)) if current_run() is not None else ""
    return state.model_copy(update={"folder": folder})


def with_mode(config: TrainConfig, exploration: Exploration) -> TrainConfig:
    """`config` with the strategy of the command line. Raises InputError where the two do not go together."""
    values = config.model_dump()
    return TrainConfig.parse({**values, "exploration": {**values["exploration"], "mode": exploration.value}})


def _parsed(cfg: Mapping[str, Any], exploration: Exploration) -> TrainConfig:
    """As the command line that began a run has it: an option goes before the file."""
    try:
        config = TrainConfig.parse(dict(cfg))
    except InputError as error:
        raise InputError(f"cfg.{error}") from error
    return with_mode(config, exploration) if UNSAID.is_said("exploration", exploration) else config


def _where_it_was_found(state: State, store_url: str) -> State:
    """A run whose store was moved or copied goes on where the checkpoint is, never in the store that it was made in."""
    if same_store(store_url, state.settings.store):
        return state
    settings = state.settings.model_copy(update={"store": recorded(store_url)})
    store = local_folder(store_url)
    beside = store.parent if store is not None and store.parent.name == state.run_id else None
    return state.model_copy(update={"settings_json": settings.model_dump_json(), "folder": str(beside or "")})


def _check_options(settings: RunSettings, given: Mapping[str, Any]) -> None:
    """What was given must be what the run has; prompts and reward are in its stored rows and cannot be given again."""
    for name in ("prompts", "reward"):
        if given[name]:
            raise InputError(f"{name} = {given[name]!r}: must be empty, run {settings.run_id} keeps the rows it has")
    own = {
        "dataset": settings.dataset,
        "resolution": settings.resolution,
        "model": settings.model,
        "store": settings.store,
        "seed": settings.seed,
        "exploration": settings.config.exploration.mode,
    }
    for name, value in own.items():
        if UNSAID.is_said(name, given[name]) and not _is_own(name, given[name], value):
            raise InputError(f"{name} = {_text(given[name])}: run {settings.run_id} has {_text(value)}, and keeps it")


def _check_config(own: TrainConfig, given: TrainConfig, cfg: Mapping[str, Any]) -> None:
    for section, value in cfg.items():
        fields = value if isinstance(value, Mapping) else {"": value}
        for name in fields:
            ours, theirs = (getattr(config, section) for config in (own, given))
            if name:
                ours, theirs = getattr(ours, name), getattr(theirs, name)
            if ours != theirs:
                path = f"cfg.{section}.{name}".removesuffix(".")
                raise InputError(f"{path} = {theirs!r}: the run has {ours!r}, and keeps it")


def _check_model_unchanged(settings: RunSettings) -> None:
    digest = find_model(settings.model, settings.store, settings.resolution).digest
    if digest != settings.model_digest:
        raise InputError(
            f"model = {settings.model!r}: digest {digest[:12]}…, run {settings.run_id} began with {settings.model_digest[:12]}…"
        )


def _extended(state: State, iterations: int, target_score: float) -> State:
    """With more iterations or another target, if asked."""
    total = iterations if UNSAID.is_said("iterations", iterations) else state.iterations
    changes = {"iterations": total, "target_score": target_score or state.settings.target_score}
    settings = RunSettings.parse(state.settings.model_dump() | changes)
    return state.model_copy(update={"iterations": total, "settings_json": settings.model_dump_json()})


def _folder(state: State) -> Path:
    """Where its outputs and its cluster's journal are, if that is still there."""
    return (
        Path(state.folder)
        if state.folder and Path(state.folder).is_dir()
        else Path(RUNS_FOLDER).absolute() / state.run_id
    )


def _tell(found: FoundCheckpoint, state: State) -> None:
    if (run := current_run()) is None:
        return
    for reason in found.passed_over:
        run.progress.note(f"passed over {reason}")
    rest = "only its last validation and report are left" if state.is_finished else f"of {state.iterations}"
    run.progress.note(f"resuming run {state.run_id} after iteration {state.iteration}, {rest}")


def _is_own(name: str, given: Any, own: Any) -> bool:
    """Whether an option is the run's own, however a folder is spelt."""
    if name == "store":
        return same_store(given, own)
    return bool(given == own) or (name == "model" and Path(given).expanduser().absolute() == Path(own))


def _text(value: Any) -> str:
    return repr(getattr(value, "value", value))
