"""Durable request cycles a second of a real control daemon, beside dask.distributed's scheduler and a bare loop, in one run.

    pip install -e '.[bench]'
    python -m benchmarks.scheduler --json FILE [--requests 6000] [--no-peer]

A cycle is pull, assignment, SampleDone, SampleScored, each of them in the journal before it is answered. The journal is SQLite with a
write-ahead log: a turn with a job in it is forced to the disk (synchronous=FULL), one of requests alone is written and survives the death
of the process (NORMAL); the log is brought to the disk every few seconds (docs/decisions/001). Groups live in another process and do no
work.
The bare loop only receives, journals and answers the same messages under the same rule: the ceiling of one Python thread.
dask.distributed, the peer, is an extra and no dependency: tasks without work on as many workers of one thread, with scheduler,
workers and client in a process each; it keeps nothing on disk. Without it the benchmark does not begin, unless `--no-peer` leaves it out.

`p99_dispatch_ms` is from a pull to its assignment, as the group sees it, at a load that a cluster has: 256 groups that take 0.5 to 1.5 s a
request, so 256 cycles/s. Where groups take no time ("saturated") all of them always wait, so the latency says nothing but groups divided
by cycles/s: `saturated_p99_ms`, beside `saturated_floor_ms`, what the bare loop would need.

`curve`: whole queues of 10^3 to 10^5 requests are worked off by 64 groups, the smallest one six times over; `cpu_us_per_cycle` is
control's own processor time, which other processes disturb less than `cycles_per_s`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import sqlite3
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import msgspec
import psutil
import typer
import zmq

from benchmarks.fake_cluster import Crowd, put_prompts, rollout, start_control
from spot_runtime.client import Client
from spot_runtime.errors import InputError, SpotlightError
from spot_runtime.messages import (
    Assignment,
    AssignWork,
    Codec,
    GenerationRequest,
    JobSpec,
    PullWork,
    SampleDone,
    SampleScored,
    SamplingParams,
    ToControl,
)
from spot_runtime.scheduler.requests import RequestProgress
from spot_runtime.transport import Router
from spot_runtime.types import JobId, LeaseId, NodeId, Op, PolicyRef, RequestId, RunId

GROUPS = (16, 64, 256)
CURVE = ((1_000, 6), (10_000, 1), (100_000, 1))
PACED_WORK_S = 1.0
DEADLINE_S = 300.0
NO_PEER = "dask.distributed is not installed: pip install -e '.[bench]' adds it, --no-peer measures without it"

_spawning = multiprocessing.get_context("spawn")


@dataclass
class Measured:
    """`room` requests a pull; latencies from a pull to its assignment, as the group sees them."""

    groups: int
    room: int
    requests: int
    work_s: float
    cycles_per_s: float
    p50_dispatch_ms: float
    p99_dispatch_ms: float
    cpu_us_per_cycle: float = 0.0
    rss_mb: float = 0.0


def crowd(endpoint: str, groups: int, room: int, work_s: float, total: int, said: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    """A process of groups: plays until `total` results were said, reports latencies, then goes on until it is ended."""
    nodes = Crowd(endpoint, groups=groups, room=room, work_s=work_s)
    limit_s = time.monotonic() + DEADLINE_S
    while sum(node.results for node in nodes.nodes) < total and time.monotonic() < limit_s:
        nodes.turn()
    said.put([latency_s for node in nodes.nodes for latency_s in node.latencies_s])
    while time.monotonic() < limit_s:
        nodes.turn()


def percentile_ms(latencies_s: list[float], share: float) -> float:
    ordered = sorted(latencies_s)
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@dataclass(frozen=True)
class Span:
    """From the first sample that is done to the last that is scored, and control's processor time within."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


def play(
    endpoint: str,
    *,
    groups: int,
    room: int,
    total: int,
    work_s: float,
    work_off: Callable[[], Span] = Span,
) -> Measured:
    """`total` requests through whoever answers at `endpoint`: `work_off` waits for their end while a process of groups plays."""
    said = _spawning.Queue()
    player = _spawning.Process(target=crowd, args=(endpoint, groups, room, work_s, total, said), daemon=True)
    player.start()
    try:
        span = work_off()
        latencies_s = said.get(timeout=DEADLINE_S)
    finally:
        player.terminate()
        player.join()
    return Measured(
        groups,
        room,
        total,
        work_s,
        cycles_per_s=total / span.wall_s if span.wall_s else 0.0,
        p50_dispatch_ms=percentile_ms(latencies_s, 0.5),
        p99_dispatch_ms=percentile_ms(latencies_s, 0.99),
        cpu_us_per_cycle=1e6 * span.cpu_s / total,
    )


