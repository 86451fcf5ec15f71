"""Child processes, from both sides. Owns their start, their ready line, their end with the parent; never what they do.

Parent: `child = spawn(module, config, log_path=…)`, `facts = child.ready(deadline_s)`, `child.terminate(grace_s)`.
Child: `if __name__ == "__main__": run_child(Config, main)` with `main(config, ready) -> exit code`, which calls `ready.send(endpoint=…)`.

A child holds a pipe to its parent (the lifeline) and ends when the parent does, even by kill -9; its own children end with it the same way.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from spot_runtime import lifeline
from spot_runtime.config import Frozen
from spot_runtime.daemons import log
from spot_runtime.errors import ClusterError, SpotlightError, error_tree

C = TypeVar("C", bound=Frozen)

READY_BYTES_MAX = 64 * 1024
"""Bound of a child's ready line."""

_ERROR_CHARACTERS_MAX = 4000
_LOG_LINES = 5
_LOG_TAIL_BYTES = 8192
_END_S = 2.0
_KILL_S = 10.0
_log = logging.getLogger(__name__)


# ---- the parent's side ------------------------------------------------------------------------------------------------------------


class Family:
    """Knows when every descendant is gone: each holds the write end of one pipe, so its end of file is theirs."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()

    @property
    def open(self) -> bool:
        return self._reader >= 0

    def wait(self, deadline_s: float) -> bool:
        """Waits until no descendant is left, `deadline_s` at most, and says whether that is so. Ends the family's use."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1
        return _readable(self._reader, deadline_s)

    def close(self) -> None:
        for end in (self._reader, self.writer):
            if end >= 0:
                os.close(end)
        self._reader = self.writer = -1


class Child:
    """A process that `spawn` started. One thread at a time, except `poll` and `pid`."""

    def __init__(
        self, module: str, process: subprocess.Popen[bytes], lifeline_end: int, ready_end: int, log_path: Path
    ) -> None:
        self.module = module
        self.log_path = log_path
        self.started_s = time.monotonic()
        self._process = process
        self._lifeline_end = lifeline_end
        self._ready_end = ready_end

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def answered(self) -> bool:
        """Whether `ready` would return or raise at once. False once it was killed: nothing it said is left."""
        return self._ready_end >= 0 and _readable(self._ready_end, 0.0)

    def ready(self, deadline_s: float) -> dict[str, Any]:
        """What the child said when it was ready: its `pid` and what it passed to `Ready.send`.

        Args:
            deadline_s: seconds from the start of the process.

        Raises:
            ClusterError: it ended first or is late; its last log lines are in the message.
            SpotlightError: the class that the child itself ended with.
        """
        line = self._ready_line(self.started_s + deadline_s)
        if line is None:
            raise ClusterError(f"{self.module} was not ready within {deadline_s:g} s: {self.last_lines()}")
        if not line.endswith(b"\n"):
            code = self._exit_code()
            raise ClusterError(f"{self.module} ended with {code} before it was ready: {self.last_lines()}")
        facts: dict[str, Any] = json.loads(line)
        if "error_class" in facts:
            raise error_tree().get(facts["error_class"], ClusterError)(facts["error"])
        return facts

    def terminate(self, grace_s: float) -> int:
        """SIGTERM, and SIGKILL where it is still there after `grace_s`. Returns the exit code; may be called again."""
        self.ask_to_end()
        try:
            code = self._process.wait(max(grace_s, 0.0))
        except subprocess.TimeoutExpired:
            code = self.kill()
        self._close_pipes()
        return code

    def ask_to_end(self) -> None:
        """SIGTERM, without waiting."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> int:
        """SIGKILL; its children end by their lifelines. One that the kernel does not let go of counts as ended."""
        self.send_kill()
        try:
            code = self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            _log.error("process outlives SIGKILL", extra={"module": self.module, "pid": self.pid, "after_s": _KILL_S})
            code = -signal.SIGKILL
        self._close_pipes()
        return code

    def send_kill(self) -> None:
        """SIGKILL, without waiting."""
        self._process.kill()

    def last_lines(self) -> str:
        """The end of its log, on one line."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, self.log_path.stat().st_size - _LOG_TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return "its log cannot be read"
        return " | ".join(lines[-_LOG_LINES:]) or "its log is empty"

    def _ready_line(self, deadline_s: float) -> bytes | None:
        """The ready line; without its end where the child closed the pipe; None where the deadline passed."""
        line = b""
        while not line.endswith(b"\n") and len(line) < READY_BYTES_MAX:
            if not _readable(self._ready_end, deadline_s - time.monotonic()):
                return None
            part = os.read(self._ready_end, READY_BYTES_MAX)
            if not part:
                break
            line += part
        return line

    def _exit_code(self) -> str:
        try:
            return f"exit code {self._process.wait(_END_S)}"
        except subprocess.TimeoutExpired:
            return "its ready pipe closed"

    def _close_pipes(self) -> None:
        for end in (self._lifeline_end, self._ready_end):
            if end >= 0:
                os.close(end)
        self._lifeline_end = self._ready_end = -1


