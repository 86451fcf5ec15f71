"""First code of every child process: `python -m spot_runtime.lifeline MODULE`. Owns cores and the end with the parent.

Runs MODULE as `__main__` once the process is pinned and tied to its parent, so that not even a slow import outlives a killed parent.
Imports nothing but the standard library.
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import sys
import threading

LIFELINE_VARIABLE = "SPOTLIGHT_LIFELINE_FD"
READY_VARIABLE = "SPOTLIGHT_READY_FD"
FAMILY_VARIABLE = "SPOTLIGHT_FAMILY_FD"
CORES_VARIABLE = "SPOTLIGHT_CORES"

ORPHAN_EXIT_CODE = 113
"""How a process ends whose parent is gone."""

_PARENT_CHECK_MS = 1000


def main(argv: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children in order
    parent = os.getppid()
    pin(os.environ.get(CORES_VARIABLE, ""))
    for variable in (READY_VARIABLE, FAMILY_VARIABLE):
        _keep_from_programs(variable)
    lifeline = _keep_from_programs(LIFELINE_VARIABLE)
    if lifeline is not None:
        threading.Thread(target=end_with_parent, args=(lifeline, parent), name="lifeline", daemon=True).start()
    sys.argv = [argv[1], *argv[2:]]
    runpy.run_module(argv[1], run_name="__main__", alter_sys=True)


def pin(cores: str) -> None:
    """Keeps this process, and every thread it will have, on the cores of a list like `0,1`."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})


def end_with_parent(lifeline: int, parent: int) -> None:
    """Waits for the parent's end of the pipe to close, which the kernel does however the parent dies.

    The parent's id is looked at as well, since a fork of the parent may hold the pipe open.
    """
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    while not poll.poll(_PARENT_CHECK_MS) and os.getppid() == parent:
        pass
    os._exit(ORPHAN_EXIT_CODE)


def _keep_from_programs(variable: str) -> int | None:
    """The descriptor that a variable names, from now on closed in programs that this process starts."""
    text = os.environ.get(variable)
    if text is None:
        return None
    os.set_inheritable(int(text), False)
    return int(text)


if __name__ == "__main__":
    main(sys.argv)
