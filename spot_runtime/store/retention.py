"""How long a store keeps what runs leave behind. Owns the rule; which commits a living job still needs is control's to say.

    runs/RUN/commits, runs/RUN/samples      needed while the run goes on: latents and trajectories
    runs/RUN/...                            what a run hands over: policies, manifests, banks, history, images

A run goes on as long as anything of it is younger than the age that the caller names.
"""

from __future__ import annotations

from dataclasses import dataclass

from spot_runtime.store.garbage import Collected
from spot_runtime.store.tensors import TensorStore

RUNS = "runs"
PASSING = ("commits", "samples")
"""Folders of a run that nothing needs once it has ended."""


@dataclass(frozen=True)
class Swept:
    """Runs that were looked at and found ended, what was removed of them, and blobs that no object owned."""

    ended_runs: tuple[str, ...]
    keys: tuple[str, ...]
    orphans: int


def sweep(store: TensorStore, older_than_s: float, *, whole_runs: bool = False, dry_run: bool = False) -> Swept:
    """Removes what ended runs left in passing, with `whole_runs` all of them, and parts and temp files of writers that died.

    A run is asked about once more just before anything of it goes. With `dry_run` nothing is removed and no orphans are counted.
    """
    ended = [run for run in _runs(store) if _is_ended(store, run, older_than_s)]
    keys: list[str] = []
    for run in ended:
        going = [key for key in store.list(f"{RUNS}/{run}") if whole_runs or _is_passing(key)]
        if dry_run:
            keys += going
        elif _is_ended(store, run, older_than_s):
            keys += store.collect(f"{RUNS}/{run}", older_than_s, lambda key: not (whole_runs or _is_passing(key))).keys
    orphans = Collected((), 0) if dry_run else store.collect("", older_than_s, lambda _: True)
    return Swept(tuple(ended), tuple(sorted(keys)), orphans.orphans)


def _runs(store: TensorStore) -> list[str]:
    return sorted({key.split("/")[1] for key in store.list(RUNS) if key.count("/") >= 2})


def _is_ended(store: TensorStore, run: str, older_than_s: float) -> bool:
    return all(age_s >= older_than_s for age_s in store.ages_s(f"{RUNS}/{run}").values())


def _is_passing(key: str) -> bool:
    return key.split("/")[2] in PASSING
