"""A file that appears and says something: the embedded cluster's notices and changes of slots. Owns the thread that looks for it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

POLL_S = 0.05

_FILE_BYTES_MAX = 4096
_STOP_S = 5.0
T = TypeVar("T")


def write_whole(path: Path, said: Mapping[str, Any]) -> None:
    """Lets `path` appear as JSON, at once as a whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(said))
    draft.replace(path)


class FileWatcher(Generic[T]):
    """Takes `path` away whenever it appears, and delivers what `parse` makes of its first bytes unless that is None.

    A file that cannot be read is empty to `parse`, which raises nothing. `once`: the first delivery is the last.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], T | None], *, once: bool = False) -> None:
        self._path, self._parse, self._once = path, parse, once
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, deliver: Callable[[T], object]) -> None:
        """Begins to watch; `deliver` is called from a thread, so it must neither block nor fail (`loop.post`)."""
        assert self._thread is None, "started twice"
        self._thread = threading.Thread(target=self._watch, args=(deliver,), name=self._path.name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch; nothing is delivered afterwards. May be called again."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _watch(self, deliver: Callable[[T], object]) -> None:
        while not self._stopped.wait(POLL_S):
            if not self._path.exists():
                continue
            said = self._parse(self._take())
            if said is not None:
                deliver(said)
                if self._once:
                    return

    def _take(self) -> bytes:
        """Moves it away before it is read: what is written meanwhile is not lost."""
        taken = self._path.with_name(f".{self._path.name}.taken")
        try:
            self._path.replace(taken)
            with taken.open("rb") as file:
                content = file.read(_FILE_BYTES_MAX)
            taken.unlink()
        except OSError:
            return b""
        return content
