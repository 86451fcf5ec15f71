"""Live migration under preemption: iteration time with and without it, and what commits cost.

    python -m benchmarks.migration --json FILE

On the bench model (`python -m spot_runtime.models bench-dit`), with real processes: control, the reward service and two spot nodes of one
slot and one core each. Half of the slots are preempted 1 to 8 times an iteration with a notice, and come back after a pause as fresh
processes (paper §6.5, Figure 13). With live migration what is in flight is committed and goes on elsewhere, without it starts over; both
see the preemptions at the same times. `saving_pct` is how much shorter the iteration with it is; FILE.svg has both.

`commit_ms` and `restore_ms` are of records with the latents of 1280² (1.6 MB) in a file store. `denoise_stall_pct` is how much longer a
worker's denoising step takes beside a commit: every second step of one worker has one, written by the process that commands it, as a node
does. `store_share_of_copy` is `benchmarks.store`'s.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer

from benchmarks.store import FileCopies, share_of_copy
from spot_runtime.client import Client, job_spec
from spot_runtime.config import ClusterConfig, EvaluationConfig, GrpoConfig, RunSettings, SamplingConfig, TrainConfig
from spot_runtime.daemons.arena import ArenaShape, LatentArena
from spot_runtime.daemons.commits import Record, Trail, make_record, restore
from spot_runtime.daemons.ports import HOST, free_port
from spot_runtime.daemons.process import Child, spawn
from spot_runtime.daemons.settings import ControlSettings, NodeSettings, RewardSettings, WorkerSettings
from spot_runtime.diffusion.embeddings import PromptEncoder
from spot_runtime.diffusion.geometry import check_model, embedding_key
from spot_runtime.errors import InputError
from spot_runtime.messages import (
    AdmitRequest,
    Codec,
    DenoiseStep,
    FromWorker,
    GenerationRequest,
    JoinGroup,
    LoadPolicy,
    LoadWeights,
    SamplingParams,
    StepDone,
    StepItem,
    WorkerFailed,
)
from spot_runtime.models.build import BENCH_RESOLUTION
from spot_runtime.models.recipe import make_bench
from spot_runtime.preemption import write_notice
from spot_runtime.rewards.prompts import row_json, shapes_rows
from spot_runtime.store.layout import pack_tensors
from spot_runtime.store.tensors import TensorStore
from spot_runtime.transport import Router, local_address
from spot_runtime.types import Generation, JobId, JobPhase, Op, PolicyRef, Pool, RequestId, RunId

LATENTS_1280 = (6400, 64)
"""Tokens and channels of Qwen-Image at 1280²: 1.6 MB in fp32."""
RECORDS = 200
WINDOW = 5
START_DEADLINE_S = 300.0
JOB_DEADLINE_S = 3600.0
POLL_S = 0.05
NODES = ("spot-0", "spot-1")
STALL_WORKER = "stall-w0"
ALONE = Generation(id=1, rank=0, degree=1, rendezvous="", timeout_s=1.0)


# ---- commits ----------------------------------------------------------------------------------------------------------------------


def request(num_steps: int, pixels: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId("q"),
        job_id=JobId("j"),
        run_id=RunId("bench"),
        op=Op.ROLLOUT,
        prompt_id="p",
        prompt="a photo of a red square",
        row_json="{}",
        seed=1,
        sde_window=(0, WINDOW),
        params=SamplingParams(height=pixels, width=pixels, num_steps=num_steps, noise_level=0.7),
        policy=PolicyRef(),
        embedding_key="embeddings/e",
    )


def latents_record(denoising_step: int) -> Record:
    """A record of one sample's latents at 1280², behind its window."""
    rng = np.random.default_rng(denoising_step)
    return make_record(
        request(RECORDS + 1, 1280),
        denoising_step,
        latents=rng.standard_normal(LATENTS_1280, dtype=np.float32),
        window_latents=np.empty((WINDOW + 1, 0), np.float32),
        log_probs=np.empty(WINDOW, np.float32),
        schedule_digest="s",
        trail=Trail(denoising_step - 1),
    )


