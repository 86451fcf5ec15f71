"""A control daemon that only pretends to work: it speaks the real messages on a real socket and writes real manifests.

Jobs end after a given time, or with a given error. What was submitted, polled and cancelled is kept for the test to look at.
"""

from __future__ import annotations

import hashlib
import io
import threading
import time
from dataclasses import dataclass, field

import msgspec
import numpy as np
from PIL import Image
from sample_records import sample_record

from spot_runtime.config import RunSettings
from spot_runtime.messages import (
    CancelJob,
    ClusterStatus,
    Codec,
    GetStatus,
    JobSpec,
    JobStatus,
    Message,
    PollJob,
    SubmitJob,
    ToControl,
)
from spot_runtime.rewards.prompts import parse_row, prompt_id
from spot_runtime.store.tensors import TensorStore
from spot_runtime.transport import Router
from spot_runtime.types import (
    ArmStats,
    BanditState,
    ExplorationPlan,
    JobId,
    JobPhase,
    JobResult,
    Manifest,
    Op,
    PolicyRef,
    RequestId,
    SampleRecord,
    Usage,
)

EXPLORED = ExplorationPlan(sequences=6, effective_steps=8, planned_s=9.0, window_s=10.0, reason="best arm")


@dataclass
class FakeJob:
    """A job as the fake sees it. Times are of time.monotonic."""

    spec: JobSpec
    submitted_s: float
    polls: int = 0
    failed: bool = False
    ended_s: float | None = None
    cancelled: str | None = None


@dataclass
class FakeControl:
    """Use as a context manager; `endpoint` is where it answers."""

    seconds: dict[Op, float] = field(default_factory=dict)
    errors: dict[Op, tuple[str, str]] = field(default_factory=dict)
    errors_from_iteration: int = 0
    failures_max: int = 1_000_000
    """Jobs that fail in all, before `errors` means nothing any more."""
    failures: int = 0
    lost_pairs: int = 0
    """So many pairs are missing from the end of each validation after the first."""
    candidates: int = 6
    store: str = ""
    """What it says of its store."""
    jobs: dict[JobId, FakeJob] = field(default_factory=dict)
    submissions: list[JobSpec] = field(default_factory=list)

    def __enter__(self) -> FakeControl:
        self.started = False
        self._router: Router[ToControl] = Router("tcp://127.0.0.1:0", Codec(ToControl))
        self.endpoint = self._router.endpoint
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(5)
        self._router.close()

    # what a local run needs of an embedded cluster
    def start(self) -> str:
        self.started = True
        return self.endpoint

    def check(self) -> None:
        pass

    def stop(self) -> None:
        self.stopped = True

    started = False
    stopped = False

    def of(self, op: Op) -> list[FakeJob]:
        """Jobs of one op in order of submission."""
        return sorted((job for job in self.jobs.values() if job.spec.op is op), key=lambda job: job.submitted_s)

    def _serve(self) -> None:
        while not self._stopping.is_set():
            for peer, message in self._router.receive(0.02):
                self._router.send(peer, self._answer(message))

    def _answer(self, message: ToControl) -> Message:
        match message:
            case SubmitJob():
                self.submissions.append(message.job)
                job = self.jobs.get(message.job.job_id)
                if job is None or job.failed or job.cancelled is not None:
                    self.jobs[message.job.job_id] = FakeJob(message.job, time.monotonic())
                return self._status(message.seq, message.job.job_id)
            case PollJob():
                self.jobs[message.job_id].polls += 1
                return self._status(message.seq, message.job_id)
            case CancelJob():
                job = self.jobs[message.job_id]
                job.cancelled = job.cancelled or message.reason
                return self._status(message.seq, message.job_id)
            case GetStatus():
                return ClusterStatus(seq=message.seq, store=self.store)
            case _:
                raise AssertionError(message)

    def _status(self, seq: int, job_id: JobId) -> JobStatus:
        job = self.jobs[job_id]
        spec = job.spec
        status = JobStatus(
            seq=seq,
            job_id=job_id,
            op=spec.op,
            iteration=spec.iteration,
            phase=JobPhase.RUNNING,
            total=8,
            done=4,
            scored=4,
            spot_slots=2,
            reward_mean=0.5,
            elapsed_s=time.monotonic() - job.submitted_s,
        )
        if job.cancelled is not None:
            return msgspec.structs.replace(status, phase=JobPhase.CANCELLED, message=job.cancelled)
        if time.monotonic() - job.submitted_s < self.seconds.get(spec.op, 0.0):
            return status
        broken = spec.op in self.errors and spec.iteration >= self.errors_from_iteration
        if broken and (job.failed or self.failures < self.failures_max):
            self.failures += not job.failed
            job.failed = True
            error_class, error = self.errors[spec.op]
            return msgspec.structs.replace(status, phase=JobPhase.FAILED, error_class=error_class, error=error)
        job.ended_s = job.ended_s or time.monotonic()
        return msgspec.structs.replace(
            status, phase=JobPhase.SUCCEEDED, done=8, scored=8, result=self._result(job, job.ended_s)
        )

    def _result(self, job: FakeJob, ended_s: float) -> JobResult:
        lost = self.lost_pairs if job.spec.op is Op.EVALUATE and job.spec.iteration else 0
        return result_of(job.spec, job.submitted_s, ended_s, self.candidates, lost)


