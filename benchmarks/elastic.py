"""What it costs to change the sequence-parallel degree, against an engine restart in the same run.

    python -m benchmarks.elastic --json FILE [--pictures FOLDER]

Real processes on the bench model: the node daemon's shell here, its workers as children. Times run from an event (a slot is announced,
noticed or killed) to the moment at which the last rank begins to compute the first denoising step at the new degree: when it was done, less
what it took, so binding the policy and admitting the requests count. That is so for the restart as for the elastic change; a step itself
costs the same in both and is told beside it (`step_s`, `step_one_s`). Events fall on all parts of a step in turn.

    cold_start_s         engine restart: new processes, imports, weights from the model folder, group; `cold_*_s` are its parts
    grow_s               degree 1 to 2: a slot arrives, a standby takes the weights from its peer, the group is rebuilt
    speedup              cold_start_s / grow_s                                                        wanted: >= 20
    shrink_notice_steps  denoising steps begun at degree 2 after the notice, the one in hand included   wanted: <= 2
    shrink_kill_s        SIGKILL of a rank in mid-step to the start of the next step at degree 1        wanted: <= 0.5
    lost_steps           most denoising steps that any request took again after a kill                  wanted: <= 1
    untouched_share      rate of a group while another slot of its machine comes and goes, to that before  wanted: about 1

`throughput` is sample-steps a second over time around one revocation and one arrival, elastic and by restart.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.elastic_node import ElasticNode, Turn
from benchmarks.pictures import phases, rates
from spot_runtime.messages import DenoiseStep, GroupJoined, StepDone, WorkerReady, WorkerSeeded
from spot_runtime.node.commands import FormGroup, SendToWorker
from spot_runtime.node.group import GroupState

BATCH = 1
"""A step at degree 1 then takes .15 to .3 s on a core, which is what the bounds are meant for; half a step is what a growth waits for."""
MANY_STEPS = 190
"""Denoising steps of a request: more than any measurement takes, so that none ends within."""
WINDOW_S = 20.0
BIN_S = 1.0
REVOKED_S, ARRIVED_S = 6.0, 13.0
DEADLINE_S = 300.0

Figures = dict[str, Any]


def orders(turn: Turn) -> list[SendToWorker]:
    """The denoising steps that a turn commanded."""
    return [c for c in turn.commands if isinstance(c, SendToWorker) and isinstance(c.message, DenoiseStep)]


def begun(node: ElasticNode, degree: int, after_s: float) -> float | None:
    """When the last rank began with the first denoising step at `degree` that was commanded after a moment and is done by all ranks."""
    later = [t for t in node.turns if t.at_s > after_s]
    ordered = [order.message.seq for t in later if t.degrees == (degree,) for order in orders(t)]
    began: dict[int, list[float]] = {seq: [] for seq in ordered}
    for turn in later:
        if isinstance(turn.event, StepDone) and turn.event.seq in began:
            began[turn.event.seq].append(turn.at_s - turn.event.elapsed_s)
    return next((max(moments) for moments in began.values() if len(moments) == degree), None)


def wait_begun(node: ElasticNode, degree: int, after_s: float) -> float:
    node.until(lambda: begun(node, degree, after_s) is not None, DEADLINE_S)
    at_s = begun(node, degree, after_s)
    assert at_s is not None
    return at_s


def within_a_step(node: ElasticNode, share: float) -> None:
    """Runs until `share` of a denoising step has passed, as long as the last one took."""
    last_s = next(t.event.elapsed_s for t in reversed(node.turns) if isinstance(t.event, StepDone))
    run_until(node, time.monotonic() + share * last_s)


def at_work(folder: Path, model: Path, slots: int, degree: int = 2, **options: Any) -> ElasticNode:
    """A node with a batch to denoise, whose steps do not end within the measurement."""
    node = ElasticNode(
        folder, model=str(model), slots=slots, degree=degree, max_batch=BATCH, num_steps=MANY_STEPS, **options
    )
    node.assign(BATCH)
    return node


# ---- one change ---------------------------------------------------------------------------------------------------------------------


def cold_start(folder: Path, model: Path) -> Figures:
    """A whole engine of degree 2 from nothing, with its parts."""
    started_s = time.monotonic()
    with at_work(folder, model, slots=2, standbys=0) as node:
        first_s = wait_begun(node, 2, started_s)
        ends = [max(t.at_s for t in node.turns if isinstance(t.event, kind)) for kind in (WorkerReady, WorkerSeeded)]
        joined_s = max(t.at_s for t in node.turns if isinstance(t.event, GroupJoined) and t.at_s <= first_s)
    moments = [started_s, *ends, joined_s, max(joined_s, first_s)]
    names = ("imports", "weights", "group", "first_command")
    parts = {f"cold_{name}_s": end - start for name, start, end in zip(names, moments, moments[1:], strict=False)}
    return {"cold_start_s": first_s - started_s, **parts}


def grow(node: ElasticNode, share: float) -> Figures:
    """A second slot arrives while the first works."""
    node.settle([1])
    wait_begun(node, 1, time.monotonic())
    within_a_step(node, share)
    event_s = time.monotonic()
    node.change_slots([0, 1])
    first_s = wait_begun(node, 2, event_s)
    seeded_s = next(t.at_s for t in node.turns if t.at_s > event_s and isinstance(t.event, WorkerSeeded))
    formed_s = next(
        t.at_s for t in node.turns if t.at_s >= seeded_s and any(isinstance(c, FormGroup) for c in t.commands)
    )
    return {
        "grow_s": first_s - event_s,
        "grow_weights_s": seeded_s - event_s,
        "grow_boundary_s": formed_s - seeded_s,
        "grow_group_s": first_s - formed_s,
    }


def shrink_by_notice(node: ElasticNode, share: float) -> Figures:
    node.settle([2])
    wait_begun(node, 2, time.monotonic())
    within_a_step(node, share)
    event_s = time.monotonic()
    in_hand = sum(group.state is GroupState.BUSY for group in node.core.groups.values())
    node.change_slots([0], 30.0)
    first_s = wait_begun(node, 1, event_s)
    between = [t for t in node.turns if event_s < t.at_s < first_s and t.degrees == (2,) and orders(t)]
    return {"shrink_notice_steps": in_hand + len(between), "shrink_notice_s": first_s - event_s}


def shrink_by_kill(node: ElasticNode, share: float, rank: int) -> Figures:
    """The slot's process dies in mid-step, and the slot is gone with it."""
    node.settle([2])
    wait_begun(node, 2, time.monotonic())
    within_a_step(node, share)
    before = {flight.request_id: flight.denoising_step for flight in node.core.flights.values()}
    lost = node.core.lost_steps
    victim = node.rank(rank)
    slot = node.core.roster.workers[victim].slot
    event_s = time.monotonic()
    node.signal(victim, signal.SIGKILL)
    node.change_slots([s for s in (0, 1) if s != slot], 30.0)
    first_s = wait_begun(node, 1, event_s)
    after = {flight.request_id: flight.denoising_step for flight in node.core.flights.values()}
    assert all(after[request] >= step for request, step in before.items()), "a request went back"
    return {"shrink_kill_s": first_s - event_s, "lost_steps": (node.core.lost_steps - lost) / BATCH}