def record_times(store: TensorStore) -> dict[str, float]:
    """ms of one commit and of one restore, the copies out of and into shared memory included."""
    shape = ArenaShape(slots=1, tokens=LATENTS_1280[0], channels=LATENTS_1280[1], window_max=1)
    arena = LatentArena.create(shape)
    commits_s, restores_s = [], []
    asked = msgspec.structs.replace(request(RECORDS, 1280), sde_window=(0, 0))
    for step in range(1, RECORDS + 1):
        arena.latents(0, step)[:] = np.random.default_rng(step).standard_normal(LATENTS_1280, dtype=np.float32)
        start_s = time.perf_counter()
        record = make_record(
            asked,
            step,
            latents=arena.latents(0, step),
            window_latents=arena.window_latents(0),
            log_probs=arena.log_probs(0),
            schedule_digest="s",
            trail=Trail(step - 1),
        )
        store.put(f"runs/bench/commits/q.1.{step}", record.tensors, record.meta)
        commits_s.append(time.perf_counter() - start_s)
    for step in range(1, RECORDS + 1):
        start_s = time.perf_counter()
        stored = store.get(f"runs/bench/commits/q.1.{step}")
        arena.latents(0, step)[:] = restore(asked, step, "q", Record(stored.tensors, stored.meta), ()).latents
        restores_s.append(time.perf_counter() - start_s)
    arena.close()
    return {
        "commit_ms_p50": round(statistics.median(commits_s) * 1e3, 2),
        "commit_ms_p99": round(statistics.quantiles(commits_s, n=100)[98] * 1e3, 2),
        "restore_ms_p50": round(statistics.median(restores_s) * 1e3, 2),
    }


# ---- denoise stall ----------------------------------------------------------------------------------------------------------------


def denoise_stall(model: str, folder: Path, cores: Sequence[int], steps: int) -> dict[str, float]:
    """Median seconds of a step beside a commit and of one without, of one worker in a process and on a core of its own."""
    store = TensorStore(f"file://{folder}/stall")
    geometry = check_model(model, BENCH_RESOLUTION).geometry
    arena = LatentArena.create(ArenaShape(1, geometry.tokens, geometry.channels, WINDOW))
    workers: Router[FromWorker] = Router(local_address("stall"), Codec(FromWorker))
    (embeds,) = PromptEncoder(model).encode([request(1, BENCH_RESOLUTION).prompt])
    child = _stall_worker(model, folder, arena, workers.endpoint, cores[0])
    node = _Commander(workers)
    spent_s: dict[bool, list[float]] = {False: [], True: []}
    try:
        with _on_core(cores[-1]), ThreadPoolExecutor(1) as pool:
            child.ready(START_DEADLINE_S)
            node.hear(1)
            node.send(LoadWeights(seq=0, device="cpu"))
            node.send(JoinGroup(seq=0, generation=ALONE))
            assert all(not isinstance(message, WorkerFailed) for message in node.hear(2))
            asked = request(steps + WINDOW, BENCH_RESOLUTION)
            node.send(LoadPolicy(policy=PolicyRef(), path=""))
            embedding = b"".join(pack_tensors({"embeds": embeds}, {}))
            node.send(AdmitRequest(slot=0, request=asked, embedding=embedding))
            for step in range(steps):
                commits = step % 2 == 1
                record = latents_record(step + WINDOW + 1) if commits else None
                start_s = time.perf_counter()
                node.send(DenoiseStep(seq=step, items=(StepItem(slot=0, denoising_step=step),)))
                if record is not None:
                    pool.submit(store.put, f"commits/{step}", dict(record.tensors), dict(record.meta))
                node.until_step(step)
                spent_s[commits].append(time.perf_counter() - start_s)
    finally:
        child.terminate(5.0)
        workers.close()
        arena.close()
    beside, alone = (statistics.median(spent_s[key][WINDOW:]) for key in (True, False))
    return {
        "step_ms_beside_a_commit": round(beside * 1e3, 2),
        "step_ms_alone": round(alone * 1e3, 2),
        "denoise_stall_pct": round(100 * (beside / alone - 1), 2),
    }


class _Commander:
    """What the stall measurement says to its worker, and hears."""

    def __init__(self, workers: Router[FromWorker]) -> None:
        self._workers = workers

    def send(self, message: Any) -> None:
        assert self._workers.send(STALL_WORKER.encode(), message), "worker away"

    def hear(self, count: int) -> list[FromWorker]:
        heard: list[FromWorker] = []
        until_s = time.monotonic() + START_DEADLINE_S
        while len(heard) < count:
            assert time.monotonic() < until_s, "the worker does not answer"
            heard += [message for _, message in self._workers.receive(1.0)]
        return heard

    def until_step(self, seq: int) -> None:
        while True:
            for message in self.hear(1):
                assert not isinstance(message, WorkerFailed), message
                if isinstance(message, StepDone) and message.seq == seq:
                    return


