"""What every cloud's warning becomes, and what a watcher of one is. Owns no source of notices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class PreemptionNotice:
    """This machine goes away in `grace_period_s` seconds from the moment that the notice was delivered."""

    grace_period_s: float
    source: str
    """Who said so: `sigterm`, `file`, a cloud's name."""


class Watcher(Protocol):
    """Looks for notices to this machine. Each notice is delivered once."""

    def start(self, deliver: Callable[[PreemptionNotice], object]) -> None:
        """Begins to watch; `deliver` is called from a thread or a signal handler, so it must neither block nor fail (`loop.post`)."""
        ...

    def stop(self) -> None:
        """Ends the watch; nothing is delivered afterwards. May be called again."""
        ...
