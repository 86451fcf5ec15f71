"""Denoising steps timed over a sequence-parallel group: a process a rank, started for one profile and gone after it.

Owns these processes and what they are told (one line of JSON each way). Never profiles a single rank: that is profiling's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch

from spot_runtime.diffusion.profiling import Profiler, at_resolution
from spot_runtime.errors import GroupError
from spot_runtime.messages import GenerationRequest
from spot_runtime.parallel.group import SequenceGroup
from spot_runtime.types import Generation

DEADLINE_S: Final = 900.0
"""For all of a group's steps, loading the model included."""
JOIN_DEADLINE_S: Final = 300.0
"""Ranks load the model before they join, and not all at the same speed."""


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


def group_latencies_s(
    model: str,
    request: GenerationRequest,
    text: tuple[int, int],
    points: Sequence[GroupPoint],
    *,
    degree: int,
    device: str,
    threads: int,
) -> list[float]:
    """Seconds of one denoising step without a step cache for each of `points`, over `degree` ranks; on GPUs rank i takes number i.

    Raises GroupError with the last line of a rank that fails, or where they take longer than DEADLINE_S.
    """
    with tempfile.TemporaryDirectory() as folder:
        orders = [
            RankOrder(
                model=model,
                request=request,
                text=text,
                points=tuple(points),
                generation=Generation(1, rank, degree, str(Path(folder) / "rendezvous"), JOIN_DEADLINE_S),
                device=f"cuda:{rank}" if device.startswith("cuda") else device,
                threads=threads,
            )
            for rank in range(degree)
        ]
        ranks = [_start(order, Path(folder) / f"rank-{order.generation.rank}") for order in orders]
        try:
            until_s = time.monotonic() + DEADLINE_S
            for place, rank in enumerate(ranks):
                _wait(rank, Path(folder) / f"rank-{place}", until_s)
            *_, answer = (
                (Path(folder) / "rank-0.out").read_bytes().splitlines()
            )  # libraries may have said something too
            return msgspec.json.decode(answer, type=list[float])
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def _start(order: RankOrder, path: Path) -> subprocess.Popen[bytes]:
    """A rank that reads `path`.in, writes `path`.out, and says what is wrong in `path`.err."""
    path.with_suffix(".in").write_bytes(msgspec.json.encode(order))
    with (
        path.with_suffix(".in").open("rb") as told,
        path.with_suffix(".out").open("wb") as said,
        path.with_suffix(".err").open("wb") as errors,
    ):
        return subprocess.Popen([sys.executable, "-m", __name__], stdin=told, stdout=said, stderr=errors)


def _wait(rank: subprocess.Popen[bytes], path: Path, until_s: float) -> None:
    try:
        ended = rank.wait(max(0.0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        raise GroupError(f"{path.name} of a profile: not through within {DEADLINE_S:.0f} s") from error
    if ended:
        lines = path.with_suffix(".err").read_text(errors="replace").splitlines()
        raise GroupError(f"{path.name} of a profile: {lines[-1] if lines else f'exit code {ended}'}")


def profiled(order: RankOrder) -> list[float]:
    """This rank's latencies, in the order of the points."""
    embeds = {order.request.embedding_key: np.zeros(order.text, np.float32)}
    largest = max(point.batch for point in order.points)
    profiler = Profiler(order.model, embeds, batch=largest, device=order.device, threads=order.threads)
    profiler.set_group(SequenceGroup.join(order.generation, torch.device(order.device)))
    return [
        profiler.step_latency_s(at_resolution(order.request, point.resolution), point.batch) for point in order.points
    ]


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=RankOrder)
    sys.stdout.buffer.write(msgspec.json.encode(profiled(order)))


if __name__ == "__main__":
    main()