def _span(client: Client, job: JobSpec, total: int, control: psutil.Process) -> Span:
    """Waits for a job's last sample."""
    client.submit(job)
    started_s = cpu_s = 0.0
    limit_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < limit_s:
        status = client.poll(job.job_id)
        now_s = time.monotonic()
        if not started_s and status.done:
            started_s, cpu_s = now_s, _cpu_s(control)
        if status.scored == total:
            return Span(now_s - started_s, _cpu_s(control) - cpu_s)
        if status.phase.is_final:
            raise SpotlightError(f"{job.job_id}: {status.error}")
        time.sleep(0.02)
    raise TimeoutError(f"{job.job_id} did not end within {DEADLINE_S:g} s")


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# ---- the bare loop ------------------------------------------------------------------------------------------------------------------


def bare(folder: str, total: int, said: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    """Receives, writes one row a request in one transaction a turn, answers: no states, no leases, no priorities."""
    router: Router[ToControl] = Router("tcp://127.0.0.1:0", Codec(ToControl))
    said.put(router.endpoint)
    db = sqlite3.connect(Path(folder) / "bare.sqlite", isolation_level=None)
    db.executescript(
        "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; CREATE TABLE r (number INTEGER PRIMARY KEY, record BLOB)"
    )
    request = _request()
    encode = msgspec.msgpack.Encoder().encode
    history = ["1234.567 leased spot-12", "1235.123 finished", "1235.234 scored"]
    progress = RequestProgress(lease_id=LeaseId("q1234.1"), node_id=NodeId("spot-12"), history=history)
    given = scored = 0
    started_s = ended_s = 0.0
    while True:
        rows: dict[int, bytes] = {}
        answers = []
        for peer, message in router.receive(0.05):
            match message:
                case PullWork() if given < total:
                    started_s = started_s or time.monotonic()
                    name = RequestId(f"q{given}")
                    given += 1
                    named = msgspec.structs.replace(request, request_id=name)
                    assignment = Assignment(lease_id=LeaseId(f"{name}.1"), request=named)
                    answers.append((peer, AssignWork(group_id=message.group_id, assignments=(assignment,))))
                    rows[given] = encode(progress)
                case SampleDone() | SampleScored():
                    scored += isinstance(message, SampleScored)
                    rows[int(message.request_id[1:]) + 1] = encode(progress)
                case _:
                    pass
        if rows:
            db.execute("BEGIN IMMEDIATE")
            db.executemany("INSERT OR REPLACE INTO r VALUES (?, ?)", rows.items())
            db.execute("COMMIT")
        for peer, answer in answers:
            router.send(peer, answer)
        if scored >= total and not ended_s:
            ended_s = time.monotonic()
            said.put(total / (ended_s - started_s))


def _request() -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId("q"),
        job_id=JobId("rollout-0-0123456789abcdef"),
        run_id=RunId("bench-run"),
        op=Op.ROLLOUT,
        prompt_id="0123456789abcdef",
        prompt="a photo of two red cubes and a green ball",
        row_json='{"prompt": "a photo of two red cubes and a green ball", "tag": "counting", "include": []}',
        seed=1234567890123,
        sde_window=(1, 3),
        params=SamplingParams(height=64, width=64, num_steps=10, noise_level=0.7),
        policy=PolicyRef(1, "runs/bench-run/policies/1", "0123456789abcdef"),
        embedding_key="embeddings/0123456789abcdef/0123456789abcdef0123456789abcdef",
    )


def measure_bare(folder: Path, groups: int, total: int) -> float:
    said = _spawning.Queue()
    server = _spawning.Process(target=bare, args=(str(folder), total, said), daemon=True)
    server.start()
    try:
        play(said.get(timeout=60), groups=groups, room=1, total=total, work_s=0.0)
        return float(said.get(timeout=60))
    finally:
        server.terminate()
        server.join()


# ---- dask ---------------------------------------------------------------------------------------------------------------------------


def measure_dask(groups: int, total: int) -> float:
    """Tasks without work a second. Scheduler, workers and client are a process each."""
    said = _spawning.Queue()
    scheduler = _spawning.Process(target=_dask_scheduler, args=(said,), daemon=True)
    scheduler.start()
    address = said.get(timeout=60)
    workers = _spawning.Process(target=_dask_workers, args=(address, groups), daemon=True)
    workers.start()
    try:
        distributed = import_module("distributed")
        with distributed.Client(address) as client:
            client.wait_for_workers(groups, timeout=DEADLINE_S)
            distributed.wait(client.map(_nothing, range(groups), pure=False))
            started_s = time.monotonic()
            distributed.wait(client.map(_nothing, range(total), pure=False), timeout=DEADLINE_S)
            return float(total / (time.monotonic() - started_s))
    finally:
        for process in (workers, scheduler):
            process.terminate()
            process.join()


