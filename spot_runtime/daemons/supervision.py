"""Keeps a set of child processes alive. Owns starts, restarts within a bound, and the end of all; never knows what a child is for.

A child that dies is started again with the same configuration, later each time. One that dies too often ends them all: a half-dead cluster
would look like a slow one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spot_runtime.config import Frozen
from spot_runtime.daemons.process import Child, Family, spawn
from spot_runtime.errors import ClusterError, SpotlightError

_POLL_S = 0.05
_BACKOFF_S = 0.2
_BACKOFF_MAX_S = 5.0
_FAMILY_S = 10.0
_JOIN_S = 30.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Member:
    """One process to keep."""

    name: str
    module: str
    config: Frozen
    cores: tuple[int, ...] | None = None
    threads: int = 1
    stage: int = 0
    """Members of a higher stage are ended before those of a lower one."""
    may_leave: bool = False
    """An end with exit code 0 is a departure: it is not started again."""


@dataclass
class _Watched:
    """A member and its current process."""

    member: Member
    child: Child
    facts: dict[str, Any] | None = None
    """What it said when it was ready; None until then."""
    deaths_s: list[float] = field(default_factory=list)
    restart_at_s: float | None = None
    """Set while it is dead and to be started again."""
    left: bool = False


class Supervisor:
    """Starts all members at once, waits until each is ready, then watches them from a thread until `stop`.

    Args:
        logs: folder of `NAME.log` for each member.
        start_deadline_s: a member must be ready within this, at every start.
        restarts_max: deaths of one member within `window_s` that are made good.
    """

    def __init__(
        self,
        members: Sequence[Member],
        logs: Path,
        *,
        start_deadline_s: float,
        restarts_max: int = 10,
        window_s: float = 60.0,
    ) -> None:
        self._members = members
        self._logs = logs
        self._start_deadline_s = start_deadline_s
        self._restarts_max = restarts_max
        self._window_s = window_s
        self._family = Family()
        self._watched: list[_Watched] = []
        self._failure: ClusterError | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def start(self) -> dict[str, dict[str, Any]]:
        """Starts all and returns what each said when it was ready, by name. On an error nothing is left running.

        Raises:
            ClusterError: a member died or was late.
            SpotlightError: the class that a member ended with.
        """
        try:
            for member in self._members:
                self._watched.append(_Watched(member, self._spawn(member)))
            self._await_ready()
        except BaseException:
            self.stop(0.0)
            raise
        self._thread.start()
        return {each.member.name: each.facts or {} for each in self._watched}

    def stop(self, grace_s: float = 5.0) -> None:
        """Ends all, in order, and waits until their descendants are gone too. May be called again."""
        self._stopping.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                _log.error("the watching thread is left", extra={"after_s": _JOIN_S})
        try:
            for stage in sorted({each.member.stage for each in self._watched}, reverse=True):
                _end([each.child for each in self._watched if each.member.stage == stage], grace_s)
        finally:
            self._kill_all()
        if self._family.open and not self._family.wait(_FAMILY_S):
            _log.error("descendants are left", extra={"after_s": _FAMILY_S})
        self._family.close()

    def check(self) -> None:
        """Raises ClusterError where a member died too often; everything has been ended then."""
        if self._failure is not None:
            raise self._failure

    def pids(self) -> dict[str, int]:
        """Process ids of the members that run."""
        return {each.member.name: each.child.pid for each in self._watched if each.child.poll() is None}

    # ---- starting

    def _spawn(self, member: Member) -> Child:
        log_path = self._logs / f"{member.name}.log"
        return spawn(
            member.module,
            member.config,
            cores=member.cores,
            log_path=log_path,
            threads=member.threads,
            family=self._family,
        )

    def _await_ready(self) -> None:
        """Takes answers as they come, so that the first error is the one that is raised."""
        while waiting := [each for each in self._watched if each.facts is None]:
            for each in waiting:
                if each.child.answered() or self._is_late(each):
                    each.facts = each.child.ready(self._start_deadline_s)
            time.sleep(_POLL_S / 5)

    def _is_late(self, each: _Watched) -> bool:
        return time.monotonic() > each.child.started_s + self._start_deadline_s

    # ---- watching

    def _watch(self) -> None:
        while not self._stopping.wait(_POLL_S):
            try:
                for each in self._watched:
                    self._look_at(each, time.monotonic())
            except ClusterError as error:
                _log.error("the cluster ends", extra={"error": str(error)})
                self._failure = error
                self._kill_all()
                return

    def _look_at(self, each: _Watched, now_s: float) -> None:
        if each.left:
            return
        if each.restart_at_s is not None:
            if now_s >= each.restart_at_s:
                each.child, each.facts, each.restart_at_s = self._spawn(each.member), None, None
        elif each.child.poll() is not None:
            self._mourn(each, now_s)
        elif each.facts is None:
            self._await_restarted(each)

    def _mourn(self, each: _Watched, now_s: float) -> None:
        """Decides what follows from a death."""
        code = each.child.terminate(0.0)
        if code == 0 and each.member.may_leave:
            _log.info("member left", extra={"member": each.member.name})
            each.left = True
            return
        each.deaths_s = [death_s for death_s in each.deaths_s if now_s - death_s < self._window_s] + [now_s]
        count = len(each.deaths_s)
        if count > self._restarts_max:
            raise ClusterError(
                f"{each.member.name} died {count} times within {self._window_s:g} s, last with exit code {code}:"
                f" must be <= {self._restarts_max}: {each.child.last_lines()}"
            )
        each.restart_at_s = now_s + _backoff_s(count)
        _log.warning("member died", extra={"member": each.member.name, "exit_code": code, "deaths": count})

    def _await_restarted(self, each: _Watched) -> None:
        """A start that fails shows as a death; one that hangs is ended here."""
        if each.child.answered():
            try:
                each.facts = each.child.ready(self._start_deadline_s)
            except SpotlightError as error:
                each.facts = {}
                _log.warning("restart failed", extra={"member": each.member.name, "error": str(error)})
        elif self._is_late(each):
            each.child.kill()

    def _kill_all(self) -> None:
        for each in self._watched:
            each.child.kill()


def _end(children: Sequence[Child], grace_s: float) -> None:
    """Asks all at once; whoever is there after the grace period is killed."""
    end_s = time.monotonic() + grace_s
    for child in children:
        child.ask_to_end()
    for child in children:
        child.terminate(end_s - time.monotonic())


def _backoff_s(deaths: int) -> float:
    """None after the first death, then doubling."""
    return 0.0 if deaths == 1 else min(_BACKOFF_MAX_S, _BACKOFF_S * 2.0 ** (deaths - 2))
