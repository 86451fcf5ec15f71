"""Sequence-parallel groups of real processes under kill -9, SIGSTOP and slots that come and go: the same samples, none lost.

A machine with two slots whose groups have degree 2; the samples that an engine makes alone are the measure.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.elastic_node import ElasticNode
from spot_runtime.messages import StepDone, StepItem, WorkerFailed
from spot_runtime.node import core
from spot_runtime.node.commands import Command, FormGroup, SeedWorker, SendToWorker
from spot_runtime.node.group import GroupState
from spot_runtime.types import RequestId, WorkerId

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

NUM_STEPS = 10
SEEDS = 4
TOLERANCE = 1e-5
CACHE_THRESHOLD = 0.3


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElasticNode]:
    """One that holds its requests for as long as a busy machine takes to start a worker again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "HOLD_S", 300.0)
        with ElasticNode(tmp_path_factory.mktemp("machine"), num_steps=NUM_STEPS, max_batch=SEEDS) as machine:
            yield machine


@pytest.fixture(scope="module")
def alone(machine: ElasticNode) -> np.ndarray:
    """Final latents [seeds, L, C] as one engine makes them by itself, without any node."""
    from spot_runtime.diffusion.engine import DiffusersEngine
    from spot_runtime.types import PolicyRef

    engine = DiffusersEngine("tiny")
    engine.load_policy(PolicyRef(), None)
    finals = []
    for seed in range(SEEDS):
        request = machine._request(seed)
        engine.admit(0, request, machine.store.get(request.embedding_key).tensors["embeds"])
        latents = engine.initial_latents(0)
        for step in range(NUM_STEPS):
            (done,) = engine.denoise([StepItem(slot=0, denoising_step=step)], [latents])
            latents = done.latents
        finals.append(latents)
    engine.close()
    return np.stack(finals)


def begin(machine: ElasticNode, cache_threshold: float = 0.0) -> list[RequestId]:
    """A whole machine with a batch that has taken two denoising steps at degree 2."""
    if sorted(machine.core.roster.present) != [0, 1]:
        machine.change_slots([0, 1])
    machine.settle([2])
    machine.returned.clear()
    requests = machine.assign(SEEDS, cache_threshold=cache_threshold)
    machine.until(lambda: all(steps(machine, request) >= 2 for request in requests))
    return requests


def steps(machine: ElasticNode, request: RequestId) -> int:
    flight = machine.core.flights.get(request)
    return flight.denoising_step if flight else NUM_STEPS


def is_stepping(machine: ElasticNode) -> bool:
    return any(group.state is GroupState.BUSY and not group.is_decoding for group in machine.core.groups.values())


def check(machine: ElasticNode, requests: Sequence[RequestId], alone: np.ndarray) -> None:
    """All of them scored once, and the samples of an undisturbed engine."""
    machine.finish(requests)
    assert [machine.scored[request] for request in requests] == [1] * SEEDS
    assert not machine.failed
    assert np.abs(machine.latents(requests) - alone).max() <= TOLERANCE
    assert np.isfinite(machine.log_probs(requests)).all()


class Strike:
    """Kills the first worker that a command of `kind` names, as soon as the command was sent."""

    def __init__(self, machine: ElasticNode, kind: type[Command]) -> None:
        self.machine, self.kind = machine, kind
        self.victim: WorkerId | None = None
        machine.on_commands = self

    def __call__(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, self.kind) and self.victim is None:
                self.victim = command.ranks[-1] if isinstance(command, FormGroup) else command.worker_id  # type: ignore[attr-defined]
                self.machine.signal(self.victim, signal.SIGKILL)


@pytest.mark.parametrize("rank", [0, 1])
def test_sigkill_of_a_rank_in_mid_step_costs_at_most_that_step(
    machine: ElasticNode, alone: np.ndarray, rank: int
) -> None:
    requests = begin(machine)
    machine.until(lambda: is_stepping(machine))
    lost, generation = machine.core.lost_steps, machine.core.generation
    victim = machine.rank(rank)
    machine.signal(victim, signal.SIGKILL)
    machine.until(lambda: victim not in machine.core.roster.workers)
    check(machine, requests, alone)
    assert machine.core.lost_steps - lost <= SEEDS
    assert machine.core.generation > generation


