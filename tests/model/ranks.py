"""Runs a function in one process a rank. Not a test.

Processes are forked from a server that has imported torch and has used nothing of it, so a rank starts in tens of milliseconds. Where CUDA
is used they are spawned: a fork of a process that has asked for devices cannot have one.
"""

import multiprocessing as mp
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch

from spot_runtime.parallel.group import SequenceGroup
from spot_runtime.types import Generation

CPU = torch.device("cpu")
DEADLINE_S = 160.0
"""For a whole run on a loaded machine; what a test looks at is never this long."""

_forked = mp.get_context("forkserver")
_forked.set_forkserver_preload(["torch.distributed", "spot_runtime.diffusion.engine"])
_spawned = mp.get_context("spawn")


def stop_servers() -> None:
    """Ends what starts the ranks; the next rank starts it again."""
    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()


class Rank:
    """One process; `result` waits for what its function returned."""

    def __init__(self, function: Callable[..., Any], *args: Any, on_gpu: bool = False) -> None:
        context = _spawned if on_gpu else _forked
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(sender, function, args), daemon=True)
        self._process.start()
        sender.close()

    def message(self, timeout_s: float = DEADLINE_S) -> Any:
        """The next thing that the function told with its `tell`."""
        assert self._receiver.poll(timeout_s), "the rank is silent"
        kind, value = self._receiver.recv()
        if kind == "raised":
            raise AssertionError(f"rank raised:\n{value}")
        return value

    result = message

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.join(DEADLINE_S)
        self._receiver.close()


@contextmanager
def ranks(function: Callable[..., Any], arguments: Sequence[tuple], *, on_gpu: bool = False) -> Iterator[list[Rank]]:
    """A process for each tuple of arguments, all gone at the end."""
    running = [Rank(function, *args, on_gpu=on_gpu) for args in arguments]
    try:
        yield running
    finally:
        for rank in running:
            rank.end()


def run_group(function: Callable[..., Any], degree: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """`function(group, *args)` on each rank of a fresh group, and what each returned."""
    with tempfile.TemporaryDirectory() as folder:
        of_rank = generations(Path(folder), 1, degree, timeout_s)
        with ranks(_in_group, [(function, generation, *args) for generation in of_rank]) as running:
            return [rank.result() for rank in running]


def generations(folder: Path, number: int, degree: int, timeout_s: float = 120.0) -> list[Generation]:
    return [Generation(number, rank, degree, str(folder / f"generation-{number}"), timeout_s) for rank in range(degree)]


def _in_group(tell: Callable[[Any], None], function: Callable[..., Any], generation: Generation, *args: Any) -> Any:
    group = SequenceGroup.join(generation, CPU)
    try:
        return function(group, *args)
    finally:
        group.close()


def _run(sender: Any, function: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    try:
        sender.send(("told", function(lambda value: sender.send(("told", value)), *args)))
    except BaseException:  # noqa: BLE001 - whatever it was, the test shall show it
        sender.send(("raised", traceback.format_exc()))
