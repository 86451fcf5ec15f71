"""One job: its phases, its legal transitions, its record and how it reads from outside. Never decides what runs when.

Generation jobs go ADMITTING (inputs are read) → ENCODING (embeddings exist) → RUNNING → WRITING (the manifest) → SUCCEEDED, and back from
RUNNING to ENCODING where the store lost one, or a policy; train_step goes ADMITTING (waits for the trainer) → RUNNING → SUCCEEDED. Where
the store lost what a training step reads, that goes back to ADMITTING and the job that made it from SUCCEEDED to work. Any phase but a
final one may turn to FAILED or CANCELLED; a job that is submitted again after that starts over and keeps what is scored. One that made
samples and is submitted again after it has SUCCEEDED sees to it that its manifest is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from spot_runtime.config import RunSettings
from spot_runtime.messages import JobSpec, JobStatus
from spot_runtime.scheduler.claim import Claim
from spot_runtime.scheduler.requests import IllegalTransitionError, RequestRecord
from spot_runtime.types import (
    BanditState,
    ExplorationPlan,
    FailedRequest,
    JobId,
    JobPhase,
    JobResult,
    Manifest,
    Op,
    PolicyRef,
    RequestState,
    SampleRecord,
)

PROMPTS_NAMED_MAX = 8
"""Prompts that a job's message names; its manifest has all."""
LOST_TOO_OFTEN = "its leases were lost too often"


class JobEvent(StrEnum):
    """What can happen to a job."""

    EXPANDED = "expanded"
    ENCODED = "encoded"
    INPUT_LOST = "input_lost"
    DATA_LOST = "data_lost"
    SAMPLES_LOST = "samples_lost"
    STATE_LOST = "state_lost"
    STARTED = "started"
    ALL_FINAL = "all_final"
    WRITTEN = "written"
    TRAINED = "trained"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RESUBMITTED = "resubmitted"


P, E = JobPhase, JobEvent
TRANSITIONS: dict[tuple[JobPhase, JobEvent], JobPhase] = {
    (P.ADMITTING, E.EXPANDED): P.ENCODING,
    (P.ADMITTING, E.STARTED): P.RUNNING,
    (P.ENCODING, E.ENCODED): P.RUNNING,
    (P.RUNNING, E.INPUT_LOST): P.ENCODING,
    (P.RUNNING, E.ALL_FINAL): P.WRITING,
    (P.RUNNING, E.TRAINED): P.SUCCEEDED,
    (P.WRITING, E.WRITTEN): P.SUCCEEDED,
    (P.RUNNING, E.DATA_LOST): P.ADMITTING,
    (P.SUCCEEDED, E.SAMPLES_LOST): P.RUNNING,
    (P.SUCCEEDED, E.STATE_LOST): P.ADMITTING,
    (P.SUCCEEDED, E.RESUBMITTED): P.WRITING,
    (P.FAILED, E.RESUBMITTED): P.ADMITTING,
    (P.CANCELLED, E.RESUBMITTED): P.ADMITTING,
    **{(phase, E.FAILED): P.FAILED for phase in P if not phase.is_final},
    **{(phase, E.CANCELLED): P.CANCELLED for phase in P if not phase.is_final},
}