@pytest.mark.parametrize("rank", [0, 1])
def test_samples_with_step_caches_are_the_same_when_a_rank_dies(machine: ElasticNode, rank: int) -> None:
    calm = begin(machine, CACHE_THRESHOLD)
    machine.finish(calm)
    done = [t.event for t in machine.turns if isinstance(t.event, StepDone)]
    assert not all(all(step.forwards) for step in done), "the caches never skipped"
    requests = begin(machine, CACHE_THRESHOLD)
    lost = machine.core.lost_steps
    victim = machine.rank(rank)
    machine.signal(victim, signal.SIGKILL)
    machine.until(lambda: victim not in machine.core.roster.workers)
    machine.finish(requests)
    pairs = zip(requests, calm, strict=True)
    assert max(np.abs(machine.finals[one] - machine.finals[two]).max() for one, two in pairs) <= TOLERANCE
    assert rank == 0 or machine.core.lost_steps - lost <= SEEDS  # a lead may die after the others have ended its step


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_found_and_killed(machine: ElasticNode, alone: np.ndarray, rank: int) -> None:
    requests = begin(machine)
    victim = machine.rank(rank)
    machine.signal(victim, signal.SIGSTOP)
    check(machine, requests, alone)
    assert victim not in machine.core.roster.workers


def test_a_death_during_the_join_makes_another_generation(machine: ElasticNode, alone: np.ndarray) -> None:
    requests = begin(machine)
    machine.change_slots([0])
    machine.until(lambda: machine.degrees() == [1])
    strike = Strike(machine, FormGroup)
    machine.change_slots([0, 1])
    machine.until(lambda: strike.victim is not None)
    check(machine, requests, alone)


def test_a_death_during_the_copy_of_the_weights_leaves_nobody_unseeded_in_service(
    machine: ElasticNode, alone: np.ndarray
) -> None:
    requests = begin(machine)
    strike = Strike(machine, SeedWorker)
    machine.signal(machine.rank(1), signal.SIGKILL)
    machine.until(lambda: strike.victim is not None)
    check(machine, requests, alone)
    served = {c.worker_id for turn in machine.turns for c in turn.commands if isinstance(c, SendToWorker)}
    assert strike.victim not in served


def test_two_changes_in_quick_succession(machine: ElasticNode, alone: np.ndarray) -> None:
    requests = begin(machine)
    machine.change_slots([0])
    machine.change_slots([1])
    machine.until(lambda: machine.degrees() == [1])
    machine.signal(machine.rank(0), signal.SIGKILL)
    machine.change_slots([0, 1])
    check(machine, requests, alone)
    machine.settle([2])


def test_shrinking_to_zero_and_back_goes_on_at_the_denoising_step_reached(
    machine: ElasticNode, alone: np.ndarray
) -> None:
    requests = begin(machine)
    lost = machine.core.lost_steps
    machine.change_slots([])
    machine.until(lambda: not machine.core.groups and not machine.core.roster.occupants)
    reached = [steps(machine, request) for request in requests]
    assert min(reached) >= 2
    machine.change_slots([0, 1])
    check(machine, requests, alone)
    assert machine.core.lost_steps == lost


def test_a_machine_that_stays_without_slots_commits_and_returns_its_requests(
    machine: ElasticNode, alone: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = begin(machine)
    monkeypatch.setattr(core, "HOLD_S", 1.0)
    machine.change_slots([])
    machine.until(lambda: len(machine.returned) == SEEDS)
    assert all(back.commit_key and back.denoising_step >= 2 for back in machine.returned)
    machine.change_slots([1])
    for back in machine.returned:
        machine.assign_again(back)
    check(machine, requests, alone)


def test_weights_that_were_torn_in_shared_memory_never_serve(tmp_path: Path) -> None:
    with ElasticNode(tmp_path, slots=1, num_steps=NUM_STEPS, max_batch=SEEDS) as machine:
        machine.settle([1])
        calm = machine.assign(SEEDS)
        machine.finish(calm)
        fd = machine.node._weights_fd
        os.pwrite(fd, bytes(64), os.fstat(fd).st_size // 2)
        machine.change_slots([0, 1])
        machine.settle([2])
        refused = [t.event for t in machine.turns if isinstance(t.event, WorkerFailed)]
        assert [event.error_class for event in refused] == ["UnseededError"]
        assert machine.core.roster.digest
        again = machine.assign(SEEDS)
        machine.finish(again)
        assert np.abs(machine.latents(again) - machine.latents(calm)).max() <= TOLERANCE
