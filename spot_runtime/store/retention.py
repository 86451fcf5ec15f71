"""How long a store keeps what runs leave behind. Owns the rule; which commits a living job still needs is control's to say.

    runs/RUN/commits, runs/RUN/samples      needed while the run goes on: latents and trajectories
    runs/RUN/...                            what a run hands over: policies, manifests, banks, history, images

A run goes on as long as anything of it is younger than the age that the caller names. One that was broken off may be resumed at any time,
also while it is swept: of what it left in passing, what came after its newest checkpoint and what any of its checkpoints names stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spot_runtime.errors import CorruptObjectError, InputError, MissingObjectError
from spot_runtime.store.checkpoints import all_records, taken_over
from spot_runtime.store.garbage import Collected
from spot_runtime.store.tensors import TensorStore

RUNS, LINEAGES = "runs", "lineages"
PASSING = ("commits", "samples")
"""Folders of a run that nothing needs once the iteration that wrote it is over."""
WHOLE_RUNS_S_MIN = 24 * 3600.0
"""No job is silent for so long."""


@dataclass(frozen=True)
class Swept:
    """Runs that were looked at and found ended, what was removed of them, and blobs that no object owned."""

    ended_runs: tuple[str, ...]
    keys: tuple[str, ...]
    orphans: int


def sweep(store: TensorStore, older_than_s: float, *, whole_runs: bool = False, dry_run: bool = False) -> Swept:
    """Removes what ended runs left in passing, with `whole_runs` all of them, and parts and temp files of writers that died.

    A run is asked about once more just before anything of it goes; of a whole run the checkpoints go first, so that nobody resumes it
    from then on. With `dry_run` nothing is removed and no orphans are counted. Raises InputError where whole runs would go too early.
    """
    if whole_runs and older_than_s < WHOLE_RUNS_S_MIN:
        raise InputError(
            f"older_than_h = {older_than_s / 3600:g}: must be >= {WHOLE_RUNS_S_MIN / 3600:g} to remove whole runs"
        )
    ended = [run for run in _runs(store) if _is_ended(store, run, older_than_s)]
    keys: list[str] = []
    for run in ended:
        goes = _all_of_it if whole_runs else _passing(store, run)
        if dry_run:
            keys += [key for key in store.list(f"{RUNS}/{run}") if goes(key)]
        elif _is_ended(store, run, older_than_s):
            if whole_runs:
                _forget_name(store, run)
            for folder in (f"{RUNS}/{run}/checkpoints", f"{RUNS}/{run}"):
                keys += store.collect(folder, older_than_s, lambda key, goes=goes: not goes(key)).keys  # type: ignore[misc]
    orphans = Collected((), 0) if dry_run else store.collect("", older_than_s, lambda _: True)
    return Swept(tuple(ended), tuple(sorted(keys)), orphans.orphans)


def _runs(store: TensorStore) -> list[str]:
    return sorted({key.split("/")[1] for key in store.list(RUNS) if key.count("/") >= 2})


def _is_ended(store: TensorStore, run: str, older_than_s: float) -> bool:
    return all(age_s >= older_than_s for age_s in store.ages_s(f"{RUNS}/{run}").values())


def _forget_name(store: TensorStore, run: str) -> None:
    for key in store.list(LINEAGES):
        if key.endswith(f"/{run}.json"):
            store.delete(key)


def _all_of_it(_key: str) -> bool:
    return True


def _passing(store: TensorStore, run: str) -> Callable[[str], bool]:
    """Which keys of the run were left in passing and are of no use to a resume."""
    ages_s = store.ages_s(f"{RUNS}/{run}")
    needed: frozenset[str] = frozenset()
    try:
        records = all_records(store, run)
        if records:
            since_s = ages_s.get(list(records)[-1], 0.0)
            needed = frozenset(each for each, age_s in ages_s.items() if age_s <= since_s)
        for checkpoint in records.values():  # any of them may be the newest that is whole
            needed |= taken_over(store, checkpoint)
    except (MissingObjectError, CorruptObjectError):
        return lambda _: False  # what they name cannot be told: all stays
    return lambda key: key in ages_s and key not in needed and key.split("/")[2] in PASSING
