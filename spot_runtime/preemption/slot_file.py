"""Which slots a machine has, where they come and go one by one: a file that appears. Owns its format and the thread that looks for it."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.02
SLOTS_MAX = 64

_FILE_BYTES_MAX = 4096
_STOP_S = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlotNotice:
    """The machine has `slots` from now on; those that it loses go away in `grace_period_s`."""

    slots: tuple[int, ...]
    grace_period_s: float


def write_slots(path: Path, slots: Sequence[int], grace_period_s: float) -> None:
    """Delivers a change to the watcher of `path`, at once as a whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps({"slots": sorted(slots), "grace_period_s": grace_period_s}))
    draft.replace(path)


class SlotFileWatcher:
    """Delivers what `path` says whenever it appears, and removes it. A file that cannot be read changes nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, deliver: Callable[[SlotNotice], object]) -> None:
        """Begins to watch; `deliver` is called from a thread, so it must neither block nor fail (`loop.post`)."""
        assert self._thread is None, "started twice"
        self._thread = threading.Thread(target=self._watch, args=(deliver,), name="slot-file", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _watch(self, deliver: Callable[[SlotNotice], object]) -> None:
        taken = self._path.with_name(f".{self._path.name}.taken")
        while not self._stopped.wait(POLL_S):
            try:
                self._path.replace(taken)  # a change that is written meanwhile is not lost
                notice = _parse(taken.read_bytes()[:_FILE_BYTES_MAX])
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                _log.warning("slot file cannot be read", extra={"path": str(self._path), "reason": str(error)})
                continue
            deliver(notice)


def _parse(content: bytes) -> SlotNotice:
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
