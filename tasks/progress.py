"""What a person sees while a local run waits: one live line on a terminal, plain lines at a bounded rate elsewhere. All on stderr.

Owns wording and rate. Never polls and never decides; tasks report what they learn anyway.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.text import Text

from spot_runtime.messages import JobStatus
from spot_runtime.types import JobPhase, Op

PLAIN_EVERY_S = 10.0
"""Without a terminal an unfinished phase says something at most this often."""
PHASE_WORDS = {Op.ROLLOUT: "rollout", Op.TRAIN_STEP: "train", Op.EXPLORE: "explore", Op.EVALUATE: "validate"}


@dataclass
class _Shown:
    """A job that is under way."""

    status: JobStatus
    printed_s: float


class Progress:
    """Thread-safe; `iterations` becomes known when the first task has run."""

    def __init__(self, console: Console | None = None, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._now_s = now_s
        self._lock = threading.Lock()
        self._jobs: dict[str, _Shown] = {}
        self._live: Live | None = None
        self.iterations = 0

    def show(self, status: JobStatus) -> None:
        """Takes in one poll of a job."""
        with self._lock:
            shown = self._jobs.setdefault(status.job_id, _Shown(status, self._now_s()))
            shown.status = status
            if status.phase.is_final:
                del self._jobs[status.job_id]
            self._print(shown)

    def forget(self, job_id: str) -> None:
        """A job that nobody polls any more."""
        with self._lock:
            self._jobs.pop(job_id, None)
            self._refresh()

    def note(self, text: str) -> None:
        """A line that stays."""
        with self._lock:
            self._console.print(Text(text))

    def close(self) -> None:
        """Takes the live line away."""
        with self._lock:
            if self._live is not None:
                self._live.stop()
                self._live = None

    def _print(self, shown: _Shown) -> None:
        if self._console.is_terminal:
            self._refresh()
            return
        done = shown.status.phase is JobPhase.SUCCEEDED
        if done or self._now_s() - shown.printed_s >= PLAIN_EVERY_S:
            shown.printed_s = self._now_s()
            self._console.print(Text(f"{self._place(shown.status)} {_counts(shown.status)}{_facts(shown.status)}"))

    def _refresh(self) -> None:
        if not self._console.is_terminal or not self._jobs:
            return
        statuses = [shown.status for shown in self._jobs.values()]
        counts = " · ".join(_counts(status) for status in statuses)
        line = Text(f"{self._place(statuses[0])} {counts}{_facts(statuses[-1])}", no_wrap=True, overflow="ellipsis")
        if self._live is None:
            self._live = Live(
                line,
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(line, refresh=True)

    def _place(self, status: JobStatus) -> str:
        if self.iterations and status.iteration >= self.iterations:
            return "final policy:"
        return f"iteration {status.iteration + 1}/{self.iterations or '?'}:"


def _counts(status: JobStatus) -> str:
    word = PHASE_WORDS[status.op]
    if not status.total:
        return f"{word} ({_why_nothing(status)})"
    done = status.done if status.op is Op.TRAIN_STEP else status.scored
    failed = f", {status.failed} failed" if status.failed else ""
    waiting = status.done - done
    rewards = f", {waiting} wait for their rewards" if waiting and not status.scored else ""
    return f"{word} {done}/{status.total}{failed}{rewards}"


def _why_nothing(status: JobStatus) -> str:
    if status.phase.is_final:
        return status.message or "nothing to do"
    return "encoding prompts" if status.phase is JobPhase.ENCODING else status.message or "waiting"


def _facts(status: JobStatus) -> str:
    reward = f" · mean reward {status.reward_mean:.3f}" if status.scored else ""
    return f" · spot slots {status.spot_slots}{reward} · {status.elapsed_s:.1f} s"
