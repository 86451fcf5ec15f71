"""A worker: one process a slot that holds weights and denoises. Owns an engine and its place in the arena; decides nothing.

It takes one command after another from its node, reads latents from the arena, writes the next ones beside them and says so. A command that
fails is answered with its error; the worker lives on.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from spot_runtime.daemons.arena import ArenaShape, LatentArena
from spot_runtime.daemons.process import Ready, run_child
from spot_runtime.daemons.settings import WorkerSettings
from spot_runtime.diffusion.engine import DiffusersEngine, RolloutEngine
from spot_runtime.diffusion.geometry import loading
from spot_runtime.errors import ClusterError, PolicyMismatchError, SpotlightError
from spot_runtime.messages import (
    AdmitRequest,
    Codec,
    DecodeSamples,
    DenoiseStep,
    GenerationRequest,
    LoadPolicy,
    PolicyLoaded,
    RequestAdmitted,
    SamplesDecoded,
    StepDone,
    StopWorker,
    ToWorker,
    WorkerFailed,
    WorkerReady,
)
from spot_runtime.rewards.client import encode_png
from spot_runtime.store.layout import unpack_tensors
from spot_runtime.transport import Dealer
from spot_runtime.types import WorkerId

RECEIVE_S = 1.0

_log = logging.getLogger(__name__)


class Worker:
    """The commands of ToWorker over one engine and one arena. `admitted` holds the request of each slot that was admitted here."""

    def __init__(self, worker_id: WorkerId, engine: RolloutEngine, arena: LatentArena, node: Dealer[ToWorker]) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._arena = arena
        self._node = node
        self._admitted: dict[int, GenerationRequest] = {}

    def handle(self, message: ToWorker) -> None:
        """Carries one command out and answers it."""
        seq = getattr(message, "seq", -1)
        try:
            self._carry_out(message)
        except (SpotlightError, RuntimeError, LookupError, ValueError) as error:
            _log.warning("command failed", extra={"command": type(message).__name__, "seq": seq, "error": str(error)})
            name = type(error).__name__ if isinstance(error, SpotlightError) else "ClusterError"
            slot = message.slot if isinstance(message, AdmitRequest) else -1
            failed = WorkerFailed(worker_id=self._worker_id, seq=seq, error_class=name, error=str(error), slot=slot)
            self._node.send(failed)

    def _carry_out(self, message: ToWorker) -> None:
        match message:
            case LoadPolicy():
                self._load_policy(message)
            case AdmitRequest():
                self._admit(message)
            case DenoiseStep():
                self._denoise(message)
            case DecodeSamples():
                self._decode(message)
            case StopWorker():
                raise AssertionError("the loop ends before this")

    def _load_policy(self, message: LoadPolicy) -> None:
        adapter = None
        if message.path:
            adapter, _ = unpack_tensors(message.policy.key, memoryview(Path(message.path).read_bytes()))
        self._engine.load_policy(message.policy, adapter)
        self._node.send(PolicyLoaded(worker_id=self._worker_id, policy=message.policy))

    def _admit(self, message: AdmitRequest) -> None:
        request = message.request
        self._admitted.pop(message.slot, None)
        tensors, _ = unpack_tensors(request.embedding_key, memoryview(message.embedding))
        self._engine.admit(message.slot, request, tensors["embeds"])
        digest = self._engine.schedule_digest(message.slot)
        if message.schedule_digest not in ("", digest):
            self._engine.release(message.slot)
            raise PolicyMismatchError(
                f"commit of {request.request_id}: schedule_digest = {message.schedule_digest!r}: must be {digest!r}"
            )
        self._admitted[message.slot] = request
        if message.denoising_step == 0:
            self._arena.latents(message.slot, 0)[:] = self._engine.initial_latents(message.slot)
        self._node.send(
            RequestAdmitted(
                worker_id=self._worker_id,
                slot=message.slot,
                request_id=request.request_id,
                schedule_digest=digest,
            )
        )

    def _denoise(self, message: DenoiseStep) -> None:
        strangers = [item.slot for item in message.items if item.slot not in self._admitted]
        if strangers:
            raise ClusterError(f"slots {strangers} hold no request")
        started_s = time.monotonic()
        before = [self._arena.latents(item.slot, item.denoising_step) for item in message.items]
        steps = self._engine.denoise(message.items, before)
        for item, latents, step in zip(message.items, before, steps, strict=True):
            self._record(item.slot, item.denoising_step, latents, step.latents, step.log_prob)
        elapsed_s = time.monotonic() - started_s
        forwards = tuple(step.is_full for step in steps)
        self._node.send(StepDone(worker_id=self._worker_id, seq=message.seq, elapsed_s=elapsed_s, forwards=forwards))

    def _record(self, slot: int, denoising_step: int, before: object, after: object, log_prob: float | None) -> None:
        """Window latents and log-prob of a stochastic step, then the new latents beside the old."""
        start, stop = self._admitted[slot].sde_window
        if start <= denoising_step < stop:
            if log_prob is None:
                raise PolicyMismatchError(f"denoising_step {denoising_step} of slot {slot} has no log-prob")
            place = denoising_step - start
            window = self._arena.window_latents(slot)
            window[place], window[place + 1] = before, after
            self._arena.log_probs(slot)[place] = log_prob
        self._arena.latents(slot, denoising_step + 1)[:] = after

    def _decode(self, message: DecodeSamples) -> None:
        started_s = time.monotonic()
        latents = [self._arena.latents(slot, self._admitted[slot].params.num_steps) for slot in message.slots]
        images = self._engine.decode(message.slots, latents)
        pngs = tuple(encode_png(image) for image in images)
        for slot in message.slots:
            self._engine.release(slot)
            self._admitted.pop(slot)
        elapsed_s = time.monotonic() - started_s
        self._node.send(SamplesDecoded(worker_id=self._worker_id, seq=message.seq, pngs=pngs, elapsed_s=elapsed_s))


def main(settings: WorkerSettings, ready: Ready) -> int:
    shape = ArenaShape(settings.arena_slots, settings.tokens, settings.channels, settings.window_max)
    arena = LatentArena(shape, settings.arena_fd)
    with loading(settings.model):
        engine = DiffusersEngine(settings.model, device=settings.device, threads=settings.threads)
    node: Dealer[ToWorker] = Dealer(settings.node_endpoint, Codec(ToWorker), settings.worker_id)
    worker_id = WorkerId(settings.worker_id)
    worker = Worker(worker_id, engine, arena, node)
    ready.send()
    node.send(WorkerReady(worker_id=worker_id, pid=os.getpid()))
    while not ready.stopping:
        for message in node.receive(RECEIVE_S):
            if isinstance(message, StopWorker):
                return 0
            worker.handle(message)
    node.close()
    return 0


if __name__ == "__main__":
    run_child(WorkerSettings, main)
