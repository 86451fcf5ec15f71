"""The trainer daemon: resident on a reserved node, one order at a time. Owns the model and what it reads and writes in the store.

A training step is a function of the policy and the rollout manifest that its job names: a trainer that holds another version loads the
named one, and an order that was carried out before is answered with its recorded result. The record is written last, so a kill at any
instruction leaves either the whole result or none.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

import msgspec
import torch

from spot_runtime.config import RunSettings
from spot_runtime.daemons.keys import client_keys
from spot_runtime.daemons.process import Ready, run_child
from spot_runtime.daemons.settings import TrainerSettings
from spot_runtime.daemons.trainer_rank import OtherRanks, agreed
from spot_runtime.daemons.training_data import TrainingData, read_training_data
from spot_runtime.diffusion.adapter import Adapter, adapter_digest
from spot_runtime.diffusion.geometry import loading
from spot_runtime.diffusion.trainer import GrpoTrainer, TrainerState, TrainingStoppedError
from spot_runtime.errors import (
    ClusterError,
    CorruptObjectError,
    LostEmbeddingError,
    LostSamplesError,
    LostStateError,
    MissingObjectError,
    SpotlightError,
    UnseededError,
)
from spot_runtime.messages import (
    SEAT_TAKEN,
    Codec,
    EncodePrompts,
    JobSpec,
    Message,
    PromptsEncoded,
    Refused,
    StartTraining,
    StopTraining,
    ToTrainer,
    TrainerFailed,
    TrainerHeartbeat,
    TrainerHello,
    TrainingFinished,
)
from spot_runtime.store.checkpoints import STATE_BYTES_MAX, trainer_key
from spot_runtime.store.tensors import TensorStore
from spot_runtime.transport import Dealer
from spot_runtime.types import JobId, PolicyRef, RequestId

ENCODE_BATCH = 32
T = TypeVar("T")

_log = logging.getLogger(__name__)


class TrainingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a training job as it stays in the store."""

    policy: PolicyRef
    metrics: dict[str, float]
    average: PolicyRef = PolicyRef()