def changes(folder: Path, model: Path, repeats: int) -> Figures:
    """Medians of each change; the worst of what must not be exceeded."""
    seen: dict[str, list[float]] = {}
    with at_work(folder, model, slots=1) as node:
        for index in range(repeats):
            share = (index + 0.5) / repeats
            kill = partial(shrink_by_kill, rank=index % 2)
            for change in (grow, shrink_by_notice, grow, kill):
                for name, value in change(node, share).items():
                    seen.setdefault(name, []).append(value)
                if not node.core.roster.present - {1}:  # rank 0's slot went: the other one takes its name
                    node.change_slots([0, 1])
                    node.settle([2])
                    node.change_slots([0])
                    wait_begun(node, 1, time.monotonic())
                if min(flight.steps_left for flight in node.core.flights.values()) < MANY_STEPS // 3:
                    node.assign(BATCH)
        steps = {degree: step_durations(node, degree) for degree in (1, 2)}
    worst = ("shrink_notice_steps", "lost_steps")
    figures: Figures = {name: max(values) if name in worst else median(values) for name, values in seen.items()}
    figures["grow_s_all"], figures["shrink_kill_s_all"] = seen["grow_s"], seen["shrink_kill_s"]
    return {**figures, "step_s": median(steps[2]), "step_one_s": median(steps[1])}


def step_durations(node: ElasticNode, degree: int) -> list[float]:
    return [t.event.elapsed_s for t in node.turns if isinstance(t.event, StepDone) and t.degrees == (degree,)]


# ---- a group that nothing happens to ------------------------------------------------------------------------------------------------


def untouched(folder: Path, model: Path) -> Figures:
    """Two groups of one slot each; the second slot goes and comes back. Steps of the first in both spans, of the same length."""
    with at_work(folder, model, slots=2, degree=1, standbys=1) as node:
        node.assign(BATCH)
        node.settle([1, 1])
        span_s = 5.0
        lead = node.core.groups[min(node.core.groups)].lead
        calm = steps_of(node, lead, span_s, lambda: None)
        node.change_slots([0], 30.0)
        node.until(lambda: node.degrees() == [1])
        changed = steps_of(node, lead, span_s, lambda: node.change_slots([0, 1]))
        assert node.core.groups[min(node.core.groups)].lead == lead
    return {"untouched_share": changed / calm}


