"""The trainer daemon: resident on a reserved node, one order at a time. Owns the model and what it reads and writes in the store.

A training step is a function of the policy and the rollout manifest that its job names: a trainer that holds another version loads the
named one, and an order that was carried out before is answered with its recorded result. The record is written last, so a kill at any
instruction leaves either the whole result or none.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
import numpy as np

from spot_runtime.config import RunSettings, SamplingConfig
from spot_runtime.daemons.keys import client_keys
from spot_runtime.daemons.process import Ready, run_child
from spot_runtime.daemons.settings import TrainerSettings
from spot_runtime.diffusion.adapter import adapter_digest
from spot_runtime.diffusion.geometry import loading
from spot_runtime.diffusion.trainer import GrpoTrainer, TrainerState, TrainingSample, TrainingStoppedError
from spot_runtime.errors import (
    CorruptObjectError,
    MissingObjectError,
    PolicyMismatchError,
    SpotlightError,
    TrainingError,
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
from spot_runtime.store.checkpoints import trainer_key
from spot_runtime.store.tensors import TensorStore
from spot_runtime.transport import Dealer
from spot_runtime.types import JobId, Manifest, PolicyRef, SampleRecord

READ_THREADS = 4
ENCODE_BATCH = 32

_log = logging.getLogger(__name__)


class TrainingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a training job as it stays in the store."""

    policy: PolicyRef
    metrics: dict[str, float]