def _stall_worker(model: str, folder: Path, arena: LatentArena, endpoint: str, core: int) -> Child:
    shape, weights_fd = arena.shape, os.memfd_create("weights")
    config = WorkerSettings(
        worker_id=STALL_WORKER,
        node_endpoint=endpoint,
        model=model,
        arena_fd=arena.fd,
        weights_fd=weights_fd,
        arena_slots=shape.slots,
        tokens=shape.tokens,
        channels=shape.channels,
        window_max=shape.window_max,
    )
    log_path = folder / "stall.log"
    fds = (arena.fd, weights_fd)
    try:
        return spawn("spot_runtime.daemons.worker", config, cores=(core,), log_path=log_path, pass_fds=fds)
    finally:
        os.close(weights_fd)


@contextlib.contextmanager
def _on_core(core: int) -> Iterator[None]:
    """This process on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# ---- preemption -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """One iteration's rollout and how its nodes are disturbed."""

    prompts: int
    group_size: int
    num_steps: int
    max_batch: int
    grace_s: float
    pause_s: float

    def config(self) -> TrainConfig:
        cluster = ClusterConfig(
            spot_nodes=len(NODES),
            max_batch=self.max_batch,
            lease_s=60.0,
            heartbeat_s=0.5,
            start_deadline_s=START_DEADLINE_S,
        )
        return TrainConfig(
            sampling=SamplingConfig(num_steps=self.num_steps),
            grpo=GrpoConfig(prompts_per_iteration=self.prompts, group_size=self.group_size, optimizer_steps=1),
            evaluation=EvaluationConfig(pairs=1),
            cluster=cluster,
        )


class SpotCluster:
    """Control and reward service, and spot nodes that are preempted and come back. Prompts are encoded beforehand: no trainer."""

    def __init__(self, model: str, folder: Path, load: Load, cores: Sequence[int]) -> None:
        self._folder, self._load, self._cores = folder, load, cores
        self.store = TensorStore(f"file://{folder}/store")
        checked = check_model(model, BENCH_RESOLUTION)
        rows = shapes_rows(0, 2 * load.prompts, "train")
        for split in ("train", "validation"):
            self.store.put_bytes(f"prompts/{split}.jsonl", "\n".join(row_json(row) for row in rows).encode())
        prompts = sorted({row.prompt for row in rows})
        for prompt, embeds in zip(prompts, PromptEncoder(model).encode(prompts), strict=True):
            self.store.put(embedding_key(checked.digest, prompt), {"embeds": embeds})
        self.settings = RunSettings(
            run_id="migration",
            iterations=1,
            resolution=BENCH_RESOLUTION,
            model=model,
            model_digest=checked.digest,
            store=self.store.url,
            train_prompts_key="prompts/train.jsonl",
            validation_prompts_key="prompts/validation.jsonl",
            config=load.config(),
        )
        self._endpoint, reward_port = f"tcp://{HOST}:{free_port()}", free_port()
        self._daemons = [
            self._spawn("reward", RewardSettings(port=reward_port), None),
            self._spawn("control", self._control(f"http://{HOST}:{reward_port}"), None),
        ]
        self._nodes: dict[str, Child] = {}
        for daemon in self._daemons:
            daemon.ready(START_DEADLINE_S)
        self.client = Client(self._endpoint)

    def _control(self, reward_url: str) -> ControlSettings:
        return ControlSettings(
            bind=self._endpoint,
            journal_path=str(self._folder / "journal.sqlite"),
            store=self.store.url,
            cluster=self.settings.config.cluster,
            reward_url=reward_url,
        )

    def _spawn(self, daemon: str, config: Any, cores: tuple[int, ...] | None) -> Child:
        name = getattr(config, "node_id", daemon)
        return spawn(f"spot_runtime.daemons.{daemon}", config, cores=cores, log_path=self._folder / f"{name}.log")

    def start_node(self, name: str, *, live_migration: bool) -> None:
        """Starts a node process; `nodes_ready` waits for it."""
        core = (self._cores[NODES.index(name) % len(self._cores)],)
        cluster = self.settings.config.cluster.model_copy(update={"live_migration": live_migration})
        config = NodeSettings(
            node_id=name,
            pool=Pool.SPOT,
            control_endpoint=self._endpoint,
            store=self.store.url,
            model=self.settings.model,
            resolution=BENCH_RESOLUTION,
            folder=str(self._folder / name),
            cores=core,
            window_max=self.settings.config.sampling.sde_window_size,
            cluster=cluster,
        )
        self._nodes[name] = self._spawn("node", config, core)

    def nodes_ready(self) -> None:
        for child in self._nodes.values():
            child.ready(START_DEADLINE_S)

    def has_left(self, name: str) -> bool:
        return self._nodes[name].poll() is not None

    def is_ready(self, name: str) -> bool:
        return not self.has_left(name) and self._nodes[name].answered()

    def notice(self, name: str) -> None:
        write_notice(self._folder / name / "notice.json", self._load.grace_s)

    def stop_nodes(self) -> None:
        for child in self._nodes.values():
            child.terminate(5.0)
        self._nodes.clear()

    def close(self) -> None:
        self.client.close()
        for child in [*self._nodes.values(), *self._daemons]:
            child.terminate(5.0)