def steps_of(node: ElasticNode, lead: str, span_s: float, event: Callable[[], None]) -> int:
    """Denoising steps of one worker within a span at whose beginning something happens."""
    began_s = time.monotonic()
    event()
    node.until(lambda: time.monotonic() - began_s > span_s, DEADLINE_S)
    done = [t for t in node.turns if t.at_s > began_s and isinstance(t.event, StepDone)]
    return sum(t.event.worker_id == lead for t in done)  # type: ignore[union-attr]


# ---- throughput over time -------------------------------------------------------------------------------------------------------------


def elastic_window(folder: Path, model: Path) -> list[float]:
    """Moments of sample-steps within WINDOW_S, a slot going at REVOKED_S and coming at ARRIVED_S."""
    with at_work(folder, model, slots=2) as node:
        node.settle([2])
        began_s = time.monotonic()
        run_until(node, began_s + REVOKED_S)
        node.change_slots([0], 30.0)
        run_until(node, began_s + ARRIVED_S)
        node.change_slots([0, 1])
        run_until(node, began_s + WINDOW_S)
        return sample_steps(node, began_s)


def restart_window(folder: Path, model: Path) -> list[float]:
    """The same window where every change is an engine restart with the slots that are there."""
    done: list[float] = []
    began_s = 0.0
    for index, (slots, until_s) in enumerate(((2, REVOKED_S), (1, ARRIVED_S), (2, WINDOW_S))):
        with at_work(folder / str(index), model, slots=slots, standbys=0) as node:
            if index == 0:
                node.settle([2])
                began_s = time.monotonic()
            run_until(node, began_s + until_s)
            done += sample_steps(node, began_s)
    return done


def run_until(node: ElasticNode, moment_s: float) -> None:
    node.until(lambda: time.monotonic() > moment_s, DEADLINE_S)


def sample_steps(node: ElasticNode, began_s: float) -> list[float]:
    """When steps were done, once for each sample, from a moment on."""
    leads = {t.at_s: t for t in node.turns if isinstance(t.event, StepDone)}
    moments: list[float] = []
    seen: set[int] = set()
    for at_s, turn in leads.items():
        assert isinstance(turn.event, StepDone)
        if turn.event.seq not in seen and at_s > began_s:
            moments += [at_s - began_s] * BATCH
        seen.add(turn.event.seq)
    return moments


def binned(moments: Sequence[float]) -> list[tuple[float, float]]:
    """(middle of the bin, sample-steps a second)."""
    bins = [0] * int(WINDOW_S / BIN_S)
    for moment in moments:
        if moment < WINDOW_S:
            bins[int(moment / BIN_S)] += 1
    return [((index + 0.5) * BIN_S, count / BIN_S) for index, count in enumerate(bins)]


# ---- all ------------------------------------------------------------------------------------------------------------------------------


def bench_model(folder: Path) -> Path:
    command = [sys.executable, "-m", "spot_runtime.models", "bench-dit", "--out", str(folder), "--no-measure"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE_S)
    return folder


def draw(figures: Figures, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    cold = {name: figures[f"cold_{name}_s"] for name in ("imports", "weights", "group", "first_command")}
    elastic = {
        "weights": figures["grow_weights_s"],
        "wait for a step's end": figures["grow_boundary_s"],
        "group": figures["grow_group_s"],  # admission is in it
    }
    cold["admission"] = cold.pop("first_command")
    title = "From the event to the first denoising step at degree 2"
    (folder / "elastic_start.svg").write_text(phases(title, {"restart": cold, "elastic": elastic}))
    marks = {"slot revoked": REVOKED_S, "slot added": ARRIVED_S}
    title = "Sample-steps a second on one machine of two slots"
    (folder / "elastic_throughput.svg").write_text(rates(title, figures["throughput"], marks))


def main(
    json_path: Annotated[Path, typer.Option("--json", help="Where the figures go.")],
    pictures: Annotated[Path | None, typer.Option(help="Folder for the pictures; none: no pictures.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Changes of each kind.")] = 4,
) -> None:
    """Writes the figures of one run."""
    machine = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = bench_model(folder / "bench-dit")
        typer.echo("engine restarts", err=True)
        cold = [cold_start(folder / f"cold-{index}", model) for index in range(2)]
        figures: Figures = {name: median(run[name] for run in cold) for name in cold[0]}
        typer.echo("changes of the degree", err=True)
        figures |= changes(folder / "changes", model, repeats)
        figures["speedup"] = figures["cold_start_s"] / figures["grow_s"]
        typer.echo("a group that nothing happens to, and rates over time", err=True)
        figures |= untouched(folder / "untouched", model)
        figures["throughput"] = {
            "elastic": binned(elastic_window(folder / "elastic", model)),
            "restart": binned(restart_window(folder / "restart", model)),
        }
    for name, value in figures.items():
        if not isinstance(value, list | dict):
            typer.echo(f"{name:<22} {value:.3f}")
    json_path.write_text(json.dumps(figures | machine, indent=2))
    if pictures is not None:
        draw(figures, pictures)


if __name__ == "__main__":
    typer.run(main)