def spawn(
    module: str,
    config: Frozen,
    *,
    cores: Sequence[int] | None = None,
    log_path: Path,
    pass_fds: Sequence[int] = (),
    threads: int = 1,
    family: Family | None = None,
) -> Child:
    """Starts `python -m module` in a session of its own; returns before it is ready.

    Args:
        config: reaches the child by its standard input, never by its command line.
        cores: the cores that it and its children may use; None: all of the parent's.
        log_path: both of its outputs are appended there; the folder is made.
        pass_fds: further descriptors that it inherits under their numbers.
        threads: bound of every numeric library's pool.
        family: told when it and all of its descendants are gone; children of a child belong to the same one.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    lifeline_reader, lifeline_writer = os.pipe()
    ready_reader, ready_writer = os.pipe()
    inherited = {lifeline.LIFELINE_VARIABLE: lifeline_reader, lifeline.READY_VARIABLE: ready_writer}
    family_end = _family_end(family)
    if family_end is not None:
        inherited[lifeline.FAMILY_VARIABLE] = family_end
    try:
        with tempfile.TemporaryFile() as stdin, log_path.open("ab") as output:
            stdin.write(config.model_dump_json().encode())
            stdin.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-m", lifeline.__name__, module],
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_environment(inherited, cores, threads)},
                pass_fds=(*inherited.values(), *pass_fds),
                start_new_session=True,
            )
    except BaseException:
        os.close(lifeline_writer)
        os.close(ready_reader)
        raise
    finally:
        os.close(lifeline_reader)
        os.close(ready_writer)
    return Child(module, process, lifeline_writer, ready_reader, log_path)


def _family_end(family: Family | None) -> int | None:
    if family is not None:
        return family.writer
    text = os.environ.get(lifeline.FAMILY_VARIABLE)
    return None if text is None else int(text)


def _environment(inherited: Mapping[str, int], cores: Sequence[int] | None, threads: int) -> dict[str, str]:
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {
        **{name: str(fd) for name, fd in inherited.items()},
        **{name: str(threads) for name in pools},
        lifeline.CORES_VARIABLE: ",".join(str(core) for core in cores or ()),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _readable(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


# ---- the child's side -------------------------------------------------------------------------------------------------------------


class Ready:
    """What a child's `main` is given: how it says that it is ready, and how it learns that it should end."""

    def __init__(self, ready_end: int | None) -> None:
        self._ready_end = ready_end
        self._on_stop: list[Callable[[], object]] = []
        self.stopping = False
        """True once the parent asked for an orderly end (SIGTERM)."""
        self.sent = False
        """True once the parent was told how the start went."""

    def send(self, endpoint: str = "", **facts: str | int | float) -> None:
        """Tells the parent, once, that the child is ready. Until then a SIGTERM ends it at once; from then on in order."""
        assert not self.sent, "ready twice"
        self._write({"pid": os.getpid(), "endpoint": endpoint, **facts})
        _log.info("ready", extra={"pid": os.getpid(), "endpoint": endpoint, **facts})

    def on_stop(self, call: Callable[[], object]) -> None:
        """Has `call` (such as `loop.stop`) made when the parent asks for an end; from a signal handler, so it must not block."""
        self._on_stop.append(call)
        if self.stopping:
            call()

    def fail(self, error: SpotlightError) -> None:
        """Tells the parent why there will be no readiness; nothing where it was told already."""
        if not self.sent:
            self._write({"error_class": type(error).__name__, "error": str(error)[:_ERROR_CHARACTERS_MAX]})

    def _stop(self, *_: object) -> None:
        """The handler of SIGTERM."""
        self.stopping = True
        if not self.sent:
            raise SystemExit(128 + signal.SIGTERM)
        for call in self._on_stop:
            call()

    def _write(self, facts: Mapping[str, str | int | float]) -> None:
        self.sent = True
        if self._ready_end is None:
            return
        with suppress(BrokenPipeError):  # the parent no longer listens
            os.write(self._ready_end, json.dumps(facts).encode() + b"\n")
        os.close(self._ready_end)


def run_child(config_type: type[C], main: Callable[[C, Ready], int]) -> NoReturn:
    """Runs a daemon's `main` with its configuration from standard input and exits with its code.

    An error of the tree becomes one log line, its exit code and, before readiness, the parent's exception; any other leaves a traceback.
    Blocking calls that still run on threads are not waited for.
    """
    text = os.environ.get(lifeline.READY_VARIABLE)
    ready = Ready(None if text is None else int(text))
    signal.signal(signal.SIGTERM, ready._stop)
    log.configure(_daemon_name(main))
    try:
        config = config_type.parse_json(sys.stdin.read())
        log.configure(_daemon_name(main), _ids(config))
        code = main(config, ready)
    except SpotlightError as error:
        _log.error("failed", extra={"error_class": type(error).__name__, "error": str(error)})
        ready.fail(error)
        code = error.exit_code
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends already, with a code that says how
    _log.info("ended", extra={"exit_code": code})
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the interpreter's own end waits for every thread: a store that hangs would hold a drained node


def _daemon_name(main: Callable[..., int]) -> str:
    module = sys.modules[main.__module__]
    spec = getattr(module, "__spec__", None)
    return (spec.name if spec else main.__module__).rpartition(".")[2]


def _ids(config: Frozen) -> dict[str, str]:
    return {
        name: str(getattr(config, name))
        for name in ("run_id", "node_id", "worker_id", "trainer_id")
        if hasattr(config, name)
    }
