"""What `--model` may say: `tiny`, a pipeline folder, a hub id, or `store:NAME`, a model in the run's own store. Owns the last of these.

The rest is `diffusion.geometry`'s. A node finds the folder with `local_model`, once, and hands it to its workers and trainer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from spot_runtime.diffusion.geometry import CheckedModel, check_model, check_names
from spot_runtime.errors import InputError
from spot_runtime.models.cache import pull_model, pull_small_files
from spot_runtime.models.shelf import Progress
from spot_runtime.store.tensors import TensorStore

STORE_PREFIX: Final = "store:"


def is_stored(model: str) -> bool:
    """Whether `model` names one in the store."""
    return model.startswith(STORE_PREFIX)


def find_model(model: str, store: str, resolution: int = 0) -> CheckedModel:
    """`check_model`, for a model in the store too; of that one only the small files are pulled.

    Args:
        model: as the user gave it.
        store: URL of the run's store, "" where none is given.
        resolution: height and width in pixels, 0 the model's own default.

    Raises ModelError, InputError where a model in the store is asked for and no store is given, and StoreError.
    """
    if not is_stored(model):
        return check_model(model, resolution)
    pulled = pull_small_files(_open(model, store), model.removeprefix(STORE_PREFIX))
    names = frozenset(file.path for file in pulled.listing.files)
    return check_names(model, Path(pulled.folder), names, pulled.listing.digest, resolution)


def local_model(model: str, store: str, on_progress: Progress = lambda _done, _all: None) -> str:
    """`model` as it can be loaded here: one in the store becomes its folder in the cache, pulled first where it is not there.

    Raises ModelError, StoreError.
    """
    if not is_stored(model):
        return model
    return pull_model(_open(model, store), model.removeprefix(STORE_PREFIX), on_progress=on_progress).folder


def _open(model: str, store: str) -> TensorStore:
    if not store:
        raise InputError(f"model = {model!r}: needs --store, the store that the model lies in")
    return TensorStore(store)
