"""Live migration under preemption: iteration time with and without it, and what commits cost.

    python -m benchmarks.migration --json FILE

On the bench model (`python -m spot_runtime.models bench-dit`), with real processes: control, the reward service and two spot nodes of one
slot and one core each. Half of the slots are preempted 1 to 8 times an iteration with a notice, and come back after a pause as fresh
processes (paper §6.5, Figure 13). With live migration what is in flight is committed and goes on elsewhere, without it starts over; both
see the preemptions at the same times. `saving_pct` is how much shorter the iteration with it is; FILE.svg has both. A preemption that comes
before the machine is back waits for it: `preemptions_with` and `_without` count those that took place.

The iteration is made as long as `--minutes` allow, by the number of its prompts. With six cores or more the two run at the same time, each
on cores of its own. Figures are written as they come; what is cut off leaves those that were measured.

`commit_ms` and `restore_ms` are of records with the latents of 1280² (1.6 MB) in a file store. `denoise_stall_pct` is how much longer a
worker's denoising step takes beside a commit: the median over pairs of neighbouring steps of one worker, one of which has a commit, first
or second in turns, so that what else the machine does cancels. The process that commands the worker writes the commit, as a node does: the
copy out of shared memory, which the next step waits for, counts; `commit_copy_ms` is that alone. `store_share_of_copy` is
`benchmarks.store`'s.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
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
WARM_UP = 6
"""Denoising steps before the first that counts; even."""
START_DEADLINE_S = 300.0
POLL_S = 0.05
SAY_S = 15.0
PATIENCE = 12
"""An iteration that takes so many times as long as planned has failed."""
AWAY_SHARE = 1.3
"""How much longer than the undisturbed one an iteration is on average over the frequencies."""
GOLDEN = (5**0.5 - 1) / 2
"""Its multiples place each preemption within its part of the iteration: at even distances all would meet batches at the same progress."""
LEAVE_S = 1.5
"""From the notice to the end of the node, about."""
ARM_CORES = 3
"""Of one of the two that run at the same time: two nodes, and control with the reward service."""
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


def committed(arena: LatentArena, step: int) -> Record:
    """The record of what the arena holds of a sample at 1280², copied as a node copies it."""
    return make_record(
        msgspec.structs.replace(request(RECORDS, 1280), sde_window=(0, 0)),
        step,
        latents=arena.latents(0, step),
        window_latents=arena.window_latents(0),
        log_probs=arena.log_probs(0),
        schedule_digest="s",
        trail=Trail(step - 1),
    )


def arena_1280() -> LatentArena:
    return LatentArena.create(ArenaShape(slots=1, tokens=LATENTS_1280[0], channels=LATENTS_1280[1], window_max=1))


def record_times(store: TensorStore) -> dict[str, float]:
    """ms of one commit and of one restore, the copies out of and into shared memory included."""
    arena = arena_1280()
    commits_s, restores_s = [], []
    asked = msgspec.structs.replace(request(RECORDS, 1280), sde_window=(0, 0))
    for step in range(1, RECORDS + 1):
        arena.latents(0, step)[:] = np.random.default_rng(step).standard_normal(LATENTS_1280, dtype=np.float32)
        start_s = time.perf_counter()
        record = committed(arena, step)
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


def denoise_stall(model: str, folder: Path, cores: Sequence[int], pairs: int) -> dict[str, float]:
    """Seconds of a step beside a commit and of its neighbour without one, of one worker in a process and on a core of its own."""
    store = TensorStore(f"file://{folder}/stall")
    geometry = check_model(model, BENCH_RESOLUTION).geometry
    arena = LatentArena.create(ArenaShape(1, geometry.tokens, geometry.channels, WINDOW))
    workers: Router[FromWorker] = Router(local_address("stall"), Codec(FromWorker))
    (embeds,) = PromptEncoder(model).encode([request(1, BENCH_RESOLUTION).prompt])
    child = _stall_worker(model, folder, arena, workers.endpoint, cores[0])
    node = _Commander(workers)
    try:
        with _on_core(cores[-1]), ThreadPoolExecutor(1) as pool:
            child.ready(START_DEADLINE_S)
            node.hear(1)
            node.send(LoadWeights(seq=0, device="cpu"))
            node.send(JoinGroup(seq=0, generation=ALONE))
            assert all(not isinstance(message, WorkerFailed) for message in node.hear(2))
            asked = request(2 * pairs + WARM_UP + WINDOW, BENCH_RESOLUTION)
            node.send(LoadPolicy(policy=PolicyRef(), path=""))
            embedding = b"".join(pack_tensors({"embeds": embeds}, {}))
            node.send(AdmitRequest(slot=0, request=asked, embedding=embedding))
            return _paired_steps(node, store, pool, pairs)
    finally:
        child.terminate(5.0)
        workers.close()
        arena.close()


def _paired_steps(node: _Commander, store: TensorStore, pool: ThreadPoolExecutor, pairs: int) -> dict[str, float]:
    """Steps of the admitted request, two and two; one of each pair has a commit."""
    source = arena_1280()
    spent_s: dict[bool, list[float]] = {False: [], True: []}
    copies_s: list[float] = []
    for step in range(WARM_UP + 2 * pairs):
        index, second = divmod(step - WARM_UP, 2)
        commits = index % 2 == second  # first in one pair, second in the next
        source.latents(0, step)[:] = np.random.default_rng(step).standard_normal(LATENTS_1280, dtype=np.float32)
        start_s = time.perf_counter()
        if commits:
            record = committed(source, step)
            copies_s.append(time.perf_counter() - start_s)
            written = pool.submit(store.put, f"commits/{step}", record.tensors, record.meta)
        node.send(DenoiseStep(seq=step, items=(StepItem(slot=0, denoising_step=step),)))
        node.until_step(step)
        if step >= WARM_UP:
            spent_s[commits].append(time.perf_counter() - start_s)
        if commits:
            written.result(START_DEADLINE_S)  # nothing of it reaches into the next step
    source.close()
    longer = [beside / alone - 1 for beside, alone in zip(spent_s[True], spent_s[False], strict=True)]
    return {
        "step_ms_beside_a_commit": round(statistics.median(spent_s[True]) * 1e3, 2),
        "step_ms_alone": round(statistics.median(spent_s[False]) * 1e3, 2),
        "commit_copy_ms": round(statistics.median(copies_s) * 1e3, 3),
        "denoise_stall_pct": round(100 * statistics.median(longer), 2),
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
    calm_s: float
    """About how long the undisturbed iteration takes."""

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

    def __init__(self, model: str, folder: Path, load: Load, cores: Sequence[int], *, live_migration: bool) -> None:
        folder.mkdir()
        self._folder, self._load, self._cores, self._live_migration = folder, load, cores, live_migration
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
        self._ready: set[str] = set()
        for daemon in self._daemons:
            daemon.ready(START_DEADLINE_S)
        self.client = Client(self._endpoint)
        for name in NODES:
            self.start_node(name)
        self.nodes_ready()
        self.start_s = self._time_to_ready(NODES[1])
        """How long a node takes from its start to its first pull, about."""

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

    def _time_to_ready(self, name: str) -> float:
        """Of one that starts while the others work on nothing."""
        self._nodes.pop(name).terminate(5.0)
        began_s = time.monotonic()
        self.start_node(name)
        self.nodes_ready()
        return time.monotonic() - began_s

    def start_node(self, name: str) -> None:
        """Starts a node process; `nodes_ready` waits for it."""
        core = (self._cores[NODES.index(name) % len(self._cores)],)
        cluster = self.settings.config.cluster.model_copy(update={"live_migration": self._live_migration})
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
        self._ready.discard(name)
        self._nodes[name] = self._spawn("node", config, core)

    def nodes_ready(self) -> None:
        for name in self._nodes.keys() - self._ready:
            self._nodes[name].ready(START_DEADLINE_S)
            self._ready.add(name)

    def has_left(self, name: str) -> bool:
        return self._nodes[name].poll() is not None

    def is_ready(self, name: str) -> bool:
        if name not in self._ready and self._nodes[name].answered():
            self._nodes[name].ready(0.0)
            self._ready.add(name)
        return name in self._ready and not self.has_left(name)

    def notice(self, name: str) -> None:
        write_notice(self._folder / name / "notice.json", self._load.grace_s)

    def close(self) -> None:
        self.client.close()
        for child in [*self._nodes.values(), *self._daemons]:
            child.terminate(5.0)


def iteration(cluster: SpotCluster, name: str, times_s: Sequence[float], load: Load) -> dict[str, float]:
    """One rollout; at each of `times_s` after its start half of the slots are preempted, once they are back from the last time.

    Returns its seconds and the preemptions that took place; all nodes are back when it returns.
    """
    job = job_spec(
        run_id=RunId(name),
        op=Op.ROLLOUT,
        iteration=0,
        policy=PolicyRef(),
        settings_json=cluster.settings.model_copy(update={"run_id": name}).model_dump_json(),
    )
    start_s = said_s = time.monotonic()
    cluster.client.submit(job)
    victim = _Victim(cluster, NODES[1], list(times_s), load.pause_s)
    while (status := cluster.client.poll(job.job_id)).phase is not JobPhase.SUCCEEDED:
        assert not status.phase.is_final, f"{status.phase}: {status.error}"
        now_s = time.monotonic()
        elapsed_s = now_s - start_s
        assert elapsed_s < PATIENCE * load.calm_s + START_DEADLINE_S, (
            f"{name}: {status.done} of {status.total} after {elapsed_s:.0f} s"
        )
        victim.turn(elapsed_s)
        if now_s - said_s >= SAY_S:
            said_s = now_s
            tell(
                f"{name}: {status.done} of {status.total} samples, {victim.preemptions} preemptions, {elapsed_s:.0f} s"
            )
        time.sleep(POLL_S)
    spent_s = time.monotonic() - start_s
    victim.settle()
    return {"seconds": round(spent_s, 2), "preemptions": victim.preemptions}


def tell(line: str) -> None:
    """Progress, on standard error."""
    typer.echo(f"{time.strftime('%H:%M:%S')} {line}", err=True)


class _Victim:
    """The node that is preempted: noticed, gone, away for a pause, back. It starts during the pause, as a machine boots."""

    def __init__(self, cluster: SpotCluster, name: str, times_s: list[float], pause_s: float) -> None:
        self._cluster, self._name, self._times_s, self._pause_s = cluster, name, times_s, pause_s
        self._start_at_s: float | None = None
        self._noticed = False
        self.preemptions = 0

    def turn(self, elapsed_s: float) -> None:
        if self._noticed and self._cluster.has_left(self._name):
            self._noticed, self._start_at_s = False, elapsed_s + max(0.0, self._pause_s - self._cluster.start_s)
        elif self._start_at_s is not None and elapsed_s >= self._start_at_s:
            self._start_at_s = None
            self._cluster.start_node(self._name)
        elif not self._noticed and self._start_at_s is None and self._is_due(elapsed_s):
            self._times_s.pop(0)
            self._cluster.notice(self._name)
            self._noticed = True
            self.preemptions += 1

    def settle(self) -> None:
        """Waits until the machine is back."""
        self._times_s.clear()
        until_s = time.monotonic() + START_DEADLINE_S
        while self._noticed or self._start_at_s is not None:
            assert time.monotonic() < until_s, f"{self._name} does not leave"
            self.turn(float("inf"))
            time.sleep(POLL_S)
        self._cluster.nodes_ready()

    def _is_due(self, elapsed_s: float) -> bool:
        return bool(self._times_s) and elapsed_s >= self._times_s[0] and self._cluster.is_ready(self._name)


Arms = Mapping[bool, SpotCluster]
"""With live migration and without."""


def sweep(
    arms: Arms, load: Load, frequencies: Sequence[int], *, together: bool
) -> Iterator[tuple[int, dict[str, float]]]:
    """Iteration seconds with and without live migration at each frequency, as they come; 0 is the undisturbed iteration.

    One after the other, in turns who goes first, unless they run `together`.
    """
    calm_s = load.calm_s
    away_s = LEAVE_S + max(load.pause_s, *(arm.start_s for arm in arms.values()))
    for index, count in enumerate((0, *frequencies)):
        expected_s = calm_s + count * away_s / len(NODES)
        times_s = [expected_s * (place + (count + place) * GOLDEN % 1) / count for place in range(count)]
        run = partial(_both, arms, f"f{count}", times_s, load)
        both = run(threads=2) if together else run(threads=1, first=index % 2 == 1)
        yield count, _compared(both)
        if count == 0:
            calm_s = min(both[True]["seconds"], both[False]["seconds"])


def _both(
    arms: Arms, name: str, times_s: Sequence[float], load: Load, *, threads: int, first: bool = True
) -> dict[bool, dict[str, float]]:
    with ThreadPoolExecutor(threads) as pool:
        order = (first, not first)
        jobs = {
            migrates: pool.submit(
                iteration, arms[migrates], f"{name}-{'with' if migrates else 'without'}", times_s, load
            )
            for migrates in order
        }
        return {migrates: job.result() for migrates, job in jobs.items()}


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


def sized(frequencies: int, minutes: float, step_s: float, *, together: bool, **fixed: Any) -> Load:
    """The longest iteration with which all frequencies are done in so many minutes, by the number of its prompts.

    A step of a batch is taken to cost as much a sample as one alone.
    """
    iterations = (1 if together else 2) * (1 + frequencies * AWAY_SHARE)
    sample_s = fixed["num_steps"] * step_s / len(NODES)
    prompts = max(2, int(60 * minutes / iterations / (sample_s * fixed["group_size"])))
    return Load(prompts=prompts, calm_s=prompts * fixed["group_size"] * sample_s, **fixed)


class Figures:
    """What was measured so far, in the file at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, Any] = {}

    def add(self, more: Mapping[str, Any]) -> None:
        self.found |= more
        self._path.write_text(json.dumps(self.found, indent=1) + "\n")
        tell(json.dumps(more))

    def add_row(self, count: int, row: dict[str, float]) -> None:
        rows = {**self.found.get("frequencies", {}), str(count): row}
        self.add({"frequencies": rows})
        self._path.with_suffix(".svg").write_text(picture(rows))


