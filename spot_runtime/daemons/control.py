"""The control daemon: sockets, journal and store around the control core. Decides nothing.

One turn of the loop: messages and results go into the core, the rows that changed go into the journal in one transaction, then all that the
core wants said is sent. So nobody hears of a change that a kill could undo.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import msgspec

from spot_runtime.config import RunSettings
from spot_runtime.daemons.clock import Clock
from spot_runtime.daemons.commits import commits_prefix, committed_request
from spot_runtime.daemons.journal import Journal
from spot_runtime.daemons.keys import server_keys
from spot_runtime.daemons.loop import EventLoop
from spot_runtime.daemons.metrics import ControlMetrics
from spot_runtime.daemons.ports import HOST
from spot_runtime.daemons.process import Ready, run_child
from spot_runtime.daemons.settings import ControlSettings
from spot_runtime.errors import InputError, SpotlightError, StoreError
from spot_runtime.messages import (
    CancelJob,
    Codec,
    GetStatus,
    JobSpec,
    Message,
    NodeHello,
    NodeLeft,
    NodeNoticed,
    PollJob,
    Refused,
    RequestFailed,
    RequestReturned,
    SubmitJob,
    ToControl,
    TrainerFailed,
    TrainerHello,
    TrainingFinished,
)
from spot_runtime.rewards.prompts import parse_row, prompt_id, row_json
from spot_runtime.scheduler.commands import Command, ReadJobInputs, SendToNode, SendToTrainer, WriteManifest
from spot_runtime.scheduler.core import ControlCore, CoreEvent
from spot_runtime.scheduler.events import (
    ControlAwoke,
    JobCancelled,
    JobInputsRead,
    JobPolled,
    JobStepFailed,
    JobSubmitted,
    ManifestWritten,
    TimePassed,
)
from spot_runtime.scheduler.expansion import JobInputs, PromptRow, prompts_to_encode
from spot_runtime.scheduler.jobs import JobRecord
from spot_runtime.scheduler.requests import RequestRecord
from spot_runtime.store.tensors import TensorStore
from spot_runtime.transport import Router
from spot_runtime.types import JobId, Manifest, Op, RequestId, RequestState, RunId

TICK_S = 0.1
FRAME_BYTES_MAX = 4 * 1024 * 1024
"""No message to control carries tensors or pixels."""
RECEIVE_MAX = 256
"""Messages a turn: what is decided about the first is sent when the last was looked at."""
METRICS_S = 1.0
CHECKPOINT_S = 5.0
AWAY_S = 2.0
"""A tick that is so late says that the process stood still: it was stopped, or its machine was."""

LOGGED_EVENTS = (
    NodeHello,
    NodeNoticed,
    NodeLeft,
    RequestReturned,
    RequestFailed,
    TrainerHello,
    TrainerFailed,
    TrainingFinished,
    JobCancelled,
    JobStepFailed,
)
"""Rare enough for a line each."""

_log = logging.getLogger(__name__)


class Control:
    """The shell around one ControlCore. `outbox` holds what waits for the journal."""

    def __init__(self, settings: ControlSettings, loop: EventLoop) -> None:
        self._loop = loop
        self._settings = settings
        self._clock = Clock()
        self._store = TensorStore(settings.store)
        self._core = ControlCore(settings.cluster, reward_url=settings.reward_url)
        self._journal = Journal(Path(settings.journal_path))
        self.router: Router[ToControl] = Router(
            settings.bind,
            Codec(ToControl),
            frame_bytes_max=FRAME_BYTES_MAX,
            receive_max=RECEIVE_MAX,
            keys=server_keys(settings.secret_key, settings.allowed_keys),
        )
        self._outbox: list[tuple[bytes, Message]] = []
        self._rows: dict[str, tuple[PromptRow, ...]] = {}
        self._embeddings: set[str] = set()
        self._checkpointing = False
        self._collected: set[JobId] = set()
        self.metrics = ControlMetrics()
        self.metrics_url = ""
        """Where the figures are; empty where nobody asked for them."""
        if settings.metrics_port is not None:
            self.metrics_url = f"http://{HOST}:{self.metrics.serve(settings.metrics_port)}/metrics"
        self._restore()
        self._ticked_s = self._clock.now_s()
        loop.attach(self.router, self._receive)
        loop.call_every(TICK_S, self._tick)
        loop.call_every(METRICS_S, self._measure)
        loop.call_every(CHECKPOINT_S, self._checkpoint)

    def _restore(self) -> None:
        now_s, began_s = self._clock.now_s(), time.monotonic()
        loaded = self._journal.load()
        for job, requests in loaded:
            self._core.restore(job, requests, now_s)
        self._carry_out(self._core.resume(now_s))
        self._settle()
        if loaded:
            count = sum(len(rows) for _, rows in loaded)
            seconds = time.monotonic() - began_s
            _log.info("restored", extra={"jobs": len(loaded), "requests": count, "seconds": seconds})

    # ---- events in ----

    def _receive(self, received: list[tuple[bytes, ToControl]]) -> None:
        for peer, message in received:
            try:
                self._take(peer, message)
            except SpotlightError as error:
                seq = getattr(message, "seq", 0)
                refusal = Refused(seq=seq, error_class=type(error).__name__, error=str(error))
                self._outbox.append((peer, refusal))
                self.metrics.inputs_refused.inc()
                _log.warning(
                    "refused",
                    extra={
                        "peer": peer.decode(errors="replace"),
                        "kind": type(message).__name__,
                        "error_class": refusal.error_class,
                        "error": refusal.error,
                        **_ids(message),
                    },
                )
        self._settle()

    def _take(self, peer: bytes, message: ToControl) -> None:
        now_s = self._clock.now_s()
        match message:
            case SubmitJob():
                self._check(message.job)
                self._event(JobSubmitted(job=message.job))
                _log.info("job submitted", extra={"job_id": message.job.job_id, "run_id": message.job.run_id})
                self._answer(peer, message.seq, message.job.job_id)
            case PollJob():
                self._event(JobPolled(job_id=message.job_id))
                self._answer(peer, message.seq, message.job_id)
            case CancelJob():
                self._event(JobCancelled(job_id=message.job_id, reason=message.reason))
                self._answer(peer, message.seq, message.job_id)
            case GetStatus():
                status = self._core.cluster_status(now_s)
                self._outbox.append((peer, msgspec.structs.replace(status, seq=message.seq, store=self._store.url)))
            case _:
                self._event(message)

    def _check(self, job: JobSpec) -> None:
        settings = RunSettings.parse_json(job.settings_json)
        for field, wanted, there in self._mismatches(settings):
            raise InputError(f"{field} = {wanted!r}: this cluster has {there!r}")

    def _mismatches(self, settings: RunSettings) -> Iterator[tuple[str, object, object]]:
        """(field, what the run wants, what this cluster was started with) where the two do not go together."""
        mine, window = self._settings, settings.config.sampling.sde_window_size
        if settings.store != self._store.url:
            yield "store", settings.store, self._store.url
        if mine.model_digest not in ("", settings.model_digest):
            yield f"model {settings.model!r} with digest", settings.model_digest[:16], mine.model_digest[:16]
        if mine.resolution not in (0, settings.resolution):
            yield "resolution", settings.resolution, mine.resolution
        if mine.window_max and window > mine.window_max:
            yield "sampling.sde_window_size", window, mine.window_max
        if settings.config.deterministic and not mine.deterministic:
            yield "deterministic", True, False

    def _answer(self, peer: bytes, seq: int, job_id: JobId) -> None:
        status = self._core.job_status(job_id, self._clock.now_s())
        self._outbox.append((peer, msgspec.structs.replace(status, seq=seq)))

    def _tick(self) -> None:
        now_s = self._clock.now_s()
        if now_s - self._ticked_s > AWAY_S:
            _log.warning("was away", extra={"seconds": now_s - self._ticked_s})
            self._event(ControlAwoke())
        self._ticked_s = now_s
        self._event(TimePassed())
        self._settle()

    def _measure(self) -> None:
        self.metrics.observe(
            self._core,
            frames_refused=self.router.refused_frames,
            peers_refused=self.router.refused_peers,
        )

    def _checkpoint(self) -> None:
        """Syncs to the disk beside the loop, one at a time."""
        if not self._checkpointing:
            self._checkpointing = True
            self._loop.submit(self._journal.checkpoint, then=self._checkpointed)

    def _checkpointed(self, done: Future[None]) -> None:
        self._checkpointing = False
        try:
            done.result()
            self._journal.begin_log_anew()
        except StoreError as error:
            _log.warning("checkpoint failed", extra={"error": str(error)})

    def _event(self, event: CoreEvent) -> None:
        if isinstance(event, LOGGED_EVENTS):
            _log.info(_spoken(event), extra=self._job_ids(event) | _ids(event))
        self._carry_out(self._core.handle(event, self._clock.now_s()))

    def _job_ids(self, event: CoreEvent) -> dict[str, str]:
        """Run and job of what an event is about, where it names a request or a job that control knows."""
        record = self._core.queue.records.get(getattr(event, "request_id", RequestId("")))
        job_id = record.request.job_id if record else getattr(event, "job_id", None)
        job = self._core.jobs.get(job_id) if job_id else None
        return {"run_id": job.job.run_id, "job_id": job.job_id} if job else {}

    # ---- commands out ----

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case SendToNode():
                    self._outbox.append((command.node_id.encode(), command.message))
                case SendToTrainer():
                    trainer_id = command.trainer_id or self._core.trainer.trainer_id
                    self._outbox.append((trainer_id.encode(), command.message))
                case ReadJobInputs():
                    self._loop.submit(
                        self._read_inputs, command.job, then=partial(self._inputs_read, command.job.job_id)
                    )
                case WriteManifest():
                    self._loop.submit(self._put_manifest, command, then=partial(self._written, command))

    def _settle(self) -> None:
        """Journals what changed, then sends what was decided."""
        changes = self._core.take_changes()
        if changes.jobs or changes.requests or changes.forgotten:
            with self.metrics.journal_write_s.time():
                self._journal.write(changes.jobs, changes.requests, changes.forgotten)
            self.metrics.journal_rows.inc(len(changes.jobs) + len(changes.requests))
        for job in changes.jobs:
            self._collect(job)
            ids = {"run_id": job.job.run_id, "job_id": job.job_id}
            _log.info("job", extra={**ids, "op": job.job.op, "phase": job.phase, "error": job.error})
        for record in changes.requests:
            if record.state is RequestState.FAILED:
                _log.warning("request failed for good", extra=_last_words(record))
        self._collected.difference_update(changes.forgotten)
        outbox, self._outbox = self._outbox, []
        for peer, message in outbox:
            if not self.router.send(peer, message):
                _log.warning("peer away", extra={"peer": peer.decode(errors="replace"), "kind": type(message).__name__})

    # ---- blocking calls, on the loop's threads ----

    def _collect(self, job: JobRecord) -> None:
        """Once a job has ended, what was committed for its requests goes; a job that is submitted again may end again."""
        if not job.phase.is_final:
            self._collected.discard(job.job_id)
        elif job.job_id not in self._collected and job.job.op is not Op.TRAIN_STEP:
            self._collected.add(job.job_id)
            self._loop.submit(self._remove_commits, job.job.run_id, then=self._commits_removed)

    def _remove_commits(self, run_id: RunId) -> int:
        """Removes commits of requests that have ended; those of any other, known or not, stay."""
        return len(self._store.collect(commits_prefix(run_id), 0.0, self._may_be_needed).keys)

    def _may_be_needed(self, key: str) -> bool:
        record = self._core.queue.records.get(committed_request(key))
        return record is None or not record.is_final

    @staticmethod
    def _commits_removed(done: Future[int]) -> None:
        try:
            if count := done.result():
                _log.info("commits removed", extra={"count": count})
        except SpotlightError as error:
            _log.warning("commits not removed", extra={"error": str(error)})

    def _read_inputs(self, job: JobSpec) -> JobInputs:
        settings = RunSettings.parse_json(job.settings_json)
        feedback_key = job.manifest_key if job.op is Op.EXPLORE else ""
        inputs = JobInputs(
            train_rows=self._prompt_rows(settings.train_prompts_key),
            validation_rows=self._prompt_rows(settings.validation_prompts_key),
            bank=self._bank(job.bank_key) if job.bank_key else {},
            rewards=self._rewards(feedback_key) if feedback_key else {},
            samples=self._manifest(job.manifest_key).samples if job.op is Op.ROLLOUT and job.manifest_key else (),
        )
        wanted = [key for key, _ in prompts_to_encode(job, settings, inputs)]
        self._embeddings.update(key for key in wanted if key not in self._embeddings and self._store.exists(key))
        return msgspec.structs.replace(inputs, encoded=frozenset(key for key in wanted if key in self._embeddings))

    def _prompt_rows(self, key: str) -> tuple[PromptRow, ...]:
        if key not in self._rows:
            rows = [parse_row(line) for line in self._store.get_bytes(key).splitlines() if line.strip()]
            self._rows[key] = tuple(
                PromptRow(prompt_id=prompt_id(row), prompt=row.prompt, row_json=row_json(row)) for row in rows
            )
        return self._rows[key]

    def _bank(self, key: str) -> dict[str, tuple[int, ...]]:
        return msgspec.json.decode(self._store.get_bytes(key), type=dict[str, tuple[int, ...]])

    def _rewards(self, key: str) -> dict[str, tuple[float, ...]]:
        rewards: dict[str, list[float]] = {}
        for sample in self._manifest(key).samples:
            rewards.setdefault(sample.prompt_id, []).append(sample.reward)
        return {prompt: tuple(values) for prompt, values in rewards.items()}

    def _manifest(self, key: str) -> Manifest:
        return msgspec.json.decode(self._store.get_bytes(key), type=Manifest)

    def _put_manifest(self, command: WriteManifest) -> None:
        if command.replaces:
            self._store.delete(command.key)
        self._store.put_bytes(command.key, msgspec.json.encode(command.manifest))

    def _inputs_read(self, job_id: JobId, done: Future[JobInputs]) -> None:
        try:
            event: CoreEvent = JobInputsRead(job_id=job_id, inputs=done.result())
        except (SpotlightError, msgspec.MsgspecError) as error:
            event = JobStepFailed(job_id=job_id, error_class=type(error).__name__, error=str(error))
        self._event(event)
        self._settle()

    def _written(self, command: WriteManifest, done: Future[None]) -> None:
        try:
            done.result()
            event: CoreEvent = ManifestWritten(job_id=command.job_id, key=command.key)
        except SpotlightError as error:
            event = JobStepFailed(job_id=command.job_id, error_class=type(error).__name__, error=str(error))
        self._event(event)
        self._settle()

    def close(self) -> None:
        self.router.close()
        self._journal.close()


def _ids(event: object) -> dict[str, str]:
    """Whom and what an event is about, for the log."""
    job = getattr(event, "job", event)
    found = {name: str(getattr(event, name, "")) for name in ("node_id", "trainer_id", "request_id", "lease_id")}
    found |= {name: str(getattr(job, name, "")) for name in ("run_id", "job_id")}
    found |= {name: str(getattr(event, name, "")) for name in ("error_class", "error", "reason", "denoising_step")}
    return {name: value for name, value in found.items() if value}


def _last_words(record: RequestRecord) -> dict[str, str | int]:
    return {
        "run_id": record.request.run_id,
        "job_id": record.request.job_id,
        "request_id": record.request_id,
        "attempts": record.attempts,
        "history": " | ".join(record.history),
    }


def _spoken(event: object) -> str:
    """`NodeLeft` → `node left`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(event).__name__).lower()


def main(settings: ControlSettings, ready: Ready) -> int:
    loop = EventLoop()
    control = Control(settings, loop)
    ready.on_stop(loop.stop)
    ready.send(control.router.endpoint, metrics_url=control.metrics_url)
    try:
        loop.run()
    finally:
        control.close()
        loop.close()
    return 0


if __name__ == "__main__":
    run_child(ControlSettings, main)
