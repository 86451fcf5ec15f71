"""The node daemon: sockets, processes, arena, store and reward client around the node core. Decides nothing.

Blocking calls run on the loop's threads, what is written to the store on threads of its own: a commit on a notice waits for no pull and no
reward. Whatever touches the arena runs on the loop itself. Bytes that a thread needs are copied before it
starts, so a slot may be reused as soon as the core frees it.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from spot_runtime.daemons.arena import ArenaShape, LatentArena
from spot_runtime.daemons.clock import Clock
from spot_runtime.daemons.commits import (
    Record,
    Restored,
    Trail,
    commit_key,
    earlier_keys,
    extend,
    make_record,
    restore,
)
from spot_runtime.daemons.keys import client_keys
from spot_runtime.daemons.loop import EventLoop
from spot_runtime.daemons.policies import PolicyFiles
from spot_runtime.daemons.process import Child, Ready, run_child, spawn
from spot_runtime.daemons.settings import NodeSettings, TrainerSettings, WorkerSettings
from spot_runtime.diffusion.geometry import LatentGeometry, model_folder, read_json
from spot_runtime.errors import (
    ClusterError,
    CorruptObjectError,
    InputError,
    LostEmbeddingError,
    LostPolicyError,
    MissingObjectError,
    ModelError,
    SpotlightError,
    StoreError,
    error_tree,
)
from spot_runtime.messages import (
    AdmitRequest,
    Assignment,
    Codec,
    DismissRequest,
    EndTrainer,
    FromWorker,
    JoinGroup,
    LoadPolicy,
    LoadWeights,
    Message,
    RequestAdmitted,
    ResumePoint,
    SamplesDecoded,
    StopWorker,
    ToNode,
    WelcomeNode,
    WorkerFailed,
)
from spot_runtime.models.address import find_model, local_model
from spot_runtime.node.commands import (
    AdmitTo,
    BindPolicy,
    Command,
    DismissFrom,
    EndNode,
    FailNode,
    FetchInputs,
    Forget,
    FormGroup,
    Judge,
    KillWorker,
    ReleaseWorker,
    SeedWorker,
    SendToControl,
    SendToWorker,
    StartWorker,
    StoreProgress,
    StoreSample,
)
from spot_runtime.node.core import NodeCore, NodeEvent
from spot_runtime.node.events import (
    AttemptFailed,
    InputsFetched,
    NoticeReceived,
    ProgressStored,
    SampleJudged,
    SampleStored,
    SlotsChanged,
    TimePassed,
    WorkerDied,
)
from spot_runtime.parallel.degree import allowed_degrees, check_degree
from spot_runtime.preemption import PreemptionNotice, SlotNotice, notice_file_watcher, slot_file_watcher
from spot_runtime.rewards.client import Item, RewardClient, Score, ScoreError
from spot_runtime.store.layout import pack_tensors
from spot_runtime.store.objects import in_parallel
from spot_runtime.store.tensors import TensorStore
from spot_runtime.transport import Dealer, Router, local_address
from spot_runtime.types import Generation, RequestId, WorkerId
from spot_runtime.variables import given_reward_token

TICK_S = 0.1
ARENA_SLOTS_PER_PLACE = 3
"""Arena slots for each place in a batch: one that steps, one that is fetched, one that is stored and judged."""
CALL_THREADS = 8
COMMIT_THREADS = 8
JUDGE_CALLS_MAX = 4
REWARD_PATIENCE = 5
"""Deadlines that a reward service which is busy is waited for."""
END_GRACE_S = 3.0
DRAINED_GRACE_S = 0.1
"""A drained node has nothing to lose and little time."""
GENERATIONS_KEPT = 64
"""Rendezvous files of so many generations stay, in case a rank comes late."""
RESPAWN_S = 0.5
TRAINER = "trainer"
"""Name of the trainer among the children; a worker's is its id."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fetched:
    """What a request needs before its first step here; `restored` only where it resumes."""

    embedding: bytes
    policy_path: Path | None
    restored: Restored | None = None


@dataclass
class Progress:
    """What a request's next record needs: the schedule that its worker steps through and what was committed before."""

    schedule_digest: str = ""
    trail: Trail = field(default_factory=Trail)


