"""A worker: a process that stands by, gets a slot and its weights, and denoises as a rank of a group. Owns an engine; decides nothing.

Its imports are done before it says that it is ready; weights and device wait for LoadWeights. It takes one command after another from its
node, reads latents from the arena and, as the lead of its group, writes the next ones beside them. A command that fails is answered with
its error and ends its part in the group, so that no other rank waits for it; the worker lives on. Only weights that do not come back from
their sleep as they went end it, so that its node starts another.
"""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spot_runtime.daemons.arena import ArenaShape, LatentArena
from spot_runtime.daemons.process import Ready, run_child
from spot_runtime.daemons.settings import WorkerSettings
from spot_runtime.diffusion.engine import DiffusersEngine, RolloutEngine
from spot_runtime.diffusion.geometry import loading
from spot_runtime.errors import ClusterError, GroupError, PolicyMismatchError, SpotlightError, UnseededError
from spot_runtime.messages import (
    AdmitRequest,
    Codec,
    DecodeSamples,
    DenoiseStep,
    DismissRequest,
    GenerationRequest,
    GroupJoined,
    JoinGroup,
    LoadPolicy,
    LoadWeights,
    PolicyLoaded,
    RequestAdmitted,
    SamplesDecoded,
    SleepWorker,
    StepDone,
    StepItem,
    StopWorker,
    ToWorker,
    WakeWorker,
    WorkerFailed,
    WorkerReady,
    WorkerSeeded,
    WorkerSlept,
    WorkerWoke,
)
from spot_runtime.parallel.cuda_ipc import DeviceWeights, machine_weights
from spot_runtime.parallel.group import SequenceGroup
from spot_runtime.parallel.shared import SharedWeights
from spot_runtime.rewards.client import encode_png
from spot_runtime.store.layout import unpack_tensors
from spot_runtime.transport import Dealer
from spot_runtime.types import WorkerId

RECEIVE_S = 1.0
WAKE_S = 30.0
"""A device that has no room for the weights is waited for so long: a trainer that was told to stop may still be at its last batch."""
WAKE_POLL_S = 0.5

_log = logging.getLogger(__name__)


