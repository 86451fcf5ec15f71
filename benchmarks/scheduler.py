"""Durable request cycles a second of a real control daemon, beside dask.distributed's scheduler and a bare loop, in one run.

    python -m benchmarks.scheduler --json FILE [--requests 6000]

A cycle is pull, assignment, SampleDone, SampleScored, each of them in the journal (SQLite, WAL, synchronous=FULL) before it is answered.
Groups live in another process and do no work. The bare loop only receives, journals and answers the same messages: the ceiling of one
Python thread.
dask.distributed is measured where it is installed (the project does not depend on it): tasks without work on as many workers of one thread,
with scheduler, workers and client in a process each. `p99_dispatch_ms` is measured with 256 groups that take 0.5 to 1.5 s a request; the
row "saturated" has the latency of a queue that is always full.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sqlite3
import tempfile
import time
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
from spot_runtime.errors import SpotlightError
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
from spot_runtime.scheduler.requests import RequestRecord
from spot_runtime.transport import Router
from spot_runtime.types import JobId, LeaseId, Op, PolicyRef, RequestId, RunId

GROUPS = (16, 64, 256)
PACED_WORK_S = 1.0
DEADLINE_S = 300.0

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


def play(
    endpoint: str, client: Client | None, job: JobSpec | None, *, groups: int, room: int, total: int, work_s: float
) -> Measured:
    """One job through a control daemon, or through the bare loop."""
    said = _spawning.Queue()
    player = _spawning.Process(target=crowd, args=(endpoint, groups, room, work_s, total, said), daemon=True)
    if client is not None and job is not None:
        client.submit(job)
    player.start()
    try:
        started_s, ended_s = _span(client, job, total) if client and job else (0.0, 0.0)
        latencies_s = said.get(timeout=DEADLINE_S)
    finally:
        player.terminate()
        player.join()
    rate = total / (ended_s - started_s) if ended_s > started_s else 0.0
    return Measured(
        groups, room, total, work_s, rate, percentile_ms(latencies_s, 0.5), percentile_ms(latencies_s, 0.99)
    )


def _span(client: Client, job: JobSpec, total: int) -> tuple[float, float]:
    """From the first sample that is done to the last that is scored."""
    started_s = 0.0
    limit_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < limit_s:
        status = client.poll(job.job_id)
        now_s = time.monotonic()
        if not started_s and status.done:
            started_s = now_s
        if status.scored == total:
            return started_s, now_s
        if status.phase.is_final:
            raise SpotlightError(f"{job.job_id}: {status.error}")
        time.sleep(0.02)
    raise TimeoutError(f"{job.job_id} did not end within {DEADLINE_S:g} s")


# ---- the bare loop ------------------------------------------------------------------------------------------------------------------


def bare(folder: str, total: int, said: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    """Receives, writes one row a message in one transaction a turn, answers: no states, no leases, no priorities."""
    router: Router[ToControl] = Router("tcp://127.0.0.1:0", Codec(ToControl))
    said.put(router.endpoint)
    db = sqlite3.connect(Path(folder) / "bare.sqlite", isolation_level=None)
    db.executescript(
        "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; CREATE TABLE r (id TEXT PRIMARY KEY, record BLOB)"
    )
    request = _request()
    encode = msgspec.msgpack.Encoder().encode
    blob = encode(RequestRecord(request=request))
    given = scored = 0
    started_s = ended_s = 0.0
    while True:
        rows: list[tuple[str, bytes]] = []
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
                    rows.append((name, encode(RequestRecord(request=named))))
                case SampleDone() | SampleScored():
                    scored += isinstance(message, SampleScored)
                    rows.append((message.request_id, blob))
                case _:
                    pass
        if rows:
            db.execute("BEGIN IMMEDIATE")
            db.executemany("INSERT INTO r VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET record = excluded.record", rows)
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
        play(said.get(timeout=60), None, None, groups=groups, room=1, total=total, work_s=0.0)
        return float(said.get(timeout=60))
    finally:
        server.terminate()
        server.join()


# ---- dask ---------------------------------------------------------------------------------------------------------------------------


def measure_dask(groups: int, total: int) -> float | None:
    """Tasks without work a second; None where it is not installed. Scheduler, workers and client are a process each."""
    if find_spec("distributed") is None:
        return None
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


def _dask_scheduler(said: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    async def serve() -> None:
        async with import_module("distributed").Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
            said.put(scheduler.address)
            await scheduler.finished()

    asyncio.run(serve())


def _dask_workers(address: str, groups: int) -> None:
    async def serve() -> None:
        worker = import_module("distributed").Worker
        made = [worker(address, nthreads=1, memory_limit=0, dashboard=False) for _ in range(groups)]
        await asyncio.gather(*made)
        await asyncio.gather(*(each.finished() for each in made))

    asyncio.run(serve())


def _nothing(index: int) -> int:
    return index


# ---- all of it ----------------------------------------------------------------------------------------------------------------------


def measure_control(folder: Path, *, groups: int, room: int, requests: int, work_s: float, name: str) -> Measured:
    """A fresh daemon for each measurement."""
    folder.mkdir(parents=True)
    put_prompts(folder)
    group_size = min(requests, 256 if requests > 100_000 else 100)
    job = rollout(folder, name, prompts=requests // group_size, group_size=group_size)
    control = start_control(folder)
    try:
        endpoint = str(control.ready(60.0)["endpoint"])
        with Client(endpoint) as client:
            total = requests // group_size * group_size
            measured = play(endpoint, client, job, groups=groups, room=room, total=total, work_s=work_s)
        measured.rss_mb = psutil.Process(control.pid).memory_info().rss / 1e6
    finally:
        control.terminate(5.0)
    return measured


def main(
    json_path: Annotated[Path, typer.Option("--json", help="Where the figures go.")],
    requests: Annotated[int, typer.Option(min=100, help="Cycles of one measurement.")] = 6000,
    curve: Annotated[bool, typer.Option(help="Also 10^3 to 10^5 queued requests.")] = True,
) -> None:
    """Measures and prints as it goes."""
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
            dask = measure_dask(groups, requests)
            share = full.cycles_per_s / ceiling
            ratio = full.cycles_per_s / dask if dask else None
            rows[-1] |= {"bare_cycles_per_s": ceiling, "share_of_bare": share, "dask_tasks_per_s": dask, "ratio": ratio}
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
        for queued in (1_000, 10_000, 100_000) if curve else ():
            book(
                "curve",
                measure_control(
                    folder / f"c{queued}", groups=64, room=1, requests=queued, work_s=0.0, name="curve-run"
                ),
            )
    json_path.write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
