"""Denoising steps timed over a sequence-parallel group: a process a rank, started for one profile and gone after it.

Owns these processes and what they are told (one line of JSON each way): they end with the process that started them. Never profiles a
single rank: that is profiling's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch

from spot_runtime import lifeline
from spot_runtime.diffusion.profiling import Profiler, at_resolution
from spot_runtime.errors import GroupError
from spot_runtime.messages import GenerationRequest
from spot_runtime.parallel.group import SequenceGroup
from spot_runtime.types import Generation

DEADLINE_S: Final = 900.0
"""For all of a group's steps, loading the model included."""
JOIN_DEADLINE_S: Final = 300.0
"""Ranks load the model before they join, and not all at the same speed."""
POLL_S: Final = 0.05


class GroupPoint(msgspec.Struct, frozen=True):
    """What one latency is of."""

    resolution: int
    batch: int


class RankOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part. `text` is [text tokens, width] of the prompt embedding: its values do not matter to the time."""

    model: str
    request: GenerationRequest
    text: tuple[int, int]
    points: tuple[GroupPoint, ...]
    generation: Generation
    device: str
    threads: int
    dtype: str = "float32"


def group_latencies_s(
    model: str,
    request: GenerationRequest,
    text: tuple[int, int],
    points: Sequence[GroupPoint],
    *,
    degree: int,
    device: str,
    threads: int,
    dtype: str = "float32",
) -> list[float]:
    """Seconds of one denoising step without a step cache for each of `points`, over `degree` ranks; on GPUs rank i takes number i.

    Raises GroupError with the last line of the rank that fails first, or where they take longer than DEADLINE_S.
    """
    with tempfile.TemporaryDirectory() as folder, _held_lifeline() as held:
        orders = [
            RankOrder(
                model=model,
                request=request,
                text=text,
                points=tuple(points),
                generation=Generation(1, rank, degree, str(Path(folder) / "rendezvous"), JOIN_DEADLINE_S),
                device=f"cuda:{rank}" if device.startswith("cuda") else device,
                threads=threads,
                dtype=dtype,
            )
            for rank in range(degree)
        ]
        paths = [Path(folder) / f"rank-{order.generation.rank}" for order in orders]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            ranks += (_start(order, path, held) for order, path in zip(orders, paths, strict=True))
            _wait(ranks, paths)
            *_, answer = paths[0].with_suffix(".out").read_bytes().splitlines()  # libraries may have said something too
            return msgspec.json.decode(answer, type=list[float])
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


@contextmanager
def _held_lifeline() -> Iterator[int]:
    """What ranks hold of a pipe; they end when this process lets go of its other end, or is gone."""
    reader, writer = os.pipe()
    try:
        yield reader
    finally:
        os.close(reader)
        os.close(writer)


def _start(order: RankOrder, path: Path, held: int) -> subprocess.Popen[bytes]:
    """A rank that reads `path`.in, writes `path`.out, and says what is wrong in `path`.err."""
    path.with_suffix(".in").write_bytes(msgspec.json.encode(order))
    with (
        path.with_suffix(".in").open("rb") as told,
        path.with_suffix(".out").open("wb") as said,
        path.with_suffix(".err").open("wb") as errors,
    ):
        return subprocess.Popen(
            [sys.executable, "-m", lifeline.__name__, __name__],
            stdin=told,
            stdout=said,
            stderr=errors,
            env=_environment(held),
            pass_fds=(held,),
        )


def _environment(held: int) -> dict[str, str]:
    """This process's own, but for what it may have from a parent of its own."""
    others = (lifeline.READY_VARIABLE, lifeline.FAMILY_VARIABLE, lifeline.CORES_VARIABLE)
    kept = {name: value for name, value in os.environ.items() if name not in others}
    return kept | {lifeline.LIFELINE_VARIABLE: str(held)}


def _wait(ranks: Sequence[subprocess.Popen[bytes]], paths: Sequence[Path]) -> None:
    """Until all have ended well. Of those that fail the first is the cause: the others only miss it."""
    until_s = time.monotonic() + DEADLINE_S
    while any(codes := [rank.poll() for rank in ranks]) or None in codes:
        if failed := [(path, code) for path, code in zip(paths, codes, strict=True) if code]:
            path, code = min(failed, key=lambda rank: _said_last_ns(rank[0]))
            lines = path.with_suffix(".err").read_text(errors="replace").splitlines()
            raise GroupError(f"{path.name} of a profile: {lines[-1] if lines else f'exit code {code}'}")
        if time.monotonic() > until_s:
            late = next(path for path, code in zip(paths, codes, strict=True) if code is None)
            raise GroupError(f"{late.name} of a profile: not through within {DEADLINE_S:.0f} s")
        time.sleep(POLL_S)


def _said_last_ns(path: Path) -> int:
    """When the rank last wrote to its errors."""
    return path.with_suffix(".err").stat().st_mtime_ns


def profiled(order: RankOrder) -> list[float]:
    """This rank's latencies, in the order of the points."""
    embeds = {order.request.embedding_key: np.zeros(order.text, np.float32)}
    largest = max(point.batch for point in order.points)
    profiler = Profiler(
        order.model, embeds, batch=largest, device=order.device, threads=order.threads, dtype=order.dtype
    )
    profiler.set_group(SequenceGroup.join(order.generation, torch.device(order.device)))
    return [
        profiler.step_latency_s(at_resolution(order.request, point.resolution), point.batch) for point in order.points
    ]


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=RankOrder)
    sys.stdout.buffer.write(msgspec.json.encode(profiled(order)))


if __name__ == "__main__":
    main()