def _hush() -> None:
    logging.getLogger("distributed").setLevel(logging.CRITICAL)


def _dask_scheduler(said: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    async def serve() -> None:
        module = import_module("distributed")
        _hush()
        async with module.Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
            said.put(scheduler.address)
            await scheduler.finished()

    asyncio.run(serve())


def _dask_workers(address: str, groups: int) -> None:
    async def serve() -> None:
        worker = import_module("distributed").Worker
        _hush()
        made = [worker(address, nthreads=1, memory_limit=0, dashboard=False) for _ in range(groups)]
        await asyncio.gather(*made)
        await asyncio.gather(*(each.finished() for each in made))

    asyncio.run(serve())


def _nothing(index: int) -> int:
    return index


# ---- all of it ----------------------------------------------------------------------------------------------------------------------


def measure_control(
    folder: Path, *, groups: int, room: int, requests: int, work_s: float, name: str, times: int = 1
) -> Measured:
    """`times` jobs of `requests` requests, one after another, through a daemon of its own."""
    folder.mkdir(parents=True)
    put_prompts(folder)
    group_size = min(requests, 256 if requests > 100_000 else 100)
    queued = requests // group_size * group_size
    control = start_control(folder)
    try:
        endpoint = str(control.ready(60.0)["endpoint"])
        process = psutil.Process(control.pid)

        def work_off() -> Span:
            spans = []
            for index in range(times):
                job = rollout(folder, f"{name}-{index}", prompts=queued // group_size, group_size=group_size)
                spans.append(_span(client, job, queued, process))
            return Span(sum(span.wall_s for span in spans), sum(span.cpu_s for span in spans))

        with Client(endpoint) as client:
            measured = play(endpoint, groups=groups, room=room, total=times * queued, work_s=work_s, work_off=work_off)
        measured.rss_mb = process.memory_info().rss / 1e6
    finally:
        control.terminate(5.0)
    return measured


def main(
    json_path: Annotated[Path, typer.Option("--json", help="Where the figures go.")],
    requests: Annotated[int, typer.Option(min=100, help="Cycles of one measurement.")] = 6000,
    curve: Annotated[bool, typer.Option(help="Also 10^3 to 10^5 queued requests.")] = True,
    peer: Annotated[bool, typer.Option(help="Measure dask.distributed beside it.")] = True,
) -> None:
    """Measures and prints as it goes."""
    if peer and find_spec("distributed") is None:
        typer.echo(f"error: {NO_PEER}", err=True)
        raise typer.Exit(InputError.exit_code)
    found: dict[str, object] = {"zmq": zmq.zmq_version(), "sqlite": sqlite3.sqlite_version}
    rows: list[dict[str, object]] = []

    def book(kind: str, measured: Measured) -> Measured:
        rows.append({"kind": kind, **asdict(measured)})
        typer.echo(json.dumps(rows[-1]))
        return measured

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for groups in GROUPS:
            full = book(
                "saturated",
                measure_control(
                    folder / f"s{groups}", groups=groups, room=1, requests=requests, work_s=0.0, name="saturated-run"
                ),
            )
            bare_folder = folder / f"b{groups}"
            bare_folder.mkdir()
            ceiling = measure_bare(bare_folder, groups, requests)
            dask = measure_dask(groups, requests) if peer else None
            share = full.cycles_per_s / ceiling
            ratio = full.cycles_per_s / dask if dask else None
            rows[-1] |= {"bare_cycles_per_s": ceiling, "share_of_bare": share, "dask_tasks_per_s": dask, "ratio": ratio}
            rows[-1] |= {"saturated_p99_ms": full.p99_dispatch_ms, "saturated_floor_ms": 1000 * groups / ceiling}
            typer.echo(json.dumps(rows[-1]))
        found |= {key: value for key, value in rows[-1].items() if key not in ("kind", "p99_dispatch_ms")}
        book(
            "batched",
            measure_control(folder / "batched", groups=256, room=8, requests=requests, work_s=0.0, name="batched-run"),
        )
        paced = book(
            "paced",
            measure_control(
                folder / "paced", groups=256, room=1, requests=requests, work_s=PACED_WORK_S, name="paced-run"
            ),
        )
        found["p99_dispatch_ms"] = paced.p99_dispatch_ms
        for queued, times in CURVE if curve else ():
            book(
                "curve",
                measure_control(
                    folder / f"c{queued}",
                    groups=64,
                    room=1,
                    requests=queued,
                    work_s=0.0,
                    name="curve-run",
                    times=times,
                ),
            )
    json_path.write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