class Node:
    """The shell around one NodeCore. `inputs`, `progress` and `pngs` hold what belongs to the core's flights; all else is the core's."""

    def __init__(self, settings: NodeSettings, loop: EventLoop, ready: Ready) -> None:
        self._settings = settings
        self._ready = ready
        self._loop = loop
        self._clock = Clock()
        self._store = TensorStore(settings.store)
        self._folder = Path(settings.folder)
        self._policies = PolicyFiles(self._folder / "policies", self._store, loop)
        self._model = local_model(settings.model, settings.store)
        geometry = geometry_of(settings)
        batch = 1 if settings.deterministic else settings.cluster.max_batch
        shape = ArenaShape(
            slots=settings.slots * batch * ARENA_SLOTS_PER_PLACE,
            tokens=geometry.tokens,
            channels=geometry.channels,
            window_max=settings.window_max,
        )
        self._arena = LatentArena.create(shape)
        self._weights_fd = os.memfd_create("spotlight-weights")
        self.core = NodeCore(
            settings.node_id,  # type: ignore[arg-type]
            settings.pool,
            workers=settings.slots,
            max_batch=batch,
            arena_slots=shape.slots,
            step_deadline_s=settings.step_deadline_s,
            start_deadline_s=settings.cluster.start_deadline_s,
            now_s=self._clock.now_s(),
            commit_every_steps=settings.cluster.commit_every_steps,
            live_migration=settings.cluster.live_migration,
            latent_bytes=shape.latent_floats * np.dtype(np.float32).itemsize,
            degrees=degrees_of(self._model, settings.cluster.sequence_parallel_degree),
            standbys=settings.cluster.standbys_wanted,
            group_timeout_s=settings.cluster.group_timeout_s,
            sample_size=(settings.resolution, settings.resolution),
            sleeps=settings.sleeps,
        )
        self._rendezvous = self._folder / "generations" / os.urandom(8).hex()
        self._workers: Router[FromWorker] = Router(local_address(settings.node_id), Codec(FromWorker))
        self._control: Dealer[ToNode] = Dealer(
            settings.control_endpoint,
            Codec(ToNode),
            settings.node_id,
            keys=client_keys(settings.secret_key, settings.control_key),
        )
        self._children: dict[str, Child] = {}
        self._errors: dict[str, SpotlightError] = {}
        self._end_grace_s = END_GRACE_S
        self._inputs: dict[RequestId, Fetched] = {}
        self._progress: dict[RequestId, Progress] = {}
        self._pngs: dict[RequestId, bytes] = {}
        self._rewards: RewardClient | None = None
        self._judging: deque[tuple[list[Assignment], list[Item]]] = deque()
        self._judge_calls = 0
        self._notices = notice_file_watcher(settings.notice_path)
        self._slot_changes = slot_file_watcher(settings.slots_path)
        loop.attach(self._workers, self._from_workers)
        loop.attach(self._control, self._from_control)
        loop.call_every(TICK_S, self._tick)
        loop.call_every(settings.cluster.heartbeat_s, self._beat)

    def start(self) -> None:
        self._notices.start(lambda notice: self._loop.post(partial(self._notice, notice)))
        self._slot_changes.start(lambda notice: self._loop.post(partial(self._slots_changed, notice)))
        self._carry_out(self.core.start(self._clock.now_s()))
        if self._settings.with_trainer:
            self._start_trainer()
        self._control.send(self.core.hello())

    # ---- events in ----

    def _event(self, event: NodeEvent) -> None:
        self._carry_out(self.core.handle(event, self._clock.now_s()))

    def _from_control(self, messages: list[ToNode]) -> None:
        for message in messages:
            if isinstance(message, EndTrainer):
                self._end_trainer()
                continue
            if isinstance(message, WelcomeNode):
                self._meet(message)
            self._event(message)

    def _meet(self, welcome: WelcomeNode) -> None:
        _log.info("welcome", extra={"reward_url": welcome.reward_url, "paused": welcome.paused})
        if self._rewards is None or self._rewards.url != welcome.reward_url:
            deadline_s = self._settings.cluster.reward_deadline_s
            self._rewards = RewardClient(
                welcome.reward_url,
                deadline_s,
                patience_s=REWARD_PATIENCE * deadline_s,
                token=given_reward_token(),
            )

    def _from_workers(self, received: list[tuple[bytes, FromWorker]]) -> None:
        for _, message in received:
            if isinstance(message, RequestAdmitted):
                if progress := self._progress.get(message.request_id):
                    progress.schedule_digest = message.schedule_digest
                continue
            if isinstance(message, SamplesDecoded):
                self._keep_images(message)
            self._event(message)
        if any(isinstance(message, WorkerFailed) for _, message in received):
            self._look_after_children()  # a rank that died makes the others fail: it is found without waiting for the tick

    def _keep_images(self, message: SamplesDecoded) -> None:
        group = self.core.group_of(message.worker_id)
        if group is not None and group.seq == message.seq:
            for (request_id, _), png in zip(group.batch, message.pngs, strict=True):
                if request_id in self.core.flights:
                    self._pngs[request_id] = png

    def _beat(self) -> None:
        self._control.send(self.core.heartbeat())

    def _look_after_children(self) -> None:
        for name, child in list(self._children.items()):
            code = child.poll()
            if code is not None:
                self._child_ended(name, child, code)

    def _tick(self) -> None:
        self._look_after_children()
        self._event(TimePassed())
        if not self._ready.sent and self.core.is_ready and self._trainer_answered():
            self._ready.send(node_id=self._settings.node_id)

    def _trainer_answered(self) -> bool:
        if not self._settings.with_trainer:
            return True
        trainer = self._children.get(TRAINER)
        return trainer is not None and trainer.answered()

    def _notice(self, notice: PreemptionNotice) -> None:
        _log.info("preemption notice", extra={"grace_s": notice.grace_period_s, "source": notice.source})
        self._event(NoticeReceived(notice.grace_period_s))

    def _slots_changed(self, notice: SlotNotice) -> None:
        _log.info("slots changed", extra={"slots": notice.slots, "grace_s": notice.grace_period_s})
        self._event(SlotsChanged(notice.slots, notice.grace_period_s))

    def _child_ended(self, name: str, child: Child, code: int) -> None:
        """A child that told its error while this node is not ready ends the node with that error; else it is started again."""
        _log.warning("child ended", extra={"child": name, "exit_code": code})
        del self._children[name]
        try:
            self._errors.pop(name, None)
            if child.answered():
                child.ready(0.0)
        except SpotlightError as error:
            self._errors[name] = error
        child.terminate(0.0)
        if name in self._errors and not self._ready.sent and type(self._errors[name]) is not ClusterError:
            raise self._errors[name]
        if name == TRAINER:
            self._loop.call_later(RESPAWN_S, self._start_trainer)
        else:
            self._event(WorkerDied(WorkerId(name)))

    # ---- commands out ----

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case SendToControl():
                self._control.send(command.message)
            case SendToWorker():
                self._tell(command.worker_id, command.message)
            case BindPolicy():
                path = self._policies.path(command.policy) if command.policy.key else None
                self._tell(command.worker_id, LoadPolicy(policy=command.policy, path=str(path or "")))
            case AdmitTo():
                self._admit(command)
            case DismissFrom():
                self._tell(command.worker_id, DismissRequest(slot=command.slot))
            case FetchInputs():
                self._fetch_inputs(command)
            case StoreSample():
                self._store_sample(command)
            case StoreProgress():
                self._store_progress(command)
            case Judge():
                self._judge(command.request_ids)
            case Forget():
                self._inputs.pop(command.request_id, None)
                self._progress.pop(command.request_id, None)
                self._pngs.pop(command.request_id, None)
            case StartWorker():
                self._loop.call_later(command.delay_s, partial(self._start_worker, command.worker_id))
            case SeedWorker():
                self._seed(command)
            case ReleaseWorker():
                self._tell(command.worker_id, StopWorker())
                self._children[command.worker_id].ask_to_end()
            case FormGroup():
                self._form_group(command)
            case FailNode():
                raise self._failure(command)
            case KillWorker():
                _log.error("worker late", extra={"worker_id": command.worker_id})
                if child := self._children.get(command.worker_id):
                    child.send_kill()
            case EndNode():
                self._end_grace_s = DRAINED_GRACE_S
                self._loop.stop()

    def _failure(self, command: FailNode) -> SpotlightError:
        if command.error_class:
            return error_tree().get(command.error_class, ClusterError)(command.error)
        reason = f"{command.worker_id} ended before it had weights, again and again"
        return self._errors.get(command.worker_id, ClusterError(reason))

    def _seed(self, command: SeedWorker) -> None:
        device = slot_device(self._settings.device, command.slot)
        message = LoadWeights(seq=command.seq, device=device, from_peer=command.from_peer, digest=command.digest)
        self._tell(command.worker_id, message)

    def _form_group(self, command: FormGroup) -> None:
        """Its ranks meet in a file that no other generation, and no earlier life of this node, ever used."""
        self._rendezvous.mkdir(parents=True, exist_ok=True)
        for old in self._rendezvous.iterdir():
            if int(old.name) < command.generation - GENERATIONS_KEPT:
                old.unlink(missing_ok=True)
        for rank, worker_id in enumerate(command.ranks):
            generation = Generation(
                id=command.generation,
                rank=rank,
                degree=len(command.ranks),
                rendezvous=str(self._rendezvous / str(command.generation)),
                timeout_s=self._settings.cluster.group_timeout_s,
            )
            self._tell(worker_id, JoinGroup(seq=command.seq, generation=generation))
        _log.info("group", extra={"generation": command.generation, "ranks": ",".join(command.ranks)})

    def _tell(self, worker_id: WorkerId, message: Message) -> None:
        if not self._workers.send(worker_id.encode(), message):
            _log.warning("worker away", extra={"worker_id": worker_id, "kind": type(message).__name__})

    def _admit(self, command: AdmitTo) -> None:
        flight = self.core.flights[command.request_id]
        message = AdmitRequest(
            slot=command.slot,
            request=flight.assignment.request,
            embedding=self._inputs[command.request_id].embedding,
            denoising_step=command.denoising_step,
            schedule_digest=self._progress[command.request_id].schedule_digest,
        )
        self._tell(command.worker_id, message)

    # ---- children ----

    def _start_worker(self, worker_id: WorkerId) -> None:
        shape, settings = self._arena.shape, self._settings
        config = WorkerSettings(
            worker_id=worker_id,
            node_endpoint=self._workers.endpoint,
            model=self._model,
            threads=settings.threads,
            dtype=settings.cluster.rollout_dtype,
            offload_alone=settings.cluster.offload_alone,
            sleeps=settings.sleeps,
            arena_fd=self._arena.fd,
            weights_fd=self._weights_fd,
            arena_slots=shape.slots,
            tokens=shape.tokens,
            channels=shape.channels,
            window_max=shape.window_max,
        )
        self._children[worker_id] = self._spawn("worker", worker_id, config, (self._arena.fd, self._weights_fd))

    def _start_trainer(self) -> None:
        settings = self._settings
        config = TrainerSettings(
            trainer_id=f"{settings.node_id}-trainer",
            control_endpoint=settings.control_endpoint,
            store=settings.store,
            model=self._model,
            threads=settings.threads,
            device=settings.device,
            sleeps=settings.sleeps,
            heartbeat_s=settings.cluster.heartbeat_s,
            secret_key=settings.secret_key,
            control_key=settings.control_key,
            ranks=settings.cluster.trainer_ranks,
            folder=settings.folder,
        )
        self._children[TRAINER] = self._spawn("trainer", config.trainer_id, config, ())

    def _end_trainer(self) -> None:
        """Control heard nothing of it for too long. Its end shows in `_tick`, like any other."""
        if child := self._children.get(TRAINER):
            _log.error("trainer silent", extra={"pid": child.pid})
            child.send_kill()

    def _spawn(self, daemon: str, name: str, config: WorkerSettings | TrainerSettings, fds: tuple[int, ...]) -> Child:
        return spawn(
            f"spot_runtime.daemons.{daemon}",
            config,
            cores=self._settings.cores,
            log_path=self._folder / f"{name}.log",
            pass_fds=fds,
            threads=self._settings.threads,
        )

    # ---- blocking calls, on the loop's threads, and their results ----

    def _fetch_inputs(self, command: FetchInputs) -> None:
        """The policy first, without a thread for each that waits for it."""
        policy = command.assignment.request.policy
        if policy.key:
            self._policies.fetch(policy, partial(self._policy_is_here, command))
        else:
            self._loop.submit(self._fetch, command.assignment, None, then=partial(self._fetched, command))

    def _policy_is_here(self, command: FetchInputs, done: Future[Path]) -> None:
        assignment = command.assignment
        if not self._is_asked(assignment):
            return
        try:
            with _no_commit(LostPolicyError, "policy"):
                path = done.result()
        except SpotlightError as error:
            self._event(AttemptFailed(assignment.request.request_id, type(error).__name__, str(error)))
            return
        self._loop.submit(self._fetch, assignment, path, then=partial(self._fetched, command))

    def _fetch(self, assignment: Assignment, path: Path | None) -> Fetched:
        request = assignment.request
        with _no_commit(LostEmbeddingError, "prompt embedding"):
            embedding = self._store.get(request.embedding_key)
            if "embeds" not in embedding.tensors:
                raise CorruptObjectError(f"{request.embedding_key}: holds no embeds: not a prompt embedding")
        payload = b"".join(pack_tensors({"embeds": embedding.tensors["embeds"]}, {}))
        if assignment.resume is None:
            return Fetched(payload, path)
        return Fetched(payload, path, self._fetch_commit(assignment, assignment.resume))

    def _fetch_commit(self, assignment: Assignment, resume: ResumePoint) -> Restored:
        newest = self._read_record(resume.commit_key)
        keys = earlier_keys(resume.commit_key, newest)
        earlier = in_parallel(lambda index: self._read_record(keys[index]), len(keys))
        return restore(assignment.request, resume.denoising_step, resume.commit_key, newest, earlier)

    def _read_record(self, key: str) -> Record:
        stored = self._store.get(key)
        return Record(stored.tensors, stored.meta)

    def _fetched(self, command: FetchInputs, done: Future[Fetched]) -> None:
        request_id = command.assignment.request.request_id
        if not self._is_asked(command.assignment):
            return
        try:
            fetched = done.result()
            self._restore(command.slot, command.assignment, fetched)
        except SpotlightError as error:
            self._event(AttemptFailed(request_id, type(error).__name__, str(error)))
            return
        self._inputs[request_id] = fetched
        restored = fetched.restored
        self._progress[request_id] = Progress(restored.schedule_digest, restored.trail) if restored else Progress()
        self._event(InputsFetched(request_id))

    def _restore(self, slot: int, assignment: Assignment, fetched: Fetched) -> None:
        shape, window = self._arena.shape, assignment.request.sde_window
        if window[1] - window[0] > shape.window_max:
            raise InputError(f"sde_window = {window}: this node's arena holds {shape.window_max} steps")
        restored = fetched.restored
        if assignment.resume is None or restored is None:
            return
        if restored.latents.shape != (shape.tokens, shape.channels):
            raise CorruptObjectError(f"{assignment.resume.commit_key}: latents of shape {restored.latents.shape}")
        self._arena.latents(slot, assignment.resume.denoising_step)[:] = restored.latents
        self._arena.window_latents(slot)[: len(restored.window_latents)] = restored.window_latents
        self._arena.log_probs(slot)[: len(restored.log_probs)] = restored.log_probs

    def _record(self, assignment: Assignment, slot: int, denoising_step: int, trail: Trail) -> Record:
        """Copies of what the arena holds of a request and no record of `trail` does."""
        return make_record(
            assignment.request,
            denoising_step,
            latents=self._arena.latents(slot, denoising_step),
            window_latents=self._arena.window_latents(slot),
            log_probs=self._arena.log_probs(slot),
            schedule_digest=self._progress[assignment.request.request_id].schedule_digest,
            trail=trail,
        )

    def _is_asked(self, assignment: Assignment) -> bool:
        """Whether an answer still concerns the lease that asked for it: the same request may have come back under another."""
        flight = self.core.flights.get(assignment.request.request_id)
        return flight is not None and flight.assignment.lease_id == assignment.lease_id

    def _store_sample(self, command: StoreSample) -> None:
        assignment = self.core.flights[command.request_id].assignment
        request = assignment.request
        if request.stores_trajectory:
            whole = self._record(assignment, command.slot, request.params.num_steps, Trail())
            key = f"runs/{request.run_id}/samples/{request.request_id}"
            then = partial(self._stored, assignment, key)
            self._loop.submit(self._store.put, key, whole.tensors, whole.meta, then=then, urgent=True)
        elif request.keep_image:
            key = f"runs/{request.run_id}/images/{request.request_id}.png"
            png = self._pngs[request.request_id]
            then = partial(self._stored, assignment, key)
            self._loop.submit(self._store.put_bytes, key, png, then=then, urgent=True)
        else:
            self._event(SampleStored(request.request_id))

    def _stored(self, assignment: Assignment, key: str, done: Future[str]) -> None:
        request_id = assignment.request.request_id
        if not self._is_asked(assignment):
            return
        try:
            digest = done.result()
        except SpotlightError as error:
            self._event(AttemptFailed(request_id, type(error).__name__, str(error)))
            return
        if assignment.request.stores_trajectory:
            self._event(SampleStored(request_id, sample_key=key, sample_digest=digest))
        else:
            self._event(SampleStored(request_id, image_key=key))

    def _store_progress(self, command: StoreProgress) -> None:
        assignment = self.core.flights[command.request_id].assignment
        step, trail = command.denoising_step, self._progress[command.request_id].trail
        record, key = self._record(assignment, command.slot, step, trail), commit_key(assignment, step)
        then = partial(self._progress_stored, assignment, step, key)
        self._loop.submit(self._store.put, key, record.tensors, record.meta, then=then, urgent=True)

    def _progress_stored(self, assignment: Assignment, step: int, key: str, done: Future[str]) -> None:
        request_id = assignment.request.request_id
        if not self._is_asked(assignment):
            return
        progress = self._progress[request_id]
        try:
            done.result()
            progress.trail = extend(progress.trail, assignment.request, step, key)
        except SpotlightError as error:
            _log.warning("commit failed", extra={"request_id": request_id, "error": str(error)})
            step, key = 0, ""
        self._event(ProgressStored(request_id, step, key))

    def _judge(self, request_ids: tuple[RequestId, ...]) -> None:
        """Posts a batch, or lets it wait: a slow reward service must leave threads for commits."""
        assignments = [self.core.flights[request_id].assignment for request_id in request_ids]
        items = [
            Item(id=a.request.request_id, row_json=a.request.row_json, png=self._pngs[a.request.request_id])
            for a in assignments
        ]
        self._judging.append((assignments, items))
        self._post_judges()

    def _post_judges(self) -> None:
        while self._judging and self._judge_calls < JUDGE_CALLS_MAX:
            assignments, items = self._judging.popleft()
            assert self._rewards is not None, "work came before the welcome"
            self._judge_calls += 1
            self._loop.submit(self._rewards.score, items, then=partial(self._judged, assignments))

    def _judged(self, assignments: list[Assignment], done: Future[list[Score | ScoreError]]) -> None:
        self._judge_calls -= 1
        self._post_judges()
        try:
            verdicts = done.result()
        except SpotlightError as error:
            verdicts = [ScoreError(a.request.request_id, str(error)) for a in assignments]
        for assignment, verdict in zip(assignments, verdicts, strict=True):
            if not self._is_asked(assignment):
                continue
            if isinstance(verdict, ScoreError):
                self._event(AttemptFailed(assignment.request.request_id, "RewardError", verdict.error))
            else:
                self._event(
                    SampleJudged(assignment.request.request_id, verdict.reward, verdict.correct, verdict.reason)
                )

    def close(self) -> None:
        self._notices.stop()
        self._slot_changes.stop()
        for name in self._children:
            self._workers.send(name.encode(), StopWorker())
        for child in self._children.values():
            child.ask_to_end()
        for child in self._children.values():
            child.terminate(self._end_grace_s)
        self._workers.close()
        self._control.close()


