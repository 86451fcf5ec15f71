"""Real workers that sleep while the node is paused: the same samples as without, and damaged weights end the worker, not the run.

The node has slots of the CPU, where sleeping is asked for: nothing moves, but what wakes up is checked as on a GPU.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.elastic_node import ElasticNode
from spot_runtime.messages import PauseNode, ResumeNode, WorkerWoke
from spot_runtime.types import Pool, RequestId

NUM_STEPS = 8
SEEDS = 2

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElasticNode]:
    folder = tmp_path_factory.mktemp("machine")
    with ElasticNode(
        folder, slots=1, degree=1, num_steps=NUM_STEPS, max_batch=SEEDS, pool=Pool.RESERVED, sleep="always"
    ) as machine:
        machine.settle([1])
        yield machine


def fall_asleep(machine: ElasticNode) -> list[RequestId]:
    """Requests that have taken two denoising steps, and the trainer may have the device."""
    machine.turns.clear()
    requests = machine.assign(SEEDS)
    flights = machine.core.flights
    machine.until(lambda: all(flights[request].denoising_step >= 2 for request in requests))
    machine.node._event(PauseNode())
    machine.until(lambda: machine.core.heartbeat().paused)
    assert machine.core.roster.workers[machine.rank(0)].is_asleep
    return requests


def test_samples_are_the_same_to_the_bit_with_a_sleep_in_their_middle(machine: ElasticNode) -> None:
    calm = machine.assign(SEEDS)
    machine.finish(calm)
    requests = fall_asleep(machine)
    sleeper = machine.rank(0)
    steps = {request: machine.core.flights[request].denoising_step for request in requests}
    assert all(step < NUM_STEPS for step in steps.values())
    machine.node._event(ResumeNode())
    machine.finish(requests)
    assert [turn.event.worker_id for turn in machine.turns if isinstance(turn.event, WorkerWoke)] == [sleeper]
    assert machine.rank(0) == sleeper
    assert np.array_equal(machine.latents(requests), machine.latents(calm))
    assert np.array_equal(machine.log_probs(requests), machine.log_probs(calm))


def test_weights_that_were_damaged_in_their_sleep_end_the_worker_and_no_sample_is_wrong(machine: ElasticNode) -> None:
    """The second process of the slot computes with memory that it shares, which is torn while it sleeps: neither it nor the next, which
    is offered the same memory, serves; the third takes the weights from the model folder.
    """
    calm = machine.assign(SEEDS)
    machine.finish(calm)
    machine.signal(machine.rank(0), signal.SIGKILL)
    machine.until(lambda: not machine.core.groups)
    machine.settle([1])
    requests = fall_asleep(machine)
    sleeper, fd = machine.rank(0), machine.node._weights_fd
    os.pwrite(fd, bytes(64), os.fstat(fd).st_size // 2)
    machine.node._event(ResumeNode())
    machine.finish(requests)
    assert sleeper not in machine.core.roster.workers
    assert not any(isinstance(turn.event, WorkerWoke) for turn in machine.turns)
    assert "woke up other than they fell asleep" in (machine.folder / "node" / f"{sleeper}.log").read_text()
    assert [machine.scored[request] for request in requests] == [1] * SEEDS
    assert not machine.failed
    assert np.array_equal(machine.latents(requests), machine.latents(calm))


def test_a_worker_that_is_killed_in_its_sleep_is_replaced_when_the_trainer_has_ended(machine: ElasticNode) -> None:
    requests = fall_asleep(machine)
    victim = machine.rank(0)
    machine.signal(victim, signal.SIGKILL)
    machine.until(lambda: victim not in machine.core.roster.workers)
    machine.until(lambda: machine.core.roster.waiting > 0)
    assert not machine.core.groups
    assert machine.core.heartbeat().paused
    machine.node._event(ResumeNode())
    machine.finish(requests)
    calm = machine.assign(SEEDS)
    machine.finish(calm)
    assert np.array_equal(machine.latents(requests), machine.latents(calm))
