"""One line an event, `key=value`. Owns the format of every daemon's log; never decides what is worth a line.

`logging.getLogger(__name__).info("sample done", extra={"job_id": …, "request_id": …})` prints

    2026-01-31T12:00:00.123Z INFO daemon=node node_id=spot-0 event="sample done" job_id=… request_id=…
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import IO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_PLAIN = re.compile(r"[^\s\"=]+")
_VALUE_CHARACTERS_MAX = 2000


class KeyValueFormatter(logging.Formatter):
    """Time in UTC, level, who speaks, the event, then whatever `extra` carried. A traceback follows on lines of its own.

    Args:
        speaker: what every line carries, such as `daemon` and `node_id`; empty values are left out.
    """

    def __init__(self, **speaker: str) -> None:
        super().__init__()
        self._speaker = {key: value for key, value in speaker.items() if value}

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        pairs = {**self._speaker, "event": record.getMessage(), **carried(record)}
        line = f"{moment}.{int(record.msecs):03d}Z {record.levelname} " + " ".join(
            f"{key}={_value(value)}" for key, value in pairs.items()
        )
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def carried(record: logging.LogRecord) -> dict[str, object]:
    """What `extra` carried."""
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def configure(
    daemon: str, ids: Mapping[str, str] | None = None, *, stream: IO[str] | None = None, level: int = logging.INFO
) -> None:
    """Sends all of this process's log lines to `stream` (standard error), each with the daemon's name and ids."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(KeyValueFormatter(daemon=daemon, **(ids or {})))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for chatty in ("uvicorn", "httpx", "httpcore", "asyncio", "fsspec", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if len(text) > _VALUE_CHARACTERS_MAX:
        text = text[:_VALUE_CHARACTERS_MAX] + "…"
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