class Worker:
    """The commands of ToWorker over one engine and one arena. `admitted` holds the request of each arena slot that was admitted here.

    UNSEEDED until it has weights, and without a generation until it has joined one: any command that needs either is refused.
    """

    def __init__(self, settings: WorkerSettings, arena: LatentArena, node: Dealer[ToWorker]) -> None:
        self._worker_id = WorkerId(settings.worker_id)
        self._settings = settings
        self._arena = arena
        self._node = node
        self._loaded: RolloutEngine | None = None
        self._device = torch.device("cpu")
        self._group: SequenceGroup | None = None
        self._rank: int | None = None
        self._admitted: dict[int, GenerationRequest] = {}

    def handle(self, message: ToWorker) -> None:
        """Carries one command out and answers it. Raises ClusterError where it cannot serve any more."""
        seq = getattr(message, "seq", -1)
        try:
            self._carry_out(message)
        except (SpotlightError, RuntimeError, LookupError, ValueError) as error:
            if isinstance(message, SleepWorker | WakeWorker):
                raise ClusterError(f"{error}; the worker starts anew") from error
            _log.warning("command failed", extra={"command": type(message).__name__, "seq": seq, "error": str(error)})
            name = type(error).__name__ if isinstance(error, SpotlightError) else "ClusterError"
            slot = message.slot if isinstance(message, AdmitRequest) else -1
            if seq >= 0:
                self._leave_group()
            failed = WorkerFailed(worker_id=self._worker_id, seq=seq, error_class=name, error=str(error), slot=slot)
            self._node.send(failed)

    def _carry_out(self, message: ToWorker) -> None:
        match message:
            case LoadWeights():
                self._load_weights(message)
            case JoinGroup():
                self._join_group(message)
            case LoadPolicy():
                self._load_policy(message)
            case AdmitRequest():
                self._admit(message)
            case DismissRequest():
                self._dismiss(message.slot)
            case DenoiseStep():
                self._denoise(message)
            case DecodeSamples():
                self._decode(message)
            case SleepWorker():
                self._engine.sleep()
                self._node.send(WorkerSlept(worker_id=self._worker_id, seq=message.seq))
            case WakeWorker():
                self._wake()
                self._node.send(WorkerWoke(worker_id=self._worker_id, seq=message.seq))
            case StopWorker():
                raise AssertionError("the loop ends before this")

    @property
    def _engine(self) -> RolloutEngine:
        if self._loaded is None:
            raise UnseededError("this worker has no weights yet")
        return self._loaded

    def _load_weights(self, message: LoadWeights) -> None:
        """Serves only with whole weights that are those of its peers: whatever is not raises UnseededError."""
        started_s, device = time.monotonic(), torch.device(message.device)
        stay = not (self._settings.offload_alone or self._settings.sleeps)
        machine = machine_weights(self._settings.weights_fd, device, stay=stay)
        published = _published(machine) if message.from_peer else None
        with loading(self._settings.model):
            engine = DiffusersEngine(
                self._settings.model,
                device=message.device,
                threads=self._settings.threads,
                dtype=self._settings.dtype,
                offload_alone=self._settings.offload_alone,
                is_seeded=published is None,
            )
        if published is not None:
            engine.weights.seed(*published)
        digest = engine.weights.digest
        if message.digest not in ("", digest):
            raise UnseededError(f"weights have digest {digest}: must be {message.digest}, as this node's others")
        machine.publish(engine.weights)
        self._loaded, self._device = engine, device
        elapsed_s = time.monotonic() - started_s
        self._node.send(WorkerSeeded(worker_id=self._worker_id, seq=message.seq, digest=digest, elapsed_s=elapsed_s))

    def _join_group(self, message: JoinGroup) -> None:
        engine, generation = self._engine, message.generation
        self._leave_group()
        if generation.degree > 1:
            self._group = SequenceGroup.join(generation, self._device)
            engine.set_group(self._group)
        self._rank = generation.rank
        self._node.send(GroupJoined(worker_id=self._worker_id, seq=message.seq))

    def _leave_group(self) -> None:
        group, self._group, self._rank = self._group, None, None
        if group is not None:
            self._engine.set_group(None)
            try:
                group.close()
            except GroupError as error:
                _log.warning("group not closed", extra={"error": str(error)})

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
        self._node.send(
            RequestAdmitted(
                worker_id=self._worker_id,
                slot=message.slot,
                request_id=request.request_id,
                schedule_digest=digest,
            )
        )

    def _dismiss(self, slot: int) -> None:
        self._engine.release(slot)
        self._admitted.pop(slot, None)

    def _denoise(self, message: DenoiseStep) -> None:
        strangers = [item.slot for item in message.items if item.slot not in self._admitted]
        if strangers:
            raise ClusterError(f"slots {strangers} hold no request")
        if self._rank is None:
            raise GroupError("this worker is in no group")
        started_s = time.monotonic()
        before = [self._before(item) for item in message.items]
        steps = self._engine.denoise(message.items, before)
        for item, latents, step in zip(message.items, before, steps, strict=True) if self._rank == 0 else ():
            self._record(item.slot, item.denoising_step, latents, step.latents, step.log_prob)
        elapsed_s = time.monotonic() - started_s
        forwards = tuple(step.is_full for step in steps)
        self._node.send(StepDone(worker_id=self._worker_id, seq=message.seq, elapsed_s=elapsed_s, forwards=forwards))

    def _before(self, item: StepItem) -> np.ndarray:
        """The first latents are drawn by every rank for itself: only the lead writes into the arena, and only what a step has made."""
        if item.denoising_step == 0:
            return self._engine.initial_latents(item.slot)
        return self._arena.latents(item.slot, item.denoising_step)

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
        elapsed_s = time.monotonic() - started_s
        self._node.send(SamplesDecoded(worker_id=self._worker_id, seq=message.seq, pngs=pngs, elapsed_s=elapsed_s))

    def _wake(self) -> None:
        deadline_s = time.monotonic() + WAKE_S
        while True:
            try:
                self._engine.wake()
                return
            except torch.OutOfMemoryError:
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(WAKE_POLL_S)


def _published(machine: SharedWeights | DeviceWeights) -> tuple[dict[str, Tensor], str] | None:
    """What a peer has put down; None where none has, or where it went with the peer."""
    try:
        return machine.read()
    except UnseededError as error:
        _log.warning("no peer to copy from", extra={"reason": str(error)})
        return None


def main(settings: WorkerSettings, ready: Ready) -> int:
    shape = ArenaShape(settings.arena_slots, settings.tokens, settings.channels, settings.window_max)
    arena = LatentArena(shape, settings.arena_fd)
    node: Dealer[ToWorker] = Dealer(settings.node_endpoint, Codec(ToWorker), settings.worker_id)
    worker = Worker(settings, arena, node)
    ready.on_stop(partial(os._exit, 0))  # it has nothing to lose, and its slot may have little time
    ready.send()
    node.send(WorkerReady(worker_id=WorkerId(settings.worker_id), pid=os.getpid()))
    while True:
        for message in node.receive(RECEIVE_S):
            if isinstance(message, StopWorker):
                return 0
            worker.handle(message)


if __name__ == "__main__":
    run_child(WorkerSettings, main)
