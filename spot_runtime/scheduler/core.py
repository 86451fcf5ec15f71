"""Control's core: jobs, requests, nodes, trainer and planner under one `handle(event, now_s) -> commands`.

Owns every decision of the control plane. Never reads a clock, a socket or the store: the shell brings facts in and carries commands out.
A job moves on when its condition holds, whatever event made it hold, so a lost or repeated message can delay a job but not derail it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from spot_runtime.config import ClusterConfig, RunSettings
from spot_runtime.errors import InputError, LostSamplesError, LostStateError
from spot_runtime.instances import InstanceManager, NodeDeclaredLost, NodesExcused, NodeTimePassed
from spot_runtime.messages import (
    SEAT_TAKEN,
    AssignWork,
    ClusterStatus,
    DropRequests,
    EncodePrompts,
    EndTrainer,
    FromTrainer,
    HeldLease,
    JobSpec,
    JobStatus,
    NodeHeartbeat,
    NodeHello,
    NodeLeft,
    NodeNoticed,
    PauseNode,
    PromptsEncoded,
    PullWork,
    Refused,
    RequestCommitted,
    RequestFailed,
    RequestReturned,
    ResumeNode,
    SampleDone,
    SampleScored,
    StartTraining,
    StopTraining,
    TrainerFailed,
    TrainerHeartbeat,
    TrainerHello,
    TrainingFinished,
    WelcomeNode,
)
from spot_runtime.planner import TrainTimeEstimate
from spot_runtime.planner.strategies import STRATEGIES
from spot_runtime.scheduler.claim import Claim
from spot_runtime.scheduler.commands import Changes, Command, ReadJobInputs, SendToNode, SendToTrainer, WriteManifest
from spot_runtime.scheduler.events import (
    ControlAwoke,
    Event,
    JobCancelled,
    JobInputsRead,
    JobPolled,
    JobStepFailed,
    JobSubmitted,
    ManifestWritten,
    TimePassed,
)
from spot_runtime.scheduler.expansion import JobInputs, expand, prompts_to_encode, samples_made
from spot_runtime.scheduler.exploration import Situation, calibrated_situation, plan_exploration
from spot_runtime.scheduler.jobs import (
    HeldMark,
    JobEvent,
    JobRecord,
    failure,
    failures_in_words,
    generation_metrics,
    makes,
    manifest_key,
    spot_busy_s,
    status,
    that_count,
)
from spot_runtime.scheduler.pulls import Grant
from spot_runtime.scheduler.queue import LOST_EMBEDDING, LOST_POLICY, RequestQueue
from spot_runtime.scheduler.requests import RequestRecord
from spot_runtime.scheduler.seat import Answer, TrainerSeat
from spot_runtime.types import (
    JobId,
    JobPhase,
    JobResult,
    NodeId,
    Op,
    PolicyRef,
    Pool,
    RequestId,
    RequestState,
    RunId,
    Usage,
)

TRAINER_RESTARTS_MAX = 3
REDONE_MAX = 3
LOST_OUTPUTS = {LostSamplesError.__name__: Op.ROLLOUT, LostStateError.__name__: Op.TRAIN_STEP}
"""By error of the trainer, which job makes again what the store lost, REDONE_MAX times at most."""
MARK_EVERY_S = 1.0
"""Open jobs journal what is held so often: a restart loses no more of the cost."""
TRAINER_ANSWER_S = 5.0
"""A heartbeat that names no job within this of the order was sent before the order arrived."""
UNKNOWN_NODE = "UnknownNodeError"
"""Class of the refusal that asks a node to say hello again."""
OPEN_JOBS_MAX = 256
REQUESTS_OF_JOB_MAX = 131_072
"""Back-pressure: what would go beyond is refused with a line, not queued."""
FAILURES_SHOWN_MAX = 32
"""Requests given up that a status shows; manifests have all."""
FINISHED_JOBS_MAX = 256
"""Finished jobs kept for late polls and retried tasks."""

CoreEvent = (
    Event
    | NodeHello
    | NodeHeartbeat
    | NodeNoticed
    | NodeLeft
    | PullWork
    | SampleDone
    | SampleScored
    | RequestCommitted
    | RequestReturned
    | RequestFailed
    | TrainerHello
    | TrainerHeartbeat
    | PromptsEncoded
    | TrainingFinished
    | TrainerFailed
)


@dataclass(frozen=True)
class Supply:
    """Who may be given work, and how many slots that is."""

    pools: dict[NodeId, Pool]
    slots: int
    spot_slots: int


class ControlCore:
    """State of the whole control plane; `jobs` keeps submission order.

    `open_jobs` are those in no final phase. `dirty_jobs` changed, and `forgotten` left, since the shell last journalled. `training_run` has
    the trainer: trainings of other runs wait for it.
    """

    def __init__(self, cluster: ClusterConfig, *, reward_url: str = "") -> None:
        self.cluster = cluster
        self.reward_url = reward_url
        self.jobs: dict[JobId, JobRecord] = {}
        self.open_jobs: dict[JobId, JobRecord] = {}
        self._supply: Supply | None = None
        self.dirty_jobs: set[JobId] = set()
        self.forgotten: list[JobId] = []
        self.queue = RequestQueue(lease_s=cluster.lease_s, failures_max=cluster.max_attempts)
        self.instances = InstanceManager(lost_after_s=cluster.lease_s)
        self.trainer = TrainerSeat()
        self.training_run: RunId | None = None
        self.encoded: set[str] = set()
        self.train_times: dict[RunId, TrainTimeEstimate] = {}
        self.step_s: dict[NodeId, float] = {}
        self.parked: set[NodeId] = set()
        """Reserved nodes that said last that nothing is at work in their slots."""
        self.pauses = 0
        self._out: list[Command] = []

    # ---- entry ----

    def handle(self, event: CoreEvent, now_s: float) -> list[Command]:
        """Takes one fact in; returns what is to be done about it."""
        self._out = []
        self._take(event, now_s)
        self._advance(now_s)
        return self._out

    def take_changes(self) -> Changes:
        """What changed since the last call, in a fixed order; the shell writes it down before it says anything."""
        jobs = [self.jobs[job_id] for job_id in self.dirty_jobs if job_id in self.jobs]
        requests = [self.queue.records[request_id] for request_id in self.queue.dirty]
        changes = Changes(
            jobs=tuple(sorted(jobs, key=lambda job: job.sequence)),
            requests=tuple(sorted(requests, key=lambda record: record.number)),
            forgotten=tuple(self.forgotten),
        )
        self.dirty_jobs.clear()
        self.queue.dirty.clear()
        self.forgotten.clear()
        return changes

    def restore(self, job: JobRecord, requests: list[RequestRecord], now_s: float) -> None:
        """Puts a journalled job back. Leases get a fresh deadline: their nodes have to find the way back first."""
        self.jobs[job.job_id] = job
        self._sort_in(job)
        if job.job.op is not Op.TRAIN_STEP:
            self.queue.add(self._claim(job), (), now_s)
        for record in requests:
            record.renewed_at_s = now_s
            self.queue.restore(record)
        job.polled_s = job.moved_s = now_s

    def resume(self, now_s: float) -> list[Command]:
        """After the last `restore`: counts on what is held, and repeats the orders whose answers may be lost."""
        self._out = []
        last = max((job.held for job in self.jobs.values()), key=lambda mark: mark.at_s, default=HeldMark())
        held = last.later(now_s, self.cluster.lease_s)
        self.instances.resume(held.reserved_s, held.spot_s)
        self.trainer.seen_s = now_s
        for job in self.jobs.values():
            if job.phase is JobPhase.ADMITTING and job.job.op is not Op.TRAIN_STEP:
                self._out.append(ReadJobInputs(job.job))
            elif job.phase is JobPhase.WRITING:
                self._write_manifest(job, now_s)
            elif job.phase is JobPhase.SUCCEEDED and job.job.op is Op.TRAIN_STEP:
                self._learn_train_time(job)
        self.training_run = self._find_training_run(now_s)
        self._advance(now_s)
        return self._out

    def _take(self, event: CoreEvent, now_s: float) -> None:
        match event:
            case JobSubmitted():
                self._submit(event.job, now_s)
            case JobPolled():
                if job := self.jobs.get(event.job_id):
                    self._polled(job, now_s)
            case JobCancelled():
                self._cancel(event.job_id, event.reason, now_s)
            case JobInputsRead():
                self._expand(event.job_id, event.inputs, now_s)
            case JobStepFailed():
                if job := self.jobs.get(event.job_id):
                    self._fail(job, event.error_class, event.error, now_s)
            case ManifestWritten():
                self._finish_generation(event.job_id, event.key, now_s)
            case NodeHello() | NodeHeartbeat() | NodeNoticed() | NodeLeft():
                self._node(event, now_s)
            case PullWork():
                self._pull(event)
            case SampleDone():
                self.queue.finished(event, now_s)
            case SampleScored():
                self.queue.scored(event, now_s)
            case RequestCommitted():
                self.queue.committed(event)
            case RequestReturned():
                self.queue.returned(event, now_s)
            case RequestFailed():
                self._make_again(event, now_s)
                self.queue.failed(event, now_s)
            case TrainerHello() | TrainerHeartbeat() | PromptsEncoded() | TrainingFinished() | TrainerFailed():
                self._trainer(event, now_s)
            case ControlAwoke():
                self._excuse_silence(now_s)
            case TimePassed():
                self._time_passed(now_s)
            case _:
                raise AssertionError(f"no rule for {type(event).__name__}")

    # ---- jobs ----

    def _submit(self, spec: JobSpec, now_s: float) -> None:
        """Idempotent by job id; a failed or cancelled job starts over and keeps what is scored, one that made samples and has succeeded
        writes its manifest where the store lost it. Raises InputError.
        """
        job = self.jobs.get(spec.job_id)
        if spec.job_id not in self.open_jobs and (job is None or job.phase is not JobPhase.SUCCEEDED):
            self._check_room(spec)
        if job is None:
            job = JobRecord(
                job=spec, sequence=self._next_sequence(), submitted_s=now_s, moved_s=now_s, bandit=spec.bandit
            )
            job.held_before = job.held = self._mark(now_s)
            self.jobs[spec.job_id] = job
        elif job.phase in (JobPhase.FAILED, JobPhase.CANCELLED):
            job.move(JobEvent.RESUBMITTED, now_s)
            job.error_class = job.error = job.message = ""
            job.restarts, job.closed = 0, False
            job.job = spec
            self.training_run = self._find_training_run(now_s)
        else:
            self._polled(job, now_s)
            if job.phase is JobPhase.SUCCEEDED and spec.op is not Op.TRAIN_STEP:
                job.move(JobEvent.RESUBMITTED, now_s)
                self._write_manifest(job, now_s)
                self._touch(job)
            return
        job.polled_s = now_s
        self._touch(job)
        if spec.op is not Op.TRAIN_STEP:
            self._out.append(ReadJobInputs(spec))

    def _polled(self, job: JobRecord, now_s: float) -> None:
        """Renews the run's lease: one client polls all of its jobs, maybe one after another."""
        for other in {
            job.job_id: job,
            **{other.job_id: other for other in self._open_jobs_of(job.job.run_id)},
        }.values():
            other.polled_s = now_s
            self.queue.pause(other.job_id, False)

    def _open_jobs_of(self, run_id: RunId) -> list[JobRecord]:
        return [job for job in self.open_jobs.values() if job.job.run_id == run_id]

    def _check_room(self, spec: JobSpec) -> None:
        if len(self.open_jobs) >= OPEN_JOBS_MAX:
            raise InputError(f"job = {spec.job_id!r}: {len(self.open_jobs)} jobs are open: must be < {OPEN_JOBS_MAX}")
        grpo = RunSettings.parse_json(spec.settings_json).config.grpo
        requests = grpo.prompts_per_iteration * grpo.group_size
        if spec.op is Op.ROLLOUT and requests > REQUESTS_OF_JOB_MAX:
            raise InputError(
                f"prompts_per_iteration * group_size = {requests} of job {spec.job_id!r}: must be <= {REQUESTS_OF_JOB_MAX}"
            )

    def _next_sequence(self) -> int:
        return 1 + max((job.sequence for job in self.jobs.values()), default=0)

    def _expand(self, job_id: JobId, inputs: JobInputs, now_s: float) -> None:
        job = self.jobs.get(job_id)
        if job is None or job.phase is not JobPhase.ADMITTING:
            return
        settings = job.settings()
        self.encoded |= inputs.encoded
        if job.job.op is Op.EXPLORE and not job.plan.sequences:
            situation = self._situation(job.job, settings)
            job.plan, job.bandit = plan_exploration(job.job, settings, inputs, situation)
            job.message = job.plan.reason
        job.to_encode = tuple(p for p in prompts_to_encode(job.job, settings, inputs) if p[0] not in self.encoded)
        trained = self._trained(job.job)
        job.released = trained is not None or job.job.iteration >= settings.iterations
        requests = expand(job.job, settings, inputs, job.plan)
        if len(requests) > REQUESTS_OF_JOB_MAX:
            self._fail(job, "InputError", f"requests = {len(requests)}: must be <= {REQUESTS_OF_JOB_MAX}", now_s)
            return
        job.move(JobEvent.EXPANDED, now_s)
        self.queue.add(self._claim(job), requests, now_s, samples_made(requests, inputs.samples))
        if trained is not None:
            self._rule_leftovers(job, trained, now_s)
        if not job.to_encode:
            self._encoded(job, now_s)
        self._touch(job)

    def _situation(self, spec: JobSpec, settings: RunSettings) -> Situation:
        if settings.config.deterministic:
            return calibrated_situation(settings, self.cluster, spec.iteration)
        pools = self.instances.pools()
        known = [step_s for node, step_s in self.step_s.items() if step_s > 0 and pools.get(node) is Pool.SPOT]
        exploration = settings.config.exploration
        times = self.train_times.get(spec.run_id, TrainTimeEstimate(exploration.calibrated_train_s))
        return Situation(
            spot_slots=self.instances.spot_slots,
            train_s=times.estimate_s,
            step_s=sum(known) / len(known) if known else 0.0,
            evaluation_samples=self._evaluation_left(spec, settings),
        )

    def _evaluation_left(self, spec: JobSpec, settings: RunSettings) -> int:
        """Samples that the evaluation of this iteration has yet to make; all of them where it is due and not here yet."""
        for job in self.jobs.values():
            if (job.job.op, job.job.run_id, job.job.iteration) == (Op.EVALUATE, spec.run_id, spec.iteration):
                claim = self.queue.claims.get(job.job_id)
                if claim is not None or job.phase.is_final:
                    return claim.unfinished if claim is not None else 0
        return settings.config.evaluation.pairs if settings.evaluates_at(spec.iteration) else 0

    def _encoded(self, job: JobRecord, now_s: float) -> None:
        self.encoded.update(key for key, _ in job.to_encode)
        job.to_encode, job.to_publish = (), PolicyRef()
        job.move(JobEvent.ENCODED, now_s)
        self.queue.update(job.job_id, ready=True, everywhere=job.released)
        self._touch(job)

    def _make_again(self, message: RequestFailed, now_s: float) -> None:
        """The store lost an input that was there: its job waits until the trainer has stored it again. What is under way goes on."""
        record = self.queue.leased(message.request_id, message.lease_id)
        if record is None or message.error_class not in (LOST_EMBEDDING, LOST_POLICY):
            return
        job, request = self.jobs[record.request.job_id], record.request
        if message.error_class == LOST_POLICY:
            job.to_publish = request.policy
        else:
            self.encoded.discard(request.embedding_key)
            job.to_encode = tuple((dict(job.to_encode) | {request.embedding_key: request.prompt}).items())
        if job.phase is JobPhase.RUNNING:
            job.move(JobEvent.INPUT_LOST, now_s)
            self.queue.update(job.job_id, ready=False, everywhere=job.released)
        self._touch(job)

    def _write_manifest(self, job: JobRecord, now_s: float) -> None:
        requests, op = self.queue.of_job(job.job_id), job.job.op
        failed = tuple(failure(record) for record in requests if record.state is RequestState.FAILED)
        counted = that_count(op, requests, failed)
        if requests and not counted and op is not Op.EXPLORE:
            reason = next((record.reason for record in requests if record.reason), "no sample was scored")
            what = "each group lost a sample" if op is Op.ROLLOUT else f"all {len(requests)} requests failed"
            self._fail(job, "JobFailedError", f"{what}; the first: {reason}", now_s)
        else:
            job.message = failures_in_words(op, failed) or job.message
            key, replaces = manifest_key(job.job), job.redone > 0
            self._out.append(WriteManifest(key, job.job, job.plan, counted, failed, replaces))

    def _finish_generation(self, job_id: JobId, key: str, now_s: float) -> None:
        job = self.jobs.get(job_id)
        if job is None or job.phase is not JobPhase.WRITING:
            return
        requests = self.queue.of_job(job.job_id)
        metrics = generation_metrics(requests)
        job.move(JobEvent.WRITTEN, now_s)
        job.result = JobResult(
            op=job.job.op,
            manifest_key=key,
            policy=job.job.policy,
            plan=job.plan,
            bandit=job.bandit,
            usage=job.result.usage if job.result else self._usage(job, spot_busy_s(requests)),
            metrics=metrics,
        )
        self._touch(job)

    def _usage(self, job: JobRecord, busy_s: float = 0.0) -> Usage:
        before, after = job.held_before, self._mark(job.finished_s)
        return Usage(
            started_s=job.submitted_s,
            finished_s=job.finished_s,
            reserved_gpu_s=after.reserved_s - before.reserved_s,
            spot_gpu_s=after.spot_s - before.spot_s,
            spot_busy_s=busy_s,
            reserved_total_s=after.reserved_s,
            spot_total_s=after.spot_s,
        )

    def _mark(self, now_s: float) -> HeldMark:
        reserved_s, spot_s = self.instances.totals(now_s)
        reserved_slots, spot_slots = self.instances.held_slots()
        return HeldMark(
            at_s=now_s,
            reserved_s=reserved_s,
            spot_s=spot_s,
            reserved_slots=reserved_slots,
            spot_slots=spot_slots,
        )

    def _fail(self, job: JobRecord, error_class: str, error: str, now_s: float) -> None:
        if job.phase.is_final:
            return
        job.move(JobEvent.FAILED, now_s)
        job.error_class, job.error = error_class, error
        self._drop_requests(job, now_s)
        self._close(job, now_s)

    def _cancel(self, job_id: JobId, reason: str, now_s: float) -> None:
        job = self.jobs.get(job_id)
        if job is None or job.phase.is_final:
            return
        job.move(JobEvent.CANCELLED, now_s)
        job.message = reason
        if self.trainer.job_id == job_id:
            self._out.append(SendToTrainer(StopTraining(job_id=job_id)))
        self._drop_requests(job, now_s)
        self._close(job, now_s)

    def _close(self, job: JobRecord, now_s: float) -> None:
        """A job is over; with training, whatever waited for it goes on, and without what it should make again, nothing can."""
        self._touch(job)
        if job.redone and job.phase is not JobPhase.SUCCEEDED:
            for other in [other for other in self.open_jobs.values() if self._asks_again(other, job)]:
                why = f"{job.job_id}, which should make again what the store lost: {job.error or job.message}"
                self._fail(other, job.error_class or "JobFailedError", why, now_s)
        self.training_run = self._find_training_run(now_s)
        if job.job.op is Op.TRAIN_STEP:
            self._release(job, now_s)
            if not self._is_training():
                self._tell_reserved(ResumeNode())

    def _drop_requests(self, job: JobRecord, now_s: float) -> None:
        self._tell_dropped(self.queue.cancel(job.job_id, now_s))

    def _tell_dropped(self, dropped: list[tuple[NodeId, RequestId]]) -> None:
        by_node: dict[NodeId, list[RequestId]] = {}
        for node_id, request_id in dropped:
            by_node.setdefault(node_id, []).append(request_id)
        self._out += [SendToNode(n, DropRequests(request_ids=tuple(ids))) for n, ids in by_node.items()]

    def _trained(self, spec: JobSpec) -> JobRecord | None:
        """This iteration's training if it is over, so that reserved slots may help with what is left."""
        wanted = (Op.TRAIN_STEP, spec.run_id, spec.iteration)
        trainings = (j for j in self.jobs.values() if (j.job.op, j.job.run_id, j.job.iteration) == wanted)
        return next((job for job in trainings if job.phase.is_final), None)

    def _release(self, trained: JobRecord, now_s: float) -> None:
        """Training is over: leftovers of this iteration go to all pools."""
        for job in self.jobs.values():
            mine = (job.job.run_id, job.job.iteration) == (trained.job.run_id, trained.job.iteration)
            if mine and job.job_id in self.queue.claims:
                job.released = True
                self.queue.update(job.job_id, ready=job.phase is JobPhase.RUNNING, everywhere=True)
                self._rule_leftovers(job, trained, now_s)
                self._touch(job)

    def _rule_leftovers(self, job: JobRecord, trained: JobRecord, now_s: float) -> None:
        """What is left of an exploration beside this training (paper §4.3.4): what has begun goes on as it began, but under `drop`, which
        waits only for scores. What only filled the window ends with it.
        """
        exploration = job.settings().config.exploration
        strategy = STRATEGIES.get(exploration.mode)
        if job.job.op is not Op.EXPLORE or job.phase.is_final or strategy is None or strategy.after_training:
            return
        self._tell_dropped(self.queue.cancel_filling(job.job_id, now_s))
        match exploration.leftovers:
            case "latest" if trained.result is not None:
                job.leftover_policy = trained.result.policy
                self.queue.change_policy(job.job_id, trained.result.policy)
            case "drop":
                job.closed = True
                self._tell_dropped(self.queue.close(job.job_id, now_s))

    def _claim(self, job: JobRecord) -> Claim:
        ready = job.phase is JobPhase.RUNNING
        return Claim(
            job.job_id,
            job.sequence,
            job.job.op,
            ready=ready,
            everywhere=job.released,
            policy=job.leftover_policy,
            closed=job.closed,
        )

    def _touch(self, job: JobRecord) -> None:
        self.dirty_jobs.add(job.job_id)
        self._sort_in(job)

    def _sort_in(self, job: JobRecord) -> None:
        if job.phase.is_final:
            self.open_jobs.pop(job.job_id, None)
        else:
            self.open_jobs[job.job_id] = job
        self._supply = None

    # ---- nodes ----

    def _node(self, message: NodeHello | NodeHeartbeat | NodeNoticed | NodeLeft, now_s: float) -> None:
        node_id = message.node_id
        known = self.instances.is_present(node_id)
        if not isinstance(message, NodeHeartbeat) or self.instances.slots_of(node_id) != message.slots:
            self._supply = None
        if not known and not isinstance(message, NodeHello):
            if isinstance(message, NodeHeartbeat):
                self._out.append(
                    SendToNode(node_id, Refused(error_class=UNKNOWN_NODE, error=f"say hello first, {node_id}"))
                )
            return
        self._facts(self.instances.handle(message, now_s), now_s)
        match message:
            case NodeHello():
                self._welcome(message, now_s)
            case NodeHeartbeat():
                self.step_s[node_id] = message.step_s
                self._note_parked(message)
                self._correct_pause(message)
                self._renew(node_id, message.held, now_s)
            case NodeLeft():
                self._forget_node(node_id, now_s, "node left")
            case NodeNoticed():
                self.queue.pulls.withdraw(node_id)

    def _note_parked(self, beat: NodeHeartbeat) -> None:
        if beat.paused and beat.pause == self.pauses and self.instances.pool(beat.node_id) is Pool.RESERVED:
            self.parked.add(beat.node_id)
        else:
            self.parked.discard(beat.node_id)

    def _correct_pause(self, beat: NodeHeartbeat) -> None:
        """A lost PauseNode or ResumeNode is said again."""
        should_pause = self.instances.pool(beat.node_id) is Pool.RESERVED and self._is_training()
        if should_pause and beat.node_id not in self.parked:
            self._out.append(SendToNode(beat.node_id, PauseNode(number=self.pauses)))
        elif beat.paused and not should_pause:
            self._out.append(SendToNode(beat.node_id, ResumeNode()))

    def _welcome(self, hello: NodeHello, now_s: float) -> None:
        """A node that starts anew holds nothing: what an earlier process of that name held is lost at once."""
        held = frozenset(lease.lease_id for lease in hello.held)
        self.parked.discard(hello.node_id)
        self.queue.reclaim(hello.node_id, now_s, "node restarted", keep=held)
        welcome = WelcomeNode(
            heartbeat_s=self.cluster.heartbeat_s,
            reward_url=self.reward_url,
            paused=hello.pool is Pool.RESERVED and self._is_training(),
            pause=self.pauses,
        )
        self._out.append(SendToNode(hello.node_id, welcome))
        self._renew(hello.node_id, hello.held, now_s)

    def _renew(self, node_id: NodeId, held: tuple[HeldLease, ...], now_s: float) -> None:
        """Leases that are no longer the node's own are dropped there; for a scored request this is the receipt."""
        if strangers := self.queue.renew(node_id, held, now_s):
            self._out.append(SendToNode(node_id, DropRequests(request_ids=tuple(strangers))))

    def _pull(self, pull: PullWork) -> None:
        if self.instances.takes_work(pull.node_id) and (again := self.queue.pull(pull)):
            self._grant(again)

    def _grant(self, grant: Grant) -> None:
        message = AssignWork(group_id=grant.group_id, assignments=grant.assignments, number=grant.number)
        self._out.append(SendToNode(grant.node_id, message))

    def _facts(self, facts: list[NodeDeclaredLost], now_s: float) -> None:
        for fact in facts:
            self._forget_node(fact.node_id, now_s, "node lost")

    def _forget_node(self, node_id: NodeId, now_s: float, note: str) -> None:
        self.step_s.pop(node_id, None)
        self.parked.discard(node_id)
        self.queue.reclaim(node_id, now_s, note)

    # ---- trainer ----

    def _trainer(self, message: FromTrainer, now_s: float) -> None:
        answers = isinstance(message, Answer) and self.trainer.is_answered_by(message)
        if not self.trainer.admits(message.trainer_id):
            if not answers:
                self._refuse_trainer(message.trainer_id)
                return
            assert isinstance(message, Answer)
            self._out.append(SendToTrainer(StopTraining(job_id=message.job_id)))
        else:
            self.trainer.trainer_id, self.trainer.seen_s = message.trainer_id, now_s
        if isinstance(message, Answer):
            if answers:
                self._answered(message, now_s)
        else:
            self._heard(message, now_s)

    def _refuse_trainer(self, trainer_id: str) -> None:
        taken = f"{self.trainer.trainer_id} is this cluster's trainer: {trainer_id} gets no work until it is gone"
        self._out.append(SendToTrainer(Refused(error_class=SEAT_TAKEN, error=taken), trainer_id))

    def _answered(self, answer: Answer, now_s: float) -> None:
        """A job that has moved on meanwhile is left alone."""
        job = self.jobs.get(answer.job_id)
        if job is None or job.phase not in (JobPhase.ENCODING, JobPhase.RUNNING):
            return
        match answer:
            case PromptsEncoded() if job.phase is JobPhase.ENCODING:
                self.trainer.vacate()
                self._encoded(job, now_s)
            case TrainingFinished() if self._trains(job):
                self._finish_training(job, answer, now_s)
            case TrainerFailed() if self._wants_trainer(job):
                self._trainer_failed(job, answer, now_s)
            case _:
                pass

    def _trainer_failed(self, job: JobRecord, answer: TrainerFailed, now_s: float) -> None:
        """What the store lost is made again by the job that made it, so often; this one waits for it. Anything else ends the job."""
        maker = self._maker(job, LOST_OUTPUTS.get(answer.error_class))
        is_there = maker is not None and maker.phase is JobPhase.SUCCEEDED
        if maker is None or (is_there and maker.redone >= REDONE_MAX) or (not is_there and maker.phase.is_final):
            self._fail(job, answer.error_class, answer.error, now_s)
            return
        if is_there:
            self._redo(maker, answer, now_s)
            maker.polled_s = job.polled_s
        self.trainer.vacate()
        if self._trains(job):
            job.move(JobEvent.DATA_LOST, now_s)
            self._touch(job)
            self._tell_reserved(ResumeNode())

    def _redo(self, maker: JobRecord, answer: TrainerFailed, now_s: float) -> None:
        """A job that had succeeded goes on with what was lost of it."""
        maker.redone += 1
        if maker.job.op is Op.TRAIN_STEP:
            maker.move(JobEvent.STATE_LOST, now_s)
        else:
            maker.move(JobEvent.SAMPLES_LOST, now_s)
            self.queue.draw_again(answer.lost, now_s, answer.error)
            self.queue.update(maker.job_id, ready=True, everywhere=maker.released)
        self._touch(maker)

    def _maker(self, job: JobRecord, op: Op | None) -> JobRecord | None:
        """The job of this kind whose output `job` reads, if control still knows it."""
        return next((maker for maker in self.jobs.values() if maker.job.op is op and makes(maker, job)), None)

    def _lacks_input(self, job: JobRecord) -> bool:
        """Whether what the store lost of its inputs is being made again."""
        return any(self._asks_again(job, maker) for maker in self.open_jobs.values())

    @staticmethod
    def _asks_again(job: JobRecord, maker: JobRecord) -> bool:
        """Whether `job` waits for what `maker` makes again: nodes have no need of the trainer's state while its policy is there."""
        reads_all = job.job.op is Op.TRAIN_STEP or bool(job.to_publish.key)
        return bool(maker.redone) and reads_all and makes(maker, job)

    def _heard(self, message: TrainerHello | TrainerHeartbeat, now_s: float) -> None:
        """What the trainer says that it is at, beside what it should be."""
        seat = self.trainer
        is_late = isinstance(message, TrainerHello) or now_s - seat.ordered_s > TRAINER_ANSWER_S
        if seat.job_id is not None and message.job_id is None and is_late:
            self._reorder(self.jobs[seat.job_id], now_s)
        elif seat.job_id is None and message.job_id is not None:
            self._adopt(message.job_id, now_s)
        elif message.job_id not in (None, seat.job_id):
            self._out.append(SendToTrainer(StopTraining(job_id=message.job_id)))
        if isinstance(message, TrainerHeartbeat) and message.job_id in self.jobs:
            self.jobs[message.job_id].book(message.done, message.total, message.message, now_s)

    def _adopt(self, job_id: JobId, now_s: float) -> None:
        """A trainer came back (or control did) at work on a job: it goes on if the job still wants it, else it stops."""
        job = self.jobs.get(job_id)
        if job is not None and job.phase in (JobPhase.RUNNING, JobPhase.ENCODING):
            self.trainer.adopt(job_id, now_s)
        else:
            self._out.append(SendToTrainer(StopTraining(job_id=job_id)))

    def _reorder(self, job: JobRecord, now_s: float) -> None:
        """The trainer forgot its order (it restarted, or the answer was lost): order again, a bounded number of times."""
        if job.phase.is_final:
            self.trainer.vacate()
            return
        job.restarts += 1
        if job.restarts > TRAINER_RESTARTS_MAX:
            self.trainer.vacate()
            self._fail(job, "JobFailedError", f"the trainer ended {job.restarts} times at this job", now_s)
        else:
            self._order(job, now_s)

    def _finish_training(self, job: JobRecord, message: TrainingFinished, now_s: float) -> None:
        job.move(JobEvent.TRAINED, now_s)
        job.result = JobResult(
            op=job.job.op,
            policy=message.policy,
            usage=self._usage(job),
            metrics=dict(message.metrics),
            average=message.average,
        )
        job.reward_tail_s = self._reward_tail_s(job.job)
        if not job.redone:
            self._learn_train_time(job)
        self._close(job, now_s)

    def _learn_train_time(self, job: JobRecord) -> None:
        """The job wrote the new weights too. The same after a restart of control: by then more explorations may have ended."""
        calibrated_s = job.settings().config.exploration.calibrated_train_s
        times = self.train_times.get(job.job.run_id, TrainTimeEstimate(calibrated_s))
        train_s = job.finished_s - job.started_s
        self.train_times[job.job.run_id] = times.observe(train_s, reward_tail_s=job.reward_tail_s)

    def _reward_tail_s(self, trained: JobSpec) -> float:
        """From the last denoised to the last scored sample of the newest exploration that ended by this iteration; 0 where none did.

        The training's own exploration may be over already, else the one before says how long scores take to come.
        """
        tails = {
            job.job.iteration: job.result.metrics["reward_tail_s"]
            for job in self.jobs.values()
            if job.job.op is Op.EXPLORE and job.job.run_id == trained.run_id and job.result and job.plan.sequences
        }
        return max(((i, tail) for i, tail in tails.items() if i <= trained.iteration), default=(0, 0.0))[1]

    def _order(self, job: JobRecord, now_s: float) -> None:
        number = self.trainer.order(job.job_id, now_s)
        if job.job.op is Op.TRAIN_STEP:
            self._out.append(SendToTrainer(StartTraining(job=job.job, order=number)))
        else:
            encode = EncodePrompts(job_id=job.job_id, prompts=job.to_encode, policy=job.to_publish, order=number)
            self._out.append(SendToTrainer(encode))

    @staticmethod
    def _trains(job: JobRecord) -> bool:
        return job.job.op is Op.TRAIN_STEP and job.phase is JobPhase.RUNNING

    def _is_training(self) -> bool:
        return any(j.phase is JobPhase.RUNNING for j in self.open_jobs.values() if j.job.op is Op.TRAIN_STEP)

    # ---- what holds now ----

    def _advance(self, now_s: float) -> None:
        for job in list(self.open_jobs.values()):
            if job.phase is JobPhase.RUNNING and job.job.op is not Op.TRAIN_STEP:
                self._close_if_final(job, now_s)
        self._advance_trainer(now_s)
        if self._supply is not None and not self.queue.may_grant:
            return
        supply = self._supply = self._supply or self._count_supply()
        for grant in self.queue.grants(supply.pools, slots=supply.slots, spot_slots=supply.spot_slots, now_s=now_s):
            self._grant(grant)

    def _count_supply(self) -> Supply:
        """Stays as it is until a node or a job changes."""
        pools = self.instances.pools()
        if self._is_training():
            pools = {node_id: pool for node_id, pool in pools.items() if pool is not Pool.RESERVED}
        return Supply(pools, self.instances.slots, self.instances.spot_slots)

    def _close_if_final(self, job: JobRecord, now_s: float) -> None:
        if self.queue.claims[job.job_id].unfinished == 0:
            job.move(JobEvent.ALL_FINAL, now_s)
            self._write_manifest(job, now_s)
            self._touch(job)

    def _advance_trainer(self, now_s: float) -> None:
        seat = self.trainer
        ended = self.jobs[seat.job_id] if seat.job_id is not None else None
        if ended is not None and ended.phase.is_final:
            seat.vacate()
        if not seat.is_free:
            return
        waiting = [job for job in self.open_jobs.values() if self._wants_trainer(job) and self._may_train(job, now_s)]
        if waiting:
            job = min(waiting, key=lambda job: (job.job.op is Op.TRAIN_STEP, not self._trains(job), job.sequence))
            if job.phase is JobPhase.ADMITTING:
                job.move(JobEvent.STARTED, now_s)
                job.turn = 1 + max(other.turn for other in self.jobs.values())
                self.training_run = job.job.run_id
                self._touch(job)
                self.pauses += 1
                self.parked.clear()
                self._tell_reserved(PauseNode(number=self.pauses))
            if job.job.op is not Op.TRAIN_STEP or self._has_reserved_to_itself(job, now_s):
                self._order(job, now_s)

    def _may_train(self, job: JobRecord, now_s: float) -> bool:
        """A training that has begun goes on, paused or not: nobody else's may begin before it has ended."""
        held_up = self._waits_for_run(job) or self._is_paused(job, now_s) or self._lacks_input(job)
        return self._trains(job) or not held_up

    def _waits_for_run(self, job: JobRecord) -> bool:
        """Whether another run has the trainer, so that this training does not begin. Encoding takes a moment, and goes in between."""
        return job.job.op is Op.TRAIN_STEP and self.training_run not in (None, job.job.run_id)

    def _find_training_run(self, now_s: float) -> RunId | None:
        """The run whose training began last: until its last iteration is trained, one of its jobs is cancelled, or its lease has lapsed."""
        last = max((job for job in self.jobs.values() if job.turn), key=lambda job: job.turn, default=None)
        if last is None:
            return None
        if self._trains(last):
            return last.job.run_id
        jobs = [job for job in self.jobs.values() if job.job.run_id == last.job.run_id]
        is_over = last.phase is JobPhase.SUCCEEDED and last.job.iteration + 1 >= last.settings().iterations
        is_cancelled = any(job.phase is JobPhase.CANCELLED for job in jobs)
        has_lapsed = now_s - max(job.polled_s for job in jobs) > self.cluster.run_lease_s
        return None if is_over or is_cancelled or has_lapsed else last.job.run_id

    def _has_reserved_to_itself(self, job: JobRecord, now_s: float) -> bool:
        """Whether no reserved worker is still at work: they share the GPUs with the trainer. A worker that hangs is killed by its node, so
        after that deadline and a lease training begins whatever the nodes say.
        """
        reserved = {node_id for node_id, pool in self.instances.pools().items() if pool is Pool.RESERVED}
        patience_s = self.cluster.step_deadline_s + self.cluster.lease_s
        return reserved <= self.parked or now_s - job.started_s > patience_s

    @staticmethod
    def _wants_trainer(job: JobRecord) -> bool:
        if job.job.op is Op.TRAIN_STEP:
            return job.phase in (JobPhase.ADMITTING, JobPhase.RUNNING)
        return job.phase is JobPhase.ENCODING

    def _tell_reserved(self, message: PauseNode | ResumeNode | EndTrainer) -> None:
        pools = self.instances.pools().items()
        self._out += [SendToNode(node_id, message) for node_id, pool in pools if pool is Pool.RESERVED]

    def _time_passed(self, now_s: float) -> None:
        self._supply = None
        self._facts(self.instances.handle(NodeTimePassed(), now_s), now_s)
        self.queue.expire(now_s)
        self.training_run = self._find_training_run(now_s)
        seat = self.trainer
        if seat.trainer_id and now_s - seat.seen_s > self.cluster.lease_s:
            seat.trainer_id = ""
        self._end_silent_trainer(now_s)
        for job in list(self.open_jobs.values()):
            if now_s - job.held.at_s >= MARK_EVERY_S:
                job.held = self._mark(now_s)
                self._touch(job)
            self._check_patience(job, now_s)
        self._forget_old_jobs()

    def _excuse_silence(self, now_s: float) -> None:
        """Nodes, trainer and clients have a lease's time from now on to be heard."""
        self.instances.handle(NodesExcused(), now_s)
        self.queue.renew_all(now_s)
        self.trainer.seen_s = now_s
        for job in self.jobs.values():
            job.polled_s = now_s

    def _end_silent_trainer(self, now_s: float) -> None:
        """A process that hangs keeps its connection and its GPUs: only its node can end it. Said again after the same time."""
        seat = self.trainer
        wanted = any(self._wants_trainer(job) for job in self.open_jobs.values())
        if not wanted:
            seat.patient_since_s = now_s
        elif seat.is_silent(now_s, self.cluster.trainer_deadline_s):
            seat.patient_since_s = now_s
            self._tell_reserved(EndTrainer())

    def _check_patience(self, job: JobRecord, now_s: float) -> None:
        """Nobody polls: paused, later cancelled. Nothing moves, no training that it may wait for either: failed."""
        silence_s = now_s - job.polled_s
        self.queue.pause(job.job_id, self._is_paused(job, now_s))
        if silence_s > self.cluster.poll_deadline_s:
            self._cancel(job.job_id, f"nobody polled for {silence_s:.0f} s", now_s)
            job.error_class, job.error = "SilenceError", job.message
            return
        if self._is_queued(job):
            job.moved_s = now_s
            return
        claim = self.queue.claims.get(job.job_id)
        training_s = max((j.moved_s for j in self.open_jobs.values() if self._trains(j)), default=0.0)
        stalled_s = now_s - max(job.moved_s, claim.moved_s if claim else 0.0, training_s)
        if stalled_s > self.cluster.stall_deadline_s:
            self._fail(job, "JobFailedError", f"no progress for {stalled_s:.0f} s in phase {job.phase}", now_s)

    def _is_queued(self, job: JobRecord) -> bool:
        """Whether it waits for lost inputs or for the trainer's work for others, or lies beside a training of its run that waits for
        another run.
        """
        if self._lacks_input(job) or (self._wants_trainer(job) and self.trainer.job_id not in (None, job.job_id)):
            return True
        return any(self._wants_trainer(j) and self._waits_for_run(j) for j in self._open_jobs_of(job.job.run_id))

    def _is_paused(self, job: JobRecord, now_s: float) -> bool:
        """Whether the lease of its run has lapsed, which a poll of any of the run's jobs renews."""
        return now_s - job.polled_s > self.cluster.run_lease_s

    def _waits_for(self, job: JobRecord, now_s: float) -> str:
        """What holds an open job up; "" where nothing does."""
        if job.phase.is_final:
            return ""
        if self._is_paused(job, now_s):
            return f"paused: nobody polled for {now_s - job.polled_s:.0f} s"
        if self._lacks_input(job):
            return "waits for what the store lost of its inputs: it is made again"
        if job.redone:
            return "makes again what the store lost of it"
        if not self._wants_trainer(job) or self.trainer.job_id == job.job_id:
            return ""
        holder = self.jobs.get(self.trainer.job_id) if self.trainer.job_id else None
        if self._waits_for_run(job) and (holder is None or holder.job.run_id != self.training_run):
            return f"waits for run {self.training_run}, which has the trainer until its last iteration is trained"
        if holder is not None:
            return f"waits for the trainer, which is at {holder.job_id} of run {holder.job.run_id}"
        return "" if self.trainer.trainer_id else "waits for a trainer: none is here"

    def _forget_old_jobs(self) -> None:
        final = [job for job in self.jobs.values() if job.phase.is_final and job.job_id != self.trainer.job_id]
        for job in final[: max(0, len(final) - FINISHED_JOBS_MAX)]:
            self.queue.forget(job.job_id)
            del self.jobs[job.job_id]
            self.forgotten.append(job.job_id)

    # ---- what a client reads ----

    def job_status(self, job_id: JobId, now_s: float) -> JobStatus:
        """Raises InputError for a job that was never submitted."""
        job = self.jobs.get(job_id)
        if job is None:
            raise InputError(f"job = {job_id!r}: control knows no such job")
        shown = status(job, self.queue.claims.get(job_id), spot_slots=self.instances.spot_slots, now_s=now_s)
        return msgspec.structs.replace(shown, message=self._waits_for(job, now_s) or shown.message)

    def cluster_status(self, now_s: float) -> ClusterStatus:
        return ClusterStatus(
            nodes=self.instances.statuses({n: len(held) for n, held in self.queue.held.items()}),
            jobs=tuple(self.job_status(job_id, now_s) for job_id in self.open_jobs),
            trainer=self.trainer.job_id or ("idle" if self.trainer.trainer_id else "absent"),
            reward_url=self.reward_url,
            failures=tuple(failure(record) for record in self._given_up()[-FAILURES_SHOWN_MAX:]),
        )

    def _given_up(self) -> list[RequestRecord]:
        """Oldest first."""
        jobs = [job_id for job_id, claim in self.queue.claims.items() if claim.tally[RequestState.FAILED]]
        records = [record for job_id in jobs for record in self.queue.of_job(job_id)]
        return [record for record in records if record.state is RequestState.FAILED]
