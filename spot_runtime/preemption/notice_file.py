"""The embedded cluster's preemption notice: a file that appears. Owns its format."""

from __future__ import annotations

import json
from pathlib import Path

from spot_runtime.preemption.file import FileWatcher, write_whole
from spot_runtime.preemption.notice import PreemptionNotice

DEFAULT_GRACE_PERIOD_S = 30.0
"""The shortest that a large cloud gives (GCP, Azure)."""

_GRACE_PERIOD_S_MAX = 86_400.0


def write_notice(path: Path, grace_period_s: float) -> None:
    """Delivers a notice to the watcher of `path`."""
    write_whole(path, {"grace_period_s": grace_period_s})


def notice_file_watcher(path: Path) -> FileWatcher[PreemptionNotice]:
    """Delivers one notice when `path` appears; it is gone then, so that the node's successor does not take it for its own.

    A file without a readable grace period is a notice all the same, of DEFAULT_GRACE_PERIOD_S.
    """
    return FileWatcher(path, lambda content: PreemptionNotice(_grace_period_s(content), "file"), once=True)


def _grace_period_s(content: bytes) -> float:
    try:
        value = float(json.loads(content)["grace_period_s"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return DEFAULT_GRACE_PERIOD_S
    return value if 0 <= value <= _GRACE_PERIOD_S_MAX else DEFAULT_GRACE_PERIOD_S
