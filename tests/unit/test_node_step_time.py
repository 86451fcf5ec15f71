"""What a node says a denoising step costs."""

import pytest
from node_processes import settle

from spot_runtime.messages import (
    Assignment,
    AssignWork,
    DecodeSamples,
    DenoiseStep,
    GenerationRequest,
    SamplesDecoded,
    SamplingParams,
    StepDone,
    WelcomeNode,
)
from spot_runtime.node.commands import Command, SendToWorker
from spot_runtime.node.core import NodeCore
from spot_runtime.node.events import InputsFetched
from spot_runtime.types import JobId, LeaseId, NodeId, Op, PolicyRef, Pool, RequestId, RunId, WorkerId

WORKER = WorkerId("n-w0")


def request(name: str, threshold: float) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(name),
        job_id=JobId("job"),
        run_id=RunId("run"),
        op=Op.EXPLORE,
        prompt_id="p",
        prompt="a prompt",
        row_json="{}",
        seed=0,
        sde_window=(0, 0),
        params=SamplingParams(height=64, width=64, num_steps=2, noise_level=0.7, cache_threshold=threshold),
        policy=PolicyRef(),
        embedding_key="",
    )


class Node:
    """One worker that takes as long as it is told."""

    def __init__(self, **thresholds: float) -> None:
        self.core = NodeCore(
            NodeId("n"),
            Pool.SPOT,
            workers=1,
            max_batch=8,
            arena_slots=16,
            step_deadline_s=60.0,
            start_deadline_s=60.0,
            now_s=0.0,
        )
        started = self.core.start(0.0)
        self.core.handle(WelcomeNode(heartbeat_s=1.0, reward_url=""), 0.0)
        assignments = tuple(
            Assignment(lease_id=LeaseId(name), request=request(name, threshold))
            for name, threshold in thresholds.items()
        )
        self.core.handle(AssignWork(group_id="n-g0", assignments=assignments), 0.0)
        for name in thresholds:
            self.core.handle(InputsFetched(RequestId(name)), 0.0)
        self.order = self._order(settle(self.core, started, 0.0))

    @staticmethod
    def _order(commands: list[Command]) -> DenoiseStep | DecodeSamples | None:
        sent = [c.message for c in commands if isinstance(c, SendToWorker)]
        return sent[-1] if sent else None  # type: ignore[return-value]

    def answer(self, elapsed_s: float) -> int:
        """Carries the outstanding order out; how many samples it had."""
        order = self.order
        if isinstance(order, DenoiseStep):
            done: StepDone | SamplesDecoded = StepDone(worker_id=WORKER, seq=order.seq, elapsed_s=elapsed_s)
            samples = len(order.items)
        else:
            assert isinstance(order, DecodeSamples)
            samples = len(order.slots)
            done = SamplesDecoded(worker_id=WORKER, seq=order.seq, pngs=(b"",) * samples, elapsed_s=elapsed_s)
        self.order = self._order(self.core.handle(done, 0.0))
        return samples


def test_a_step_costs_its_share_of_the_batch_and_of_decoding() -> None:
    """Two samples: 2 + 2 s of steps and 1 s of decoding over 4 sample-steps, up to the weight of what is older."""
    node = Node(a=0.0, b=0.0)
    assert [node.answer(s) for s in (2.0, 2.0, 1.0)] == [2, 2, 2]
    assert node.core.step_s == pytest.approx(5 / 4, rel=0.02)
    assert [flight.busy_s for flight in node.core.flights.values()] == [2.5, 2.5]


def test_samples_with_a_step_cache_are_busy_time_but_no_measurement() -> None:
    node = Node(a=0.3, b=0.3)
    for elapsed_s in (2.0, 0.1, 1.0):
        node.answer(elapsed_s)
    assert node.core.step_s == 0.0
    assert [flight.busy_s for flight in node.core.flights.values()] == [pytest.approx(1.55)] * 2


def test_samples_with_and_without_a_step_cache_have_batches_of_their_own() -> None:
    """Denoising first, the oldest first, decoding as soon as there is something to decode."""
    node = Node(a=0.0, b=0.3, c=0.0)
    assert [node.answer(s) for s in (2.0, 2.0, 1.0)] == [2, 2, 2]
    measured = node.core.step_s
    assert [node.answer(s) for s in (9.0, 9.0, 9.0)] == [1, 1, 1]
    assert node.core.step_s == measured == pytest.approx(5 / 4, rel=0.02)
    assert node.order is None