@contextmanager
def _no_commit(named: type[StoreError], what: str) -> Iterator[None]:
    """An object that is lost or damaged and is no commit. The classes of those errors say that a commit is, which is then thrown away."""
    try:
        yield
    except (MissingObjectError, CorruptObjectError) as error:
        raise named(f"{what}: {error}") from error


def slot_device(device: str, slot: int) -> str:
    """The torch device of a slot: on `cuda` each has a GPU of its own; any other name is the device of all."""
    return f"cuda:{slot}" if device == "cuda" else device


def geometry_of(settings: NodeSettings) -> LatentGeometry:
    """Latents of the node's model. Raises ModelError where the model is not, or is no longer, the one that the run was started with."""
    checked = find_model(settings.model, settings.store, settings.resolution)
    if settings.model_digest not in ("", checked.digest):
        raise ModelError(
            f"model = {settings.model!r}: digest {checked.digest[:16]} on this node, the run was started with {settings.model_digest[:16]}"
        )
    return checked.geometry


def degrees_of(model: str, degree_max: int) -> tuple[int, ...]:
    """Sequence-parallel degrees of the model's groups. Raises InputError where `degree_max` is none of them."""
    heads = int(read_json(model_folder(model), "transformer/config.json")["num_attention_heads"])
    check_degree(degree_max, heads)
    return allowed_degrees(heads, degree_max)


def main(settings: NodeSettings, ready: Ready) -> int:
    loop = EventLoop(threads=CALL_THREADS, urgent_threads=COMMIT_THREADS)
    node = Node(settings, loop, ready)
    ready.on_stop(loop.stop)
    try:
        node.start()
        loop.run()
    finally:
        node.close()
        loop.close()
    return 0


if __name__ == "__main__":
    run_child(NodeSettings, main)
