"""A run of a workflow in this process: its embedded cluster, its progress line, its signals and how its errors end `pyflyte run`.

Owns what lives as long as the call. Never decides where jobs go (endpoint.py) or what they are (agent.py). On a cluster none of it exists.
"""

from __future__ import annotations

import contextvars
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import update_wrapper
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

import click
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.docstring import Docstring
from flytekit.core.workflow import (
    PythonFunctionWorkflow,
    WorkflowFailurePolicy,
    WorkflowMetadata,
    WorkflowMetadataDefaults,
)

from spot_runtime.config import RunSettings
from spot_runtime.daemons.log import carried
from spot_runtime.errors import SpotlightError
from spot_runtime.variables import wants_traceback
from tasks.models import State
from tasks.overlap import Scope, scope
from tasks.progress import Progress

RUNTIME_LOGGER = "spot_runtime"
QUIET_LOGGERS = ("flytekit", "user_space", "developer")
"""flytekit's own; a user of a local run wants none of what they say below ERROR."""


class Cluster(Protocol):
    """What a local run needs of an embedded cluster."""

    def start(self) -> str: ...

    def check(self) -> None: ...

    def stop(self) -> None: ...


def embed(settings: RunSettings, folder: Path) -> Cluster:
    """An embedded cluster of real processes, not yet started. Imported late: registering a workflow needs no daemons."""
    from spot_runtime.daemons.supervisor import EmbeddedCluster

    return EmbeddedCluster(settings, folder)


class LocalRun:
    """One call of a workflow: tasks find it with `current_run`."""

    def __init__(self, tasks: Scope, progress: Progress) -> None:
        self.tasks = tasks
        self.progress = progress
        self.connections = ExitStack()
        """Closed with the run, before its cluster ends."""
        self.signal_number = signal.SIGINT
        self._ending = False
        self._lock = threading.Lock()
        self._cluster: Cluster | None = None
        self._endpoint = ""

    def cluster(self, state: State) -> str:
        """Endpoint of the embedded cluster; the first call starts it. Raises what the start raises."""
        with self._lock:
            if self._cluster is None:
                self.progress.note("starting the embedded cluster: control, reserved node, spot nodes, reward service")
                self._cluster = embed(state.settings, Path(state.folder))
                self._endpoint = self._cluster.start()
            return self._endpoint

    def check(self) -> None:
        """Raises ClusterError where the embedded cluster cannot go on."""
        if self._cluster is not None:
            self._cluster.check()

    def interrupt(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler: every task is given up, then the main thread unwinds. A second signal changes nothing: the end has deadlines."""
        if self._ending:
            return
        self._ending = True
        self.signal_number = signal.Signals(number)
        self.tasks.give_up()
        raise KeyboardInterrupt

    def close(self) -> None:
        """Ends the progress line, connections and the cluster. No signal interrupts it."""
        self._ending = True
        self.progress.close()
        self.connections.close()
        with self._lock:
            cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.stop()


_CURRENT: contextvars.ContextVar[LocalRun | None] = contextvars.ContextVar("spotlight_local_run", default=None)
"""flytekit calls tasks with literals alone, so there is no argument that could carry the run."""


def current_run() -> LocalRun | None:
    """The local run that this thread belongs to."""
    return _CURRENT.get()


@contextmanager
def local_run() -> Iterator[LocalRun]:
    """Everything between the start and the end of a call. Tasks are joined first, then the cluster ends, whatever happened."""
    run = LocalRun(Scope(), Progress())
    token = _CURRENT.set(run)
    with _signals(run.interrupt), _log_lines(run.progress.note):
        try:
            with scope(run.tasks):
                yield run
        finally:
            _CURRENT.reset(token)
            run.close()


class RunWorkflow(PythonFunctionWorkflow):  # type: ignore[misc]
    """A workflow whose local call is a local run, and whose errors end `pyflyte run` with one line and an exit code."""

    closing: Callable[[Any], str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _starts_local_run():
            return super().__call__(*args, **kwargs)
        on_command_line = click.get_current_context(silent=True) is not None
        run: LocalRun | None = None
        try:
            with local_run() as run:
                outputs = super().__call__(*args, **kwargs)
        except SpotlightError as error:
            error.args = (_message(error),)
            if on_command_line:
                _end(error, str(error), error.exit_code)
            raise
        except KeyboardInterrupt as interrupt:
            if on_command_line and run is not None:
                _ignore_signals()
                _end(interrupt, f"{run.signal_number.name}: the run was ended", 128 + run.signal_number)
            raise
        return self.closing(outputs) if on_command_line else outputs


def closing_lines(outputs: Any) -> str:
    """What `pyflyte run` prints last: the result, then the paths of the report and of the seed bank."""
    folder = Path(outputs.state.folder)
    return f"{outputs.summary}\n{_shown(folder / 'report.html')}\n{_shown(folder / 'seed_bank.parquet')}"


def run_workflow(function: Callable[..., Any], closing: Callable[[Any], str] = closing_lines) -> RunWorkflow:
    """As flytekit's `@workflow`, but a local call is a local run; `closing` makes its last lines on a terminal from its outputs."""
    made = RunWorkflow(
        function,
        metadata=WorkflowMetadata(on_failure=WorkflowFailurePolicy.FAIL_IMMEDIATELY),
        default_metadata=WorkflowMetadataDefaults(interruptible=False),
        docstring=Docstring(callable_=function),
    )
    update_wrapper(made, function)
    made.closing = closing
    return made


def _shown(path: Path) -> str:
    """Relative to here where it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _starts_local_run() -> bool:
    """Neither compiling nor already inside a task, a workflow or a container."""
    context = FlyteContextManager.current_context()
    mode = context.execution_state.mode if context.execution_state else None
    return context.compilation_state is None and mode is None


def _message(error: SpotlightError) -> str:
    """flytekit puts a line of its own before the message at every level; the message itself is one line, the last."""
    return str(error).splitlines()[-1].strip()


def _end(error: BaseException, line: str, exit_code: int) -> NoReturn:
    """Ends the process: `SystemExit` is the one exception that `pyflyte` does not print."""
    if wants_traceback():
        traceback.print_exception(error)
    print(f"error: {line}", file=sys.stderr, flush=True)
    raise SystemExit(exit_code)


def _ignore_signals() -> None:
    """All is ended but the interpreter: one more signal shall not change the exit code."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """SIGINT and SIGTERM go to `handler`; flytekit's own handler would exit at once with 1. Only the main thread has signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class _NoteHandler(logging.Handler):
    """What the runtime has to say of its processes, as lines between those of the progress."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        said = " ".join(f"{key}={value}" for key, value in carried(record).items())
        self._note(f"{record.getMessage()}: {said}" if said else record.getMessage())


@contextmanager
def _log_lines(note: Callable[[str], None]) -> Iterator[None]:
    """The runtime's warnings go to `note`, flytekit's nowhere."""
    before = {name: logging.getLogger(name).level for name in QUIET_LOGGERS}
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(max(before[name], logging.ERROR))
    handler = _NoteHandler(note)
    logging.getLogger(RUNTIME_LOGGER).addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger(RUNTIME_LOGGER).removeHandler(handler)
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
