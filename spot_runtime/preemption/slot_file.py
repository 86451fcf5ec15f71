"""Which slots a machine has, where they come and go one by one: a file that appears. Owns its format."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spot_runtime.preemption.file import FileWatcher, write_whole

SLOTS_MAX = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlotNotice:
    """The machine has `slots` from now on; those that it loses go away in `grace_period_s`."""

    slots: tuple[int, ...]
    grace_period_s: float


def write_slots(path: Path, slots: Sequence[int], grace_period_s: float) -> None:
    """Delivers a change to the watcher of `path`."""
    write_whole(path, {"slots": sorted(slots), "grace_period_s": grace_period_s})


def slot_file_watcher(path: Path) -> FileWatcher[SlotNotice]:
    """Delivers what `path` says whenever it appears. A file that cannot be read changes nothing."""
    return FileWatcher(path, _parse)


def _parse(content: bytes) -> SlotNotice | None:
    try:
        return _checked(content)
    except ValueError as error:
        _log.warning("slot file cannot be read", extra={"reason": str(error)})
        return None


def _checked(content: bytes) -> SlotNotice:
    """Raises ValueError that names what is wrong."""
    try:
        said = json.loads(content)
        slots, grace_period_s = tuple(sorted({int(slot) for slot in said["slots"]})), float(said["grace_period_s"])
    except (TypeError, KeyError, RecursionError, OverflowError) as error:
        raise ValueError(f"not slots and a grace period: {error}") from error
    if not all(0 <= slot < SLOTS_MAX for slot in slots):
        raise ValueError(f"slots = {slots}: must be within [0, {SLOTS_MAX})")
    if not grace_period_s >= 0:
        raise ValueError(f"grace_period_s = {grace_period_s}: must be >= 0")
    return SlotNotice(slots, grace_period_s)
