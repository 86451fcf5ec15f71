"""Checkpoints of runs: where they lie, which is the last good one, and what a person may call one. Owns their keys; never trains.

A checkpoint is two immutable objects. The trainer's object holds policy, optimizer and average in its tensors, the run's seed and the next
iteration in its meta: all entropy of a run is its seed, and the data of an iteration follow from both. The record commits it, with the
state that the loop goes on with. The record is written last, so a kill at any instruction leaves the whole checkpoint or none.

    runs/RUN/checkpoints/000004.json     record: 4 iterations are finished
    runs/RUN/trainer/4-DIGEST            what it names
    lineages/NAME/RUN.json               a run that goes by NAME
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from spot_runtime.errors import CorruptObjectError, InputError, MissingObjectError, StoreError
from spot_runtime.store.address import shortened
from spot_runtime.store.objects import in_parallel
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import Manifest, PolicyRef

LATEST = "latest"
STATE_BYTES_MAX = 1024**4
"""Of a trainer's object: weights, two moments and an average in fp32 of 60 B parameters. Whoever asks for one means to hold it."""
RUNS_FOLDER = "spotlight-runs"
"""Where local runs lie, below the working directory; each has a store of its own unless one was given."""
_URI = re.compile(
    r"(?P<store>.+?)/runs/(?P<run>[a-z0-9][a-z0-9-]{2,62})(/checkpoints/(?P<iteration>\d{1,6})(\.json)?)?/?"
)
_RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{2,62}")


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one. `iteration` iterations are finished; `state_json` is the loop's own, `settings_json` the run's
    RunSettings, `bank_key` the seeds it goes on with, `samples_key` the manifest of samples that its next rollout takes over."""

    run_id: str
    iteration: int
    lineage: str
    policy: PolicyRef
    state_json: str
    settings_json: str = ""
    bank_key: str = ""
    samples_key: str = ""
    made_s: float = 0.0
    """Seconds since the epoch."""


class FoundCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint whose objects have all been read and verified, and where."""

    store_url: str
    checkpoint: Checkpoint
    passed_over: tuple[str, ...] = ()
    """Why newer ones were not taken, a line each."""


def trainer_key(policy: PolicyRef) -> str:
    """Where the optimizer that belongs to a policy lies."""
    return policy.key.replace("/policies/", "/trainer/")


def checkpoint_key(run_id: str, iteration: int) -> str:
    return f"runs/{run_id}/checkpoints/{iteration:06d}.json"


def lineage_key(lineage: str, run_id: str) -> str:
    return f"lineages/{lineage}/{run_id}.json"


def put_checkpoint(store: TensorStore, checkpoint: Checkpoint) -> None:
    """Commits what the record names; a record of the same policy that is there already stays.

    A run that went back to an earlier checkpoint may come to another policy: from then on the records of the way that it left would be
    taken for its own, so they go, the newest first.
    """
    if _takes_another_way(store, checkpoint):
        later = checkpoint_key(checkpoint.run_id, checkpoint.iteration)
        for key in reversed([key for key in _record_keys(store, checkpoint.run_id) if key >= later]):
            store.delete(key)
    store.put_bytes(lineage_key(checkpoint.lineage, checkpoint.run_id), b"{}")
    store.put_bytes(checkpoint_key(checkpoint.run_id, checkpoint.iteration), msgspec.json.encode(checkpoint))


def _takes_another_way(store: TensorStore, checkpoint: Checkpoint) -> bool:
    try:
        there = _read_record(store, checkpoint_key(checkpoint.run_id, checkpoint.iteration))
    except (MissingObjectError, CorruptObjectError):
        return True  # whose the later ones are cannot be told
    return there.policy.digest != checkpoint.policy.digest


def all_records(store: TensorStore, run_id: str) -> dict[str, Checkpoint]:
    """A run's records by key, oldest first, whether or not what they name is there. Raises MissingObjectError or CorruptObjectError."""
    keys = _record_keys(store, run_id)
    return dict(zip(keys, in_parallel(lambda index: _read_record(store, keys[index]), len(keys)), strict=True))


def taken_over(store: TensorStore, checkpoint: Checkpoint) -> frozenset[str]:
    """Keys of the samples that the next rollout takes over. Raises MissingObjectError or CorruptObjectError."""
    if not checkpoint.samples_key:
        return frozenset()
    try:
        manifest = msgspec.json.decode(store.get_bytes(checkpoint.samples_key), type=Manifest)
    except msgspec.MsgspecError as error:
        raise CorruptObjectError(f"{checkpoint.samples_key}: {error}") from error
    return frozenset(sample.sample_key for sample in manifest.samples if sample.sample_key)


def find_checkpoint(
    name: str, *, store_url: str = "", lineage: str = "", folder: Path | None = None, option: str = "resume_from"
) -> FoundCheckpoint:
    """The checkpoint that a person means.

    Args:
        name: `latest`, a run id, a run's folder, or a URI STORE/runs/RUN[/checkpoints/ITERATION].
        store_url: where to look for `latest` and for run ids; empty: the stores of the runs in `folder`.
        lineage: which runs `latest` chooses among.
        folder: RUNS_FOLDER of the working directory by default.
        option: what the person's word for `name` is, in errors.

    Raises InputError with one line where there is nothing by that name, or nothing of it is whole.
    """
    folder = folder or Path(RUNS_FOLDER).absolute()
    try:
        if name == LATEST:
            return _latest(store_url, lineage, folder)
        url, run_id, iteration = _parse(name, store_url, folder)
        return last_valid(TensorStore(url), run_id, iteration)
    except (StoreError, InputError) as error:
        raise InputError(f"{option} = {shortened(name)!r}: {error}") from error