class Trainer:
    """The orders of ToTrainer over one GrpoTrainer. `backlog` holds messages that came while an order was at work."""

    def __init__(
        self, settings: TrainerSettings, model: GrpoTrainer, control: Dealer[ToTrainer], others: OtherRanks
    ) -> None:
        self._settings = settings
        self._model = model
        self._store = TensorStore(settings.store)
        self._control = control
        self._others = others
        self._backlog: deque[ToTrainer] = deque()
        self._job_id: JobId | None = None
        self._progress = (0, 0)
        self._beat_s = 0.0

    def run(self, ready: Ready) -> None:
        """Hello, then one order after another until the parent asks for an end."""
        self._say_hello()
        while not ready.stopping:
            self._backlog.extend(self._control.receive(0.0 if self._backlog else self._settings.heartbeat_s))
            if self._backlog:
                self._obey(self._backlog.popleft())
            self._others.check()
            self._beat()

    def _say_hello(self) -> None:
        self._control.send(TrainerHello(trainer_id=self._settings.trainer_id, job_id=self._job_id))

    def _beat(self, message: str = "") -> None:
        now_s = time.monotonic()
        if now_s - self._beat_s >= self._settings.heartbeat_s:
            self._beat_s = now_s
            done, total = self._progress
            beat = TrainerHeartbeat(
                trainer_id=self._settings.trainer_id, job_id=self._job_id, done=done, total=total, message=message
            )
            self._control.send(beat)

    def _obey(self, order: ToTrainer) -> None:
        match order:
            case EncodePrompts():
                self._at_work(order.job_id, order.order, lambda: self._encode(order))
            case StartTraining():
                self._at_work(order.job.job_id, order.order, lambda: self._train(order.job, order.order))
            case StopTraining():
                _log.info("nothing to stop", extra={"job_id": order.job_id})
            case Refused() if order.error_class == SEAT_TAKEN:
                _log.warning("another trainer works here", extra={"error": order.error})
            case Refused():
                self._say_hello()

    def _at_work(self, job_id: JobId, order: int, work: Callable[[], Message]) -> None:
        """Does one order and answers it, with its error if need be."""
        _log.info("order begins", extra={"job_id": job_id, "order": order})
        self._job_id, self._progress = job_id, (0, 0)
        answer: Message
        try:
            answer = work()
            self._beat_s = 0.0  # what took less than a heartbeat is told too
            self._beat()
        except TrainingStoppedError:
            _log.info("training stopped", extra={"job_id": job_id})
            return
        except (SpotlightError, msgspec.MsgspecError, RuntimeError) as error:
            _log.exception("order failed", extra={"job_id": job_id})
            if isinstance(error, UnseededError):
                raise ClusterError(f"{error}; the trainer starts anew") from error
            if isinstance(error, torch.OutOfMemoryError) and self._model.is_asleep:
                raise ClusterError(f"no room on the device to wake up: {error}; the trainer starts anew") from error
            if isinstance(error, RuntimeError) and self._model.ranks.size > 1:
                raise ClusterError("the process group of the trainer's ranks broke; the trainer starts anew") from error
            name = type(error).__name__ if isinstance(error, SpotlightError) else "TrainingError"
            answer = TrainerFailed(
                trainer_id=self._settings.trainer_id,
                job_id=job_id,
                error_class=name,
                error=str(error),
                order=order,
                lost=tuple(map(RequestId, error.request_ids)) if isinstance(error, LostSamplesError) else (),
            )
        finally:
            self._job_id = None
            if self._settings.sleeps:
                self._model.sleep()  # whatever came of it, the rollout worker beside it needs the memory now
        self._control.send(answer)

    # ---- prompts ----

    def _encode(self, order: EncodePrompts) -> PromptsEncoded:
        self._store_embeddings([(key, prompt) for key, prompt in order.prompts if not self._is_whole(key)])
        if order.policy.key:
            self._beside_beats("a lost policy is stored again", partial(self._publish_again, order.policy))
        return PromptsEncoded(trainer_id=self._settings.trainer_id, job_id=order.job_id, order=order.order)

    def _store_embeddings(self, missing: Sequence[tuple[str, str]]) -> None:
        """Of (embedding key, prompt)."""
        for start in range(0, len(missing), ENCODE_BATCH):
            chunk = missing[start : start + ENCODE_BATCH]
            for (key, _), embeds in zip(chunk, self._model.encode([prompt for _, prompt in chunk]), strict=True):
                self._store.put(key, {"embeds": embeds})
            self._progress = (start + len(chunk), len(missing))
            self._beat("prompts are encoded")

    def _publish_again(self, policy: PolicyRef) -> None:
        """Puts a policy that was lost from the state that it is part of, as its weights or as their average. Raises LostStateError."""
        folder = trainer_key(policy).rpartition("/")[0]
        for key in self._store.list(folder):
            if not key.startswith(f"{folder}/{policy.version}-"):
                continue
            try:
                state = TrainerState.from_tensors(self._store.get(key, bytes_max=STATE_BYTES_MAX).tensors)
            except (MissingObjectError, CorruptObjectError):
                continue
            for weights in (state.adapter, state.ema):
                if weights and adapter_digest(weights) == policy.digest:
                    self._store.put(policy.key, dict(weights), _meta(policy))
                    return
        raise LostStateError(f"{policy.key}: gone, and no trainer state in {folder} holds it")

    def _is_whole(self, key: str) -> bool:
        """Whether the embedding is there to be read; a damaged one is replaced."""
        try:
            self._store.get(key)
        except (MissingObjectError, CorruptObjectError):
            return False
        return True

    # ---- training ----

    def _train(self, job: JobSpec, order: int) -> TrainingFinished:
        record_key = f"runs/{job.run_id}/training/{job.job_id}.json"
        record = self._beside_beats("an earlier result is read", partial(self._recorded, record_key))
        if record is None:
            record = self._train_anew(job)
            self._store.delete(record_key)  # one whose policy is gone would be the answer for ever
            self._store.put_bytes(record_key, msgspec.json.encode(record))
        return TrainingFinished(
            trainer_id=self._settings.trainer_id,
            job_id=job.job_id,
            policy=record.policy,
            metrics=record.metrics,
            order=order,
            average=record.average,
        )

    def _recorded(self, key: str) -> TrainingRecord | None:
        """What this job ended with before; a record that cannot be read, or whose policy is gone, counts as none."""
        try:
            record = msgspec.json.decode(self._store.get_bytes(key), type=TrainingRecord)
            for written in (trainer_key(record.policy), record.policy.key, record.average.key):
                if written:
                    self._store.verify(written)
        except (MissingObjectError, CorruptObjectError):
            return None
        _log.info("already trained", extra={"version": record.policy.version, "key": key})
        return record

    def _train_anew(self, job: JobSpec) -> TrainingRecord:
        started_s = time.monotonic()
        data = self._read(job)
        read_s = time.monotonic() - started_s
        outcome = self._model.train(
            data.state,
            data.samples,
            sampling=data.settings.config.sampling,
            grpo=data.settings.config.grpo,
            seed=data.settings.seed,
            policy_version=job.policy.version,
            on_progress=self._progressed,
            should_stop=lambda: self._should_stop(job.job_id),
        )
        written = partial(self._write_policy, job, outcome.state)
        policy, average = self._beside_beats("policy is stored", written)
        timing = {"read_s": read_s, "train_s": time.monotonic() - started_s}
        return TrainingRecord(policy=policy, metrics=outcome.metrics | timing, average=average)

    def _read(self, job: JobSpec) -> TrainingData:
        """The job's data; embeddings that are gone are encoded once more. Raises as `read_training_data`."""
        try:
            return self._read_with_others(job)
        except LostEmbeddingError as error:
            _log.warning("embeddings are encoded again", extra={"job_id": job.job_id, "error": str(error)})
            self._store_embeddings(error.prompts)
            if self._settings.sleeps:
                self._model.sleep()  # the encoder, which training has no use for
            return self._read_with_others(job)

    def _read_with_others(self, job: JobSpec) -> TrainingData:
        """Once the other ranks have theirs too. What one rank cannot read fails the job on all."""
        self._others.announce(job)
        read = partial(read_training_data, self._store, job)
        return agreed(self._model.ranks, lambda: self._beside_beats("training data is read", read))

    def _beside_beats(self, message: str, work: Callable[[], T]) -> T:
        """What `work` with the store returns, however large it is; a store that hangs ends by its own deadline."""
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(work)
            while not wait([done], self._settings.heartbeat_s).done:
                self._beat(message)
        return done.result()

    def _write_policy(self, job: JobSpec, state: TrainerState) -> tuple[PolicyRef, PolicyRef]:
        """The policy with all that it takes to go on from it, and its moving average, if there is one."""
        policy, average = (_named(job, state.policy_version, weights) for weights in (state.adapter, state.ema))
        settings = RunSettings.parse_json(job.settings_json)
        position = {"seed": str(settings.seed), "next_iteration": str(job.iteration + 1)}
        self._store.put(trainer_key(policy), state.tensors(), _meta(policy) | position)
        self._store.put(policy.key, dict(state.adapter), _meta(policy))
        if average.key:
            self._store.put(average.key, dict(state.ema), _meta(average))
        return policy, average

    def _progressed(self, done: int, total: int) -> None:
        self._progress = (done, total)
        self._beat("training")

    def _should_stop(self, job_id: JobId) -> bool:
        self._backlog.extend(self._control.receive(0.0))
        stops = [order for order in self._backlog if isinstance(order, StopTraining) and order.job_id == job_id]
        for order in stops:
            self._backlog.remove(order)
        return bool(stops)


def _named(job: JobSpec, version: int, weights: Adapter) -> PolicyRef:
    """Where `weights` are kept, by what they are; nowhere if there are none."""
    if not weights:
        return PolicyRef()
    digest = adapter_digest(weights)
    return PolicyRef(version, f"runs/{job.run_id}/policies/{version}-{digest[:16]}", digest)


def _meta(policy: PolicyRef) -> dict[str, str]:
    return {"policy_version": str(policy.version), "policy_digest": policy.digest}


def main(settings: TrainerSettings, ready: Ready) -> int:
    with OtherRanks(settings) as others:
        with loading(settings.model):
            device = others.device(settings.device, 0)
            model = GrpoTrainer(settings.model, device=device, threads=settings.threads, ranks=others.join(device))
        keys = client_keys(settings.secret_key, settings.control_key)
        control: Dealer[ToTrainer] = Dealer(settings.control_endpoint, Codec(ToTrainer), settings.trainer_id, keys=keys)
        ready.send()
        Trainer(settings, model, control, others).run(ready)
        control.close()
    return 0


if __name__ == "__main__":
    run_child(TrainerSettings, main)