class HeldMark(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-seconds held since the cluster began, at `at_s`, and the slots held then: enough to count on after a restart."""

    at_s: float = 0.0
    reserved_s: float = 0.0
    spot_s: float = 0.0
    reserved_slots: float = 0.0
    spot_slots: float = 0.0

    def later(self, now_s: float, bound_s: float) -> HeldMark:
        """The mark at `now_s` if the same slots were held until then, `bound_s` at most."""
        passed_s = min(max(0.0, now_s - self.at_s), bound_s)
        reserved_s = self.reserved_s + self.reserved_slots * passed_s
        return msgspec.structs.replace(
            self, at_s=now_s, reserved_s=reserved_s, spot_s=self.spot_s + self.spot_slots * passed_s
        )


class JobRecord(msgspec.Struct, kw_only=True):
    """A job and all that is known of it.

    `held_before` is what was held when it was submitted, `held` lately. `leftover_policy` is what samples that have yet to begin are drawn
    with instead of the job's policy; once `closed` none begins. `turn` numbers the trainings of all runs as they begin, 0: not yet.
    `redone` counts how often it made again what the store had lost of it. `reward_tail_s` comes off the time that a training took.
    `done` and `total` are the trainer's progress; requests are counted from the queue.
    """

    job: JobSpec
    sequence: int
    phase: JobPhase = JobPhase.ADMITTING
    submitted_s: float = 0.0
    started_s: float = 0.0
    finished_s: float = 0.0
    polled_s: float = 0.0
    moved_s: float = 0.0
    held_before: HeldMark = HeldMark()
    held: HeldMark = HeldMark()
    to_encode: tuple[tuple[str, str], ...] = ()
    to_publish: PolicyRef = PolicyRef()
    """A policy that the store lost."""
    released: bool = False
    plan: ExplorationPlan = ExplorationPlan()
    bandit: BanditState = BanditState()
    leftover_policy: PolicyRef | None = None
    closed: bool = False
    reward_tail_s: float = 0.0
    restarts: int = 0
    redone: int = 0
    turn: int = 0
    done: int = 0
    total: int = 0
    message: str = ""
    result: JobResult | None = None
    error_class: str = ""
    error: str = ""

    @property
    def job_id(self) -> JobId:
        return self.job.job_id

    def settings(self) -> RunSettings:
        return RunSettings.parse_json(self.job.settings_json)

    def move(self, event: JobEvent, now_s: float) -> None:
        """Takes one transition; stamps start and finish."""
        target = TRANSITIONS.get((self.phase, event))
        if target is None:
            raise IllegalTransitionError(f"{self.job_id}: {event} cannot happen in phase {self.phase}")
        self.phase, self.moved_s = target, now_s
        if target is JobPhase.RUNNING:
            self.started_s = now_s
        if target.is_final:
            self.finished_s = now_s

    def book(self, done: int, total: int, message: str, now_s: float) -> None:
        """The trainer's progress."""
        if (done, total) != (self.done, self.total):
            self.moved_s = now_s
        self.done, self.total, self.message = done, total, message


def status(record: JobRecord, claim: Claim | None, *, spot_slots: int, now_s: float) -> JobStatus:
    """The job as a client sees it; a job without requests has no claim."""
    tally = claim.tally if claim else dict.fromkeys(RequestState, 0)
    scored = tally[RequestState.SCORED]
    training = record.job.op is Op.TRAIN_STEP
    ended_s = record.finished_s if record.phase.is_final else now_s
    return JobStatus(
        job_id=record.job_id,
        op=record.job.op,
        iteration=record.job.iteration,
        phase=record.phase,
        total=record.total if training else sum(tally.values()),
        done=record.done if training else tally[RequestState.DONE] + scored,
        scored=scored,
        failed=tally[RequestState.FAILED],
        spot_slots=spot_slots,
        reward_mean=claim.reward_sum / scored if claim and scored else 0.0,
        elapsed_s=max(0.0, ended_s - record.submitted_s),
        message=record.message,
        result=record.result,
        error_class=record.error_class,
        error=record.error,
    )


def generation_metrics(requests: Sequence[RequestRecord]) -> dict[str, float]:
    """Mean reward, share correct, how often work was lost, failed or dropped, and how long the last scores took to come."""
    scored = [request for request in requests if request.state is RequestState.SCORED]
    filling = [request for request in requests if request.request.fills_window]
    count = max(1, len(scored))
    return {
        "samples": float(len(scored)),
        "failed": float(sum(request.state is RequestState.FAILED for request in requests)),
        "dropped": float(
            sum(request.state is RequestState.ABORTED and not request.request.fills_window for request in requests)
        ),
        "filled": float(sum(request.state is RequestState.SCORED for request in filling)),
        "reward_mean": sum(request.reward for request in scored) / count,
        "correct": sum(request.correct for request in scored) / count,
        "leases_lost": float(sum(request.losses for request in requests)),
        "reward_tail_s": _reward_tail_s(scored),
        "effective_steps": sum(request.effective_steps for request in scored) / count,
    }


def _reward_tail_s(scored: Sequence[RequestRecord]) -> float:
    """From the last denoised to the last scored sample; 0 where there is none."""
    ends = ((request.scored_s, request.finished_s) for request in scored)
    scored_s, finished_s = map(max, zip(*ends, strict=True)) if scored else (0.0, 0.0)
    return max(0.0, scored_s - finished_s)


def spot_busy_s(requests: Sequence[RequestRecord]) -> float:
    """Slot-seconds that these requests took of spot workers; a sample that was taken over took none."""
    return sum(request.spot_busy_s for request in requests)


def manifest_key(job: JobSpec) -> str:
    return f"runs/{job.run_id}/manifests/{job.job_id}.json"


def makes(maker: JobRecord, job: JobRecord) -> bool:
    """Whether `job` reads what `maker` made: a training its rollouts, any job its policy or the moving average of one."""
    if maker.job.run_id != job.job.run_id or maker.result is None:
        return False
    if maker.job.op is Op.TRAIN_STEP:
        policy = job.to_publish if job.to_publish.key else job.job.policy
        return bool(policy.key) and policy in (maker.result.policy, maker.result.average)
    reads_samples = maker.job.op is Op.ROLLOUT and job.job.op is Op.TRAIN_STEP
    return reads_samples and manifest_key(maker.job) == job.job.manifest_key


def manifest(
    job: JobSpec, plan: ExplorationPlan, counted: Iterable[RequestRecord], failed: tuple[FailedRequest, ...]
) -> Manifest:
    """What the job produced: samples of the requests that count, and those that were given up."""
    return Manifest(
        job_id=job.job_id,
        op=job.op,
        iteration=job.iteration,
        policy=job.policy,
        samples=tuple(_sample(record) for record in counted),
        failed_prompt_ids=tuple(sorted({request.prompt_id for request in failed})),
        failed=failed,
        plan=plan,
    )


def that_count(op: Op, requests: Iterable[RequestRecord], failed: Iterable[FailedRequest]) -> tuple[RequestRecord, ...]:
    """Those that are scored. A rollout group with a failed member is left out whole: nothing trains on half a group."""
    left_out = {request.prompt_id for request in failed} if op is Op.ROLLOUT else set()
    return tuple(r for r in requests if r.state is RequestState.SCORED and r.request.prompt_id not in left_out)


def failure(record: RequestRecord) -> FailedRequest:
    """A request that was given up, with all that happened to it."""
    return FailedRequest(
        request_id=record.request_id,
        job_id=record.request.job_id,
        prompt_id=record.request.prompt_id,
        attempts=record.attempts,
        failures=record.failures,
        losses=record.losses,
        reason=record.reason or LOST_TOO_OFTEN,
        history=tuple(record.history),
        prompt=record.request.prompt,
        node_id=record.node_id,
    )


def failures_in_words(op: Op, failed: Sequence[FailedRequest]) -> str:
    """One line about what a job gave up; "" where it gave up nothing."""
    if not failed:
        return ""
    left_out = "groups left out whole" if op is Op.ROLLOUT else "samples missing"
    prompts = ", ".join(sorted({request.prompt_id for request in failed})[:PROMPTS_NAMED_MAX])
    first = failed[0]
    return (
        f"{len(failed)} requests failed for good, {left_out}: prompts {prompts};"
        f" the first after {first.attempts} attempts: {first.reason}"
    )


def _sample(record: RequestRecord) -> SampleRecord:
    request = record.request
    assert record.node_id is not None
    return SampleRecord(
        request_id=request.request_id,
        prompt_id=request.prompt_id,
        prompt=request.prompt,
        seed=request.seed,
        reward=record.reward,
        correct=record.correct,
        reason=record.reason,
        sample_key=record.sample_key,
        sample_digest=record.sample_digest,
        embedding_key=request.embedding_key,
        sde_window=request.sde_window,
        policy=record.policy,
        node_id=record.node_id,
        pool=record.pool,
        attempts=record.attempts,
        started_s=record.started_s,
        finished_s=record.finished_s,
        image_key=record.image_key,
        effective_steps=record.effective_steps,
        busy_s=record.made_busy_s,
    )