def last_valid(store: TensorStore, run_id: str, iteration: int | None = None) -> FoundCheckpoint:
    """The newest checkpoint of a run that is whole; with `iteration`, that one.

    Raises MissingObjectError where there is none, CorruptObjectError where none is whole.
    """
    keys = _record_keys(store, run_id)
    if iteration is not None:
        keys = [key for key in keys if key == checkpoint_key(run_id, iteration)]
    if not keys:
        what = "" if iteration is None else f" at iteration {iteration}"
        raise MissingObjectError(f"{store.url} has no checkpoint of run {run_id}{what}")
    passed_over: list[str] = []
    for key in reversed(keys):
        try:
            return FoundCheckpoint(
                store_url=store.url, checkpoint=_read_whole(store, key), passed_over=tuple(passed_over)
            )
        except (CorruptObjectError, MissingObjectError) as error:
            passed_over.append(f"{key}: {error}")
    raise CorruptObjectError(f"none of {len(keys)} checkpoints of run {run_id} is whole: {passed_over[0]}")


def _read_whole(store: TensorStore, key: str) -> Checkpoint:
    """The record of `key`, after every object that it needs was read and verified, of any size and in bounded memory."""
    checkpoint = _read_record(store, key)
    policy = checkpoint.policy
    if policy.key:
        for owner in (trainer_key(policy), policy.key):
            store.verify(owner)
            digest = store.get_meta(owner).get("policy_digest", policy.digest)
            if digest != policy.digest:
                raise CorruptObjectError(f"{owner}: holds policy {digest[:16]}…, must be {policy.digest[:16]}…")
    if checkpoint.bank_key:
        store.verify(checkpoint.bank_key)
    samples = sorted(taken_over(store, checkpoint))
    in_parallel(lambda index: store.verify(samples[index]), len(samples))
    return checkpoint


def _read_record(store: TensorStore, key: str) -> Checkpoint:
    try:
        return msgspec.json.decode(store.get_bytes(key), type=Checkpoint)
    except msgspec.MsgspecError as error:
        raise CorruptObjectError(f"{key}: {error}") from error


class _Run:
    """A run of a lineage: its records that were not looked at yet, the newest of them read."""

    def __init__(self, store: TensorStore, run_id: str) -> None:
        self.store = store
        self.keys = _record_keys(store, run_id)

    def newest(self, passed_over: list[str]) -> Checkpoint | None:
        """The newest record that can be read; None where none is left."""
        while self.keys:
            try:
                return _read_record(self.store, self.keys[-1])
            except (CorruptObjectError, MissingObjectError) as error:
                passed_over.append(f"{self.keys.pop()}: {error}")
        return None


def _latest(store_url: str, lineage: str, folder: Path) -> FoundCheckpoint:
    """Whole objects are read of one checkpoint after the other, from the newest on, until one is whole."""
    passed_over: list[str] = []
    runs = list(_of_lineage(store_url, lineage, folder, passed_over))
    newest = {run: record for run in runs if (record := run.newest(passed_over))}
    while newest:
        run = max(newest, key=lambda run: (newest[run].made_s, newest[run].iteration))
        key = run.keys.pop()
        try:
            whole = _read_whole(run.store, key)
            return FoundCheckpoint(store_url=run.store.url, checkpoint=whole, passed_over=tuple(passed_over))
        except (CorruptObjectError, MissingObjectError) as error:
            passed_over.append(f"{key}: {error}")
        if record := run.newest(passed_over):
            newest[run] = record
        else:
            del newest[run]
    reason = f": {passed_over[0]}" if passed_over else ""
    raise InputError(f"no whole checkpoint of lineage {lineage!r} in {store_url or folder}{reason}")


def _of_lineage(store_url: str, lineage: str, folder: Path, passed_over: list[str]) -> Iterator[_Run]:
    """A store of its own that cannot be read does not keep a run from its checkpoint in another."""
    urls = [store_url] if store_url else [path.absolute().as_uri() for path in sorted(folder.glob("*/store"))]
    for url in urls:
        try:
            store = TensorStore(url)
            for key in store.list(f"lineages/{lineage}"):
                yield _Run(store, key.rpartition("/")[2].removesuffix(".json"))
        except StoreError as error:
            if store_url:
                raise
            passed_over.append(f"{url}: {error}")


def _record_keys(store: TensorStore, run_id: str) -> list[str]:
    """Oldest first."""
    return store.list(f"runs/{run_id}/checkpoints")


def _parse(name: str, store_url: str, folder: Path) -> tuple[str, str, int | None]:
    """Store, run and iteration of anything but `latest`."""
    if match := _URI.fullmatch(name):
        iteration = match["iteration"]
        return match["store"], match["run"], None if iteration is None else int(iteration)
    path = Path(name) if _holds_store(Path(name)) else folder / name
    if not _RUN_ID.fullmatch(path.name) or not (store_url or _holds_store(path)):
        raise InputError(f"must be {LATEST!r}, the id or folder of a run that is there, or a URI STORE/runs/RUN")
    return store_url or (path / "store").absolute().as_uri(), path.name, None


def _holds_store(path: Path) -> bool:
    try:
        return (path / "store").is_dir()
    except OSError:  # no name of a file
        return False