def iteration(
    cluster: SpotCluster, run_id: str, times_s: Sequence[float], load: Load, *, live_migration: bool
) -> dict[str, float]:
    """One rollout; at each of `times_s` after its start half of the slots are preempted, once they are back from the last time.

    Returns its seconds, preemptions that took place, and attempts beyond the first.
    """
    for name in NODES:
        cluster.start_node(name, live_migration=live_migration)
    cluster.nodes_ready()
    job = job_spec(
        run_id=RunId(run_id),
        op=Op.ROLLOUT,
        iteration=0,
        policy=PolicyRef(),
        settings_json=cluster.settings.model_copy(update={"run_id": run_id}).model_dump_json(),
    )
    start_s = time.monotonic()
    cluster.client.submit(job)
    victim = _Victim(cluster, NODES[1], list(times_s), load.pause_s, live_migration=live_migration)
    while (status := cluster.client.poll(job.job_id)).phase is not JobPhase.SUCCEEDED:
        assert not status.phase.is_final, f"{status.phase}: {status.error}"
        elapsed_s = time.monotonic() - start_s
        assert elapsed_s < JOB_DEADLINE_S, f"{status.done} of {status.total} after {elapsed_s:.0f} s"
        victim.turn(elapsed_s)
        time.sleep(POLL_S)
    spent_s = time.monotonic() - start_s
    cluster.stop_nodes()
    return {"seconds": round(spent_s, 2), "preemptions": victim.preemptions}


class _Victim:
    """The node that is preempted: noticed, gone, away for a pause, back."""

    def __init__(
        self, cluster: SpotCluster, name: str, times_s: list[float], pause_s: float, *, live_migration: bool
    ) -> None:
        self._cluster, self._name, self._times_s, self._pause_s = cluster, name, times_s, pause_s
        self._live_migration = live_migration
        self._gone_s: float | None = None
        self._noticed = False
        self.preemptions = 0

    def turn(self, elapsed_s: float) -> None:
        if self._noticed and self._cluster.has_left(self._name):
            self._noticed, self._gone_s = False, elapsed_s
        elif self._gone_s is not None and elapsed_s - self._gone_s >= self._pause_s:
            self._gone_s = None
            self._cluster.start_node(self._name, live_migration=self._live_migration)
        elif not self._noticed and self._gone_s is None and self._is_due(elapsed_s):
            self._times_s.pop(0)
            self._cluster.notice(self._name)
            self._noticed = True
            self.preemptions += 1

    def _is_due(self, elapsed_s: float) -> bool:
        return bool(self._times_s) and elapsed_s >= self._times_s[0] and self._cluster.is_ready(self._name)


def sweep(cluster: SpotCluster, load: Load, frequencies: Sequence[int]) -> dict[str, dict[str, float]]:
    """Iteration seconds with and without live migration at each frequency, in turns who goes first; 0 is the undisturbed iteration."""
    figures: dict[str, dict[str, float]] = {}
    calm_s = 0.0
    for index, count in enumerate((0, *frequencies)):
        times_s = [calm_s * (place + 0.5) / count for place in range(count)]
        both = {}
        for migrates in (index % 2 == 1, index % 2 == 0):
            both[migrates] = iteration(cluster, f"f{count}-{migrates:d}", times_s, load, live_migration=migrates)
        figures[str(count)] = _compared(both)
        calm_s = calm_s or min(both[True]["seconds"], both[False]["seconds"])
        typer.echo(f"{count}: {json.dumps(figures[str(count)])}")
    return figures