def result_of(spec: JobSpec, started_s: float, ended_s: float, candidates: int, lost: int) -> JobResult:
    """A result with a real manifest in the run's store. One reserved and two spot slots are held since the clock began."""
    held_s = ended_s - started_s
    usage = Usage(started_s, ended_s, held_s, 2 * held_s, held_s, ended_s, 2 * ended_s)
    if spec.op is Op.TRAIN_STEP:
        policy = PolicyRef(spec.policy.version + 1, f"adapters/{spec.policy.version + 1}", "d" * 8)
        weights, meta = {"weights": np.full(4, policy.version, dtype=np.float32)}, {"policy_digest": policy.digest}
        settings = RunSettings.parse_json(spec.settings_json)
        TensorStore(settings.store).put(policy.key, weights, meta)
        keeps_average = settings.config.grpo.ema_decay > 0
        average = PolicyRef(policy.version, f"averages/{policy.version}", "a" * 8) if keeps_average else PolicyRef()
        return JobResult(op=spec.op, policy=policy, usage=usage, metrics={"loss": 0.25}, average=average)
    settings = RunSettings.parse_json(spec.settings_json)
    store = TensorStore(settings.store)
    manifest = manifest_of(spec, settings, store, candidates, lost)
    key = f"runs/{spec.run_id}/manifests/{spec.job_id}.json"
    store.put_bytes(key, msgspec.json.encode(manifest))
    bandit = BanditState((ArmStats(6, 8, 1, (1.25,)),), 6, 8) if spec.op is Op.EXPLORE else BanditState()
    metrics = {
        "samples": float(len(manifest.samples)),
        "reward_mean": sum(sample.reward for sample in manifest.samples) / len(manifest.samples),
        "correct": sum(sample.correct for sample in manifest.samples) / len(manifest.samples),
    }
    return JobResult(spec.op, key, spec.policy, manifest.plan, bandit, usage, metrics)


def manifest_of(spec: JobSpec, settings: RunSettings, store: TensorStore, candidates: int, lost: int) -> Manifest:
    """Rollouts of two prompts, `candidates` each for exploration, all validation pairs but the last `lost` for evaluation."""
    validating = spec.op is Op.EVALUATE
    key = settings.validation_prompts_key if validating else settings.train_prompts_key
    rows = [parse_row(line) for line in store.get_bytes(key).splitlines()]
    if validating:
        pairs = [(rows[pair % len(rows)], pair) for pair in range(settings.config.evaluation.pairs)]
    else:
        count = candidates if spec.op is Op.EXPLORE else settings.config.grpo.group_size
        pairs = [(row, 1000 + index) for row in rows[:2] for index in range(count)]
    image_key = _picture(store, f"pictures/{spec.policy.version}") if validating else ""
    samples = tuple(
        _sample(spec, prompt_id(row), row.prompt, seed, place, len(pairs), image_key)
        for place, (row, seed) in enumerate(pairs[: len(pairs) - lost])
    )
    explored = tuple(dict.fromkeys(sample.prompt_id for sample in samples)) if spec.op is Op.EXPLORE else ()
    plan = EXPLORED if explored else ExplorationPlan()
    return Manifest(spec.job_id, spec.op, spec.iteration, spec.policy, samples, (), _with_prompts(plan, explored))


def _with_prompts(plan: ExplorationPlan, explored: tuple[str, ...]) -> ExplorationPlan:
    return ExplorationPlan(
        plan.sequences, plan.effective_steps, 0.0, explored, plan.planned_s, plan.window_s, plan.reason
    )


def _sample(spec: JobSpec, prompt: str, text: str, seed: int, place: int, count: int, image_key: str) -> SampleRecord:
    """Each policy version gets one fifth more of the pairs right."""
    correct = place < count * min(1.0, 0.2 * (1 + spec.policy.version))
    noise = int.from_bytes(hashlib.sha256(f"{prompt}/{seed}".encode()).digest()[:2], "big") / 65536
    reward = float(correct) if spec.op is Op.EVALUATE else noise
    return sample_record(
        prompt,
        seed,
        reward,
        request_id=RequestId(f"{spec.job_id}.{prompt}.{seed}"),
        prompt=text,
        correct=correct,
        policy=spec.policy,
        image_key=image_key,
    )


def _picture(store: TensorStore, key: str) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 30, 30)).save(buffer, "PNG")
    store.put_bytes(key, buffer.getvalue())
    return key
