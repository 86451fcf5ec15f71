"""Processes that draw and judge samples beside each other, a model each. Owns who draws what; never trains and never chooses a seed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import Queue
from types import TracebackType
from typing import Any, Self

import numpy as np

from spot_runtime.diffusion.adapter import Adapter
from spot_runtime.diffusion.profiling import Judge, Profiler
from spot_runtime.diffusion.trainer import TrainingSample
from spot_runtime.messages import GenerationRequest
from spot_runtime.rewards.catalog import load_judges
from spot_runtime.rewards.prompts import reward_of
from spot_runtime.types import PolicyRef

BATCH = 8
ANSWER_DEADLINE_S = 300.0
END_DEADLINE_S = 10.0


class Drawers:
    """`count` processes with one model; whoever is free draws the next batch. `embeds` are prompt embeddings by embedding key."""

    def __init__(self, model: str, embeds: Mapping[str, np.ndarray], count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._free: Queue[Connection] = Queue()
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, model, embeds), daemon=True)
            process.start()
            theirs.close()  # its end is the process's alone, so that a process which dies is heard of
            self._processes.append(process)
            self._free.put(ours)
        self._threads = ThreadPoolExecutor(count, "drawer")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.terminate()
            process.join(END_DEADLINE_S)

    def load(self, policy: PolicyRef, adapter: Adapter) -> None:
        """Lets requests name `policy`. Only while nothing is drawn."""
        connections = [self._free.get() for _ in self._processes]
        for connection in connections:
            self._answer(connection, (policy, adapter))
            self._free.put(connection)

    def start(self, requests: Sequence[GenerationRequest]) -> list[Future[list[TrainingSample]]]:
        """Draws `requests` of one shape; the samples of each batch, in order."""
        batches = (requests[start : start + BATCH] for start in range(0, len(requests), BATCH))
        return [self._threads.submit(self._draw, batch) for batch in batches]

    def draw(self, requests: Sequence[GenerationRequest]) -> list[TrainingSample]:
        return ended(self.start(requests))

    def _draw(self, batch: Sequence[GenerationRequest]) -> list[TrainingSample]:
        connection = self._free.get()
        samples: list[TrainingSample] = self._answer(connection, tuple(batch))
        self._free.put(connection)
        return samples

    @staticmethod
    def _answer(connection: Connection, order: object) -> Any:
        connection.send(order)
        assert connection.poll(ANSWER_DEADLINE_S), f"a process said nothing for {ANSWER_DEADLINE_S:.0f} s"
        return connection.recv()


def ended(batches: Sequence[Future[list[TrainingSample]]]) -> list[TrainingSample]:
    """Waits for what `Drawers.start` began."""
    return [sample for batch in batches for sample in batch.result()]


def _serve(connection: Connection, model: str, embeds: Mapping[str, np.ndarray]) -> None:
    """Until the other side is gone: a tuple of requests is drawn, a policy with its adapter loaded."""
    profiler = Profiler(model, embeds, batch=BATCH, device="cpu", threads=1)
    judge = _embedded_judge()
    while True:
        try:
            order = connection.recv()
        except EOFError:
            return
        if isinstance(order[0], PolicyRef):
            profiler.load_policy(*order)
            connection.send(None)
        else:
            connection.send(_judged(profiler, judge, order))


def _judged(profiler: Profiler, judge: Judge, requests: Sequence[GenerationRequest]) -> list[TrainingSample]:
    drawn = profiler.draw(requests)
    parts = zip(requests, drawn.images, drawn.trajectories, drawn.log_probs, strict=True)
    return [
        profiler.training_sample(request, trajectory, log_probs, judge(request, image))
        for request, image, trajectory, log_probs in parts
    ]


def _embedded_judge() -> Judge:
    judges = load_judges()

    def judge(request: GenerationRequest, image: np.ndarray) -> float:
        return judges.score(reward_of(request.row_json), request.row_json.encode(), image).reward

    return judge