class Trainer:
    """The orders of ToTrainer over one GrpoTrainer. `backlog` holds messages that came while an order was at work."""

    def __init__(self, settings: TrainerSettings, model: GrpoTrainer, control: Dealer[ToTrainer]) -> None:
        self._settings = settings
        self._model = model
        self._store = TensorStore(settings.store)
        self._control = control
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
        except TrainingStoppedError:
            _log.info("training stopped", extra={"job_id": job_id})
            return
        except (SpotlightError, msgspec.MsgspecError, RuntimeError) as error:
            _log.exception("order failed", extra={"job_id": job_id})
            name = type(error).__name__ if isinstance(error, SpotlightError) else "TrainingError"
            answer = TrainerFailed(
                trainer_id=self._settings.trainer_id,
                job_id=job_id,
                error_class=name,
                error=str(error),
                order=order,
            )
        finally:
            self._job_id = None
        self._control.send(answer)

    # ---- prompts ----

    def _encode(self, order: EncodePrompts) -> PromptsEncoded:
        missing = [(key, prompt) for key, prompt in order.prompts if not self._store.exists(key)]
        for start in range(0, len(missing), ENCODE_BATCH):
            chunk = missing[start : start + ENCODE_BATCH]
            for (key, _), embeds in zip(chunk, self._model.encode([prompt for _, prompt in chunk]), strict=True):
                self._store.put(key, {"embeds": embeds})
            self._progress = (start + len(chunk), len(missing))
            self._beat("prompts are encoded")
        return PromptsEncoded(trainer_id=self._settings.trainer_id, job_id=order.job_id, order=order.order)

    # ---- training ----

    def _train(self, job: JobSpec, order: int) -> TrainingFinished:
        record_key = f"runs/{job.run_id}/training/{job.job_id}.json"
        record = self._recorded(record_key)
        if record is None:
            record = self._train_anew(job)
            self._store.put_bytes(record_key, msgspec.json.encode(record))
        return TrainingFinished(
            trainer_id=self._settings.trainer_id,
            job_id=job.job_id,
            policy=record.policy,
            metrics=record.metrics,
            order=order,
        )

    def _recorded(self, key: str) -> TrainingRecord | None:
        """What this job ended with before; a record that cannot be read counts as none."""
        try:
            record = msgspec.json.decode(self._store.get_bytes(key), type=TrainingRecord)
        except (MissingObjectError, CorruptObjectError):
            return None
        _log.info("already trained", extra={"version": record.policy.version, "key": key})
        return record

    def _train_anew(self, job: JobSpec) -> TrainingRecord:
        settings = RunSettings.parse_json(job.settings_json)
        started_s = time.monotonic()
        samples = self._read_samples(job)
        read_s = time.monotonic() - started_s
        outcome = self._model.train(
            self._read_state(job.policy),
            samples,
            sampling=settings.config.sampling,
            grpo=settings.config.grpo,
            seed=settings.seed,
            policy_version=job.policy.version,
            on_progress=self._progressed,
            should_stop=lambda: self._should_stop(job.job_id),
        )
        policy = self._write_policy(job, outcome.state)
        timing = {"read_s": read_s, "train_s": time.monotonic() - started_s}
        return TrainingRecord(policy=policy, metrics=outcome.metrics | timing)

    def _read_samples(self, job: JobSpec) -> list[TrainingSample]:
        manifest = msgspec.json.decode(self._store.get_bytes(job.manifest_key), type=Manifest)
        foreign = [sample.request_id for sample in manifest.samples if sample.policy != job.policy]
        if foreign:
            raise PolicyMismatchError(
                f"{len(foreign)} samples are not of policy version {job.policy.version}: {foreign[0]}"
            )
        if not manifest.samples:
            raise TrainingError(f"manifest {job.manifest_key} has no samples: must have at least one whole group")
        sampling = RunSettings.parse_json(job.settings_json).config.sampling
        keys = sorted({sample.embedding_key for sample in manifest.samples})
        with ThreadPoolExecutor(READ_THREADS) as pool:
            embeds = dict(zip(keys, pool.map(lambda key: self._store.get(key).tensors["embeds"], keys), strict=True))
            explored = self._explored(job.bank_key)
            read = partial(self._read_sample, embeds=embeds, sampling=sampling, explored=explored)
            return list(pool.map(read, manifest.samples))

    def _explored(self, bank_key: str) -> Set[str]:
        """Ids of the prompts whose seeds exploration chose."""
        bank = msgspec.json.decode(self._store.get_bytes(bank_key), type=dict[str, tuple[int, ...]]) if bank_key else {}
        return bank.keys()

    def _read_sample(
        self, sample: SampleRecord, *, embeds: dict[str, np.ndarray], sampling: SamplingConfig, explored: Set[str]
    ) -> TrainingSample:
        stored = self._store.get(sample.sample_key, digest=sample.sample_digest)
        return TrainingSample(
            request_id=sample.request_id,
            prompt_id=sample.prompt_id,
            seed=sample.seed,
            reward=sample.reward,
            embeds=embeds[sample.embedding_key],
            window_latents=stored.tensors["window_latents"],
            log_probs=stored.tensors["log_probs"],
            sde_window=sample.sde_window,
            num_steps=sampling.num_steps,
            noise_level=sampling.noise_level,
            is_explored=sample.prompt_id in explored,
        )

    def _read_state(self, policy: PolicyRef) -> TrainerState | None:
        if not policy.key:
            return None
        state = TrainerState.from_tensors(self._store.get(trainer_key(policy)).tensors)
        if adapter_digest(state.adapter) != policy.digest:
            raise PolicyMismatchError(f"trainer state of policy version {policy.version} holds another adapter")
        return state

    def _write_policy(self, job: JobSpec, state: TrainerState) -> PolicyRef:
        digest = adapter_digest(state.adapter)
        key = f"runs/{job.run_id}/policies/{state.policy_version}-{digest[:16]}"
        policy = PolicyRef(state.policy_version, key, digest)
        meta = {"policy_version": str(policy.version), "policy_digest": digest}
        settings = RunSettings.parse_json(job.settings_json)
        position = {"seed": str(settings.seed), "next_iteration": str(job.iteration + 1)}
        self._store.put(trainer_key(policy), state.tensors(), meta | position)
        self._store.put(key, dict(state.adapter), meta)
        return policy

    def _progressed(self, done: int, total: int) -> None:
        self._progress = (done, total)
        self._beat("training")

    def _should_stop(self, job_id: JobId) -> bool:
        self._backlog.extend(self._control.receive(0.0))
        stops = [order for order in self._backlog if isinstance(order, StopTraining) and order.job_id == job_id]
        for order in stops:
            self._backlog.remove(order)
        return bool(stops)


def main(settings: TrainerSettings, ready: Ready) -> int:
    with loading(settings.model):
        model = GrpoTrainer(settings.model, device=settings.device, threads=settings.threads)
    keys = client_keys(settings.secret_key, settings.control_key)
    control: Dealer[ToTrainer] = Dealer(settings.control_endpoint, Codec(ToTrainer), settings.trainer_id, keys=keys)
    ready.send()
    Trainer(settings, model, control).run(ready)
    control.close()
    return 0


if __name__ == "__main__":
    run_child(TrainerSettings, main)