def commit_figures(figures: Figures, model: str, folder: Path, cores: Sequence[int], pairs: int) -> None:
    tell(f"commits and restores of {RECORDS} records")
    figures.add(record_times(TensorStore(f"file://{folder}/records")))
    shutil.rmtree(folder / "records")
    tell(f"{pairs} pairs of denoising steps")
    figures.add(denoise_stall(model, folder, cores, pairs))
    shutil.rmtree(folder / "stall")
    tell("the store beside a plain copy")
    share = share_of_copy(TensorStore(f"file://{folder}/share"), FileCopies(folder / "copies"))
    figures.add({"store_share_of_copy": share})


def main(
    json_path: Annotated[
        Path, typer.Option("--json", help="Where the figures go; the picture goes beside it, as .svg.")
    ],
    model: Annotated[str, typer.Option(help="Bench model's folder; made where none is given.")] = "",
    frequencies: Annotated[
        str, typer.Option(help="Preemptions an iteration, comma-separated; empty: none.")
    ] = "1,2,4,8",
    minutes: Annotated[float, typer.Option(min=0.1, help="For all iterations together, about.")] = 9.0,
    group_size: Annotated[int, typer.Option(min=2, help="Samples a prompt.")] = 4,
    num_steps: Annotated[int, typer.Option(min=7, help="Denoising steps a sample.")] = 20,
    max_batch: Annotated[int, typer.Option(min=1, help="Samples that a slot denoises together.")] = 4,
    grace_s: Annotated[float, typer.Option(min=0.5, help="Seconds between notice and preemption.")] = 3.0,
    pause_s: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds until a preempted machine is back; its start, where that takes longer."),
    ] = 5.0,
    stall_pairs: Annotated[int, typer.Option(min=10, max=90, help="Pairs of steps of the stall measurement.")] = 80,
) -> None:
    """Writes latencies and shares, then seconds and savings, and the picture."""
    counts = [int(count) for count in frequencies.split(",") if count]
    if not all(1 <= count <= 100 for count in counts):
        raise InputError(f"frequencies = {frequencies}: must be 1 to 100 each")
    cores = sorted(os.sched_getaffinity(0))
    together = len(cores) >= 2 * ARM_CORES
    figures = Figures(json_path)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        if not model:
            model = str(folder / "bench")
            make_bench(Path(model), 0, False, tell)
        commit_figures(figures, model, folder, cores[:2], stall_pairs)
        if not counts:
            return
        load = sized(
            len(counts),
            minutes,
            figures.found["step_ms_alone"] / 1e3,
            together=together,
            group_size=group_size,
            num_steps=num_steps,
            max_batch=max_batch,
            grace_s=grace_s,
            pause_s=pause_s,
        )
        tell(f"{load.prompts} prompts of {group_size} samples, about {load.calm_s:.0f} s an undisturbed iteration")
        arms = {}
        for place, migrates in enumerate((True, False)):
            own = cores[place * ARM_CORES :][: len(NODES)] if together else cores[:2]
            arms[migrates] = SpotCluster(model, folder / f"arm-{place}", load, own, live_migration=migrates)
            stack.callback(arms[migrates].close)
        figures.add({"prompts": load.prompts, "node_start_s": round(arms[True].start_s, 2), "together": together})
        for count, row in sweep(arms, load, counts, together=together):
            figures.add_row(count, row)


if __name__ == "__main__":
    typer.run(main)