def _compared(both: dict[bool, dict[str, float]]) -> dict[str, float]:
    with_s, without_s = both[True]["seconds"], both[False]["seconds"]
    return {
        "with_s": with_s,
        "without_s": without_s,
        "saving_pct": round(100 * (1 - with_s / without_s), 2),
        "preemptions_with": both[True]["preemptions"],
        "preemptions_without": both[False]["preemptions"],
    }


# ---- picture ----------------------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 560, 320, 60, 50, 40


def picture(figures: dict[str, dict[str, float]]) -> str:
    """Iteration seconds over preemptions an iteration, a bar for each of the two, as SVG."""
    y_max = max(max(row["with_s"], row["without_s"]) for row in figures.values()) * 1.1
    scale, place = (HEIGHT - BOTTOM - TOP) / y_max, (WIDTH - LEFT - 20) / len(figures)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">preemptions of half the slots, an iteration</text>',
        f'<text x="16" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 16 {HEIGHT / 2})">iteration, s</text>',
    ]
    for tick in range(5):
        y = HEIGHT - BOTTOM - tick / 4 * (HEIGHT - BOTTOM - TOP)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{y_max * tick / 4:.0f}</text>')
    for index, (count, row) in enumerate(figures.items()):
        x = LEFT + index * place
        for shift, name, colour in ((0.12, "with_s", "#2a6f97"), (0.5, "without_s", "#c8763a")):
            height = row[name] * scale
            box = f'x="{x + shift * place:.1f}" y="{HEIGHT - BOTTOM - height:.1f}" width="{place * 0.36:.1f}" height="{height:.1f}"'
            parts.append(f'<rect {box} fill="{colour}"><title>{row[name]} s</title></rect>')
        middle = x + place / 2
        parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{count}</text>')
        parts.append(
            f'<text x="{middle:.1f}" y="{TOP + 12}" text-anchor="middle" fill="#555">{row["saving_pct"]:+.1f} %</text>'
        )
    for index, (name, colour) in enumerate((("with live migration", "#2a6f97"), ("without", "#c8763a"))):
        parts.append(f'<rect x="{LEFT + 160 * index}" y="14" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 18 + 160 * index}" y="24">{name}</text>')
    return "".join([*parts, "</svg>\n"])


def main(
    json_path: Annotated[
        Path, typer.Option("--json", help="Where the figures go; the picture goes beside it, as .svg.")
    ],
    model: Annotated[str, typer.Option(help="Bench model's folder; made where none is given.")] = "",
    frequencies: Annotated[str, typer.Option(help="Preemptions an iteration, comma-separated.")] = "1,2,4,8",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts an iteration.")] = 8,
    group_size: Annotated[int, typer.Option(min=2, help="Samples a prompt.")] = 8,
    num_steps: Annotated[int, typer.Option(min=7, help="Denoising steps a sample.")] = 20,
    max_batch: Annotated[int, typer.Option(min=1, help="Samples that a slot denoises together.")] = 4,
    grace_s: Annotated[float, typer.Option(min=0.5, help="Seconds between notice and preemption.")] = 3.0,
    pause_s: Annotated[float, typer.Option(min=0.0, help="Seconds until a preempted machine is started again.")] = 5.0,
    stall_steps: Annotated[int, typer.Option(min=20, max=190, help="Denoising steps of the stall measurement.")] = 160,
) -> None:
    """Writes seconds, savings, latencies and shares, and the picture."""
    counts = [int(count) for count in frequencies.split(",") if count]
    if not all(1 <= count <= 100 for count in counts):
        raise InputError(f"frequencies = {frequencies}: must be 1 to 100 each")
    load = Load(prompts, group_size, num_steps, max_batch, grace_s, pause_s)
    cores = sorted(os.sched_getaffinity(0))[:2]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not model:
            model = str(folder / "bench")
            make_bench(Path(model), 0, False, typer.echo)
        figures: dict[str, Any] = record_times(TensorStore(f"file://{folder}/records"))
        shutil.rmtree(folder / "records")
        figures |= denoise_stall(model, folder, cores, stall_steps)
        figures["store_share_of_copy"] = share_of_copy(
            TensorStore(f"file://{folder}/share"), FileCopies(folder / "copies")
        )
        typer.echo(json.dumps(figures))
        cluster = SpotCluster(model, folder, load, cores)
        try:
            figures["frequencies"] = sweep(cluster, load, counts)
        finally:
            cluster.close()
    json_path.write_text(json.dumps(figures, indent=1) + "\n")
    json_path.with_suffix(".svg").write_text(picture(figures["frequencies"]))


if __name__ == "__main__":
    typer.run(main)
