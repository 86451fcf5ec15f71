"""The embedded cluster's notice: a file that appears. Owns its format and the thread that looks for it."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from spot_runtime.preemption.notice import PreemptionNotice

DEFAULT_GRACE_PERIOD_S = 30.0
"""The shortest that a large cloud gives (GCP, Azure)."""
POLL_S = 0.05

_FILE_BYTES_MAX = 4096
_GRACE_PERIOD_S_MAX = 86_400.0
_STOP_S = 5.0
_log = logging.getLogger(__name__)


def write_notice(path: Path, grace_period_s: float) -> None:
    """Delivers a notice to the watcher of `path`, at once as a whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps({"grace_period_s": grace_period_s}))
    draft.replace(path)


class NoticeFileWatcher:
    """Delivers one notice when `path` appears, and removes it, so that the node's successor does not take it for its own.

    A file without a readable grace period is a notice all the same, of DEFAULT_GRACE_PERIOD_S.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, deliver: Callable[[PreemptionNotice], object]) -> None:
        assert self._thread is None, "started twice"
        self._thread = threading.Thread(target=self._watch, args=(deliver,), name="notice-file", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _watch(self, deliver: Callable[[PreemptionNotice], object]) -> None:
        while not self._stopped.wait(POLL_S):
            try:
                with self._path.open("rb") as file:
                    content = file.read(_FILE_BYTES_MAX)
            except FileNotFoundError:
                continue
            except OSError as error:
                _log.warning("notice file cannot be read", extra={"path": str(self._path), "reason": str(error)})
                content = b""
            with suppress(OSError):
                self._path.unlink()
            deliver(PreemptionNotice(_grace_period_s(content), "file"))
            return


def _grace_period_s(content: bytes) -> float:
    try:
        value = float(json.loads(content)["grace_period_s"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return DEFAULT_GRACE_PERIOD_S
    return value if 0 <= value <= _GRACE_PERIOD_S_MAX else DEFAULT_GRACE_PERIOD_S
