"""A run's policy as a folder that stock diffusers loads. Owns what is in the folder; never trains and never changes a run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from spot_runtime.config import RunSettings
from spot_runtime.diffusion.adapter import Adapter, export_adapter
from spot_runtime.diffusion.geometry import model_folder
from spot_runtime.diffusion.state import TrainerState
from spot_runtime.diffusion.weights import export_weights, is_whole
from spot_runtime.errors import InputError
from spot_runtime.models.address import local_model
from spot_runtime.store.checkpoints import STATE_BYTES_MAX, FoundCheckpoint, find_checkpoint, trainer_key
from spot_runtime.store.tensors import TensorStore

CARD = "spotlight.json"
"""Says in the folder where the policy comes from."""


def export_policy(name: str, folder: Path, *, store_url: str = "", ema: bool = False, lineage: str = "") -> Path:
    """Writes the policy of a checkpoint to `folder`, which appears whole or not at all, and returns it.

    An adapter becomes what `pipeline.load_lora_weights(folder)` reads, a whole policy a `transformer/` of its own.

    Args:
        name: as `find_checkpoint`.
        folder: must not exist, or be empty.
        ema: the moving average instead of the policy itself.

    Raises InputError where there is no such checkpoint, policy or average, or the folder cannot be written.
    """
    folder = _place(folder)
    found = find_checkpoint(name, store_url=store_url, lineage=lineage, option="run")
    settings = RunSettings.parse_json(found.checkpoint.settings_json)
    policy = _policy(found, ema=ema)
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        if is_whole(policy):
            export_weights(draft, policy, _model(settings, found.store_url) / "transformer" / "config.json")
        else:
            export_adapter(draft, policy)
        (draft / CARD).write_text(json.dumps(_card(found, settings, ema=ema), indent=2) + "\n")
        if folder.exists():
            folder.rmdir()
        draft.replace(folder)
    except OSError as error:
        raise InputError(f"folder = {folder}: {error.strerror}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _place(folder: Path) -> Path:
    """Absolute, for it is replaced as a whole: also where it is the working directory."""
    try:
        place = folder.expanduser().resolve()
        is_free = not place.exists() or (place.is_dir() and not any(place.iterdir()))
    except (OSError, ValueError) as error:  # too long a name, or one with a byte that no name has
        raise InputError(f"folder = {str(folder)[:80]!r}: {getattr(error, 'strerror', None) or error}") from error
    if not is_free:
        raise InputError(f"folder = {folder}: must not exist yet, or be empty")
    return place


def _model(settings: RunSettings, store_url: str) -> Path:
    return model_folder(local_model(settings.model, store_url))


def _policy(found: FoundCheckpoint, *, ema: bool) -> Adapter:
    checkpoint = found.checkpoint
    if not checkpoint.policy.key:
        raise InputError(f"run {checkpoint.run_id} has trained 0 iterations: must have trained at least 1")
    stored = TensorStore(found.store_url).get(trainer_key(checkpoint.policy), bytes_max=STATE_BYTES_MAX)
    state = TrainerState.from_tensors(stored.tensors)
    if ema and not state.ema:
        raise InputError(f"ema = True: run {checkpoint.run_id} keeps no average, cfg.grpo.ema_decay must be > 0")
    return state.ema if ema else state.adapter


def _card(found: FoundCheckpoint, settings: RunSettings, *, ema: bool) -> dict[str, object]:
    checkpoint = found.checkpoint
    return {
        "run_id": checkpoint.run_id,
        "iteration": checkpoint.iteration,
        "policy_version": checkpoint.policy.version,
        "policy_digest": checkpoint.policy.digest,
        "is_average": ema,
        "model": settings.model,
        "model_digest": settings.model_digest,
    }
