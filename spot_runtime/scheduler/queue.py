"""The request queue: leases and what nodes report of them. Owns which request a group gets; never knows what a job is beyond its `Claim`.

A group that is free asks (paper §4.5); a pull that finds no work waits in `pulls` until there is some. Leases are renewed by the heartbeats
of the node that holds them. A late or foreign message names a lease that is no longer the request's own and changes nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from spot_runtime.errors import (
    CorruptObjectError,
    LostEmbeddingError,
    LostPolicyError,
    MissingObjectError,
    PolicyMismatchError,
)
from spot_runtime.messages import (
    Assignment,
    GenerationRequest,
    HeldLease,
    PullWork,
    RequestCommitted,
    RequestFailed,
    RequestReturned,
    ResumePoint,
    SampleDone,
    SampleScored,
    SamplingParams,
)
from spot_runtime.scheduler.claim import Claim
from spot_runtime.scheduler.pulls import Grant, ParkedPulls
from spot_runtime.scheduler.requests import FINAL_STATES, LEASED_STATES, RequestEvent, RequestRecord, taken_over
from spot_runtime.types import JobId, LeaseId, NodeId, PolicyRef, Pool, RequestId, RequestState, SampleRecord

LOSSES_PER_ATTEMPT = 20
"""A request may lose its node far more often than it may fail: neither preemption nor a store that
loses what it acknowledged is its fault. The bound ends a request that kills nodes."""
UNTRUSTED_COMMIT = frozenset(error.__name__ for error in (MissingObjectError, CorruptObjectError, PolicyMismatchError))
"""Errors after which a request that was to go on from a commit starts over, at no cost of attempts: the commit is gone, damaged, or of
another policy or schedule."""

LOST_EMBEDDING, LOST_POLICY = LostEmbeddingError.__name__, LostPolicyError.__name__
"""Errors of a request whose embedding or policy the store has no more: at no cost of attempts either."""

NOTHING_MADE: Mapping[RequestId, SampleRecord] = {}


Kind = tuple[SamplingParams, PolicyRef]
"""What all requests of one batch have in common."""


class RequestQueue:
    """All requests that are not forgotten.

    `records`: by id. `held`: leases by node; exactly the records in IN_FLIGHT or DONE. `dirty`: records that changed since the shell last
    journalled. `leases_lost` counts leases that ended with their node, by expiry or with a commit that was lost, since this process began.
    `_heaps`: what is pending by job and kind, the oldest first, beside some that is not any more. `_unmatched`: pulls or work came since
    `grants` last found nothing more to give.
    """

    def __init__(self, *, lease_s: float, failures_max: int) -> None:
        self.lease_s = lease_s
        self.failures_max = failures_max
        self.records: dict[RequestId, RequestRecord] = {}
        self.claims: dict[JobId, Claim] = {}
        self.held: dict[NodeId, set[RequestId]] = {}
        self.pulls = ParkedPulls()
        self.dirty: set[RequestId] = set()
        self.leases_lost = 0
        self._waiting: dict[JobId, Claim] = {}
        self._heaps: dict[JobId, dict[Kind, list[tuple[int, RequestId]]]] = {}
        self._by_job: dict[JobId, dict[RequestId, RequestRecord]] = {}
        self._next_number = 1
        self._unmatched = False

    # ---- jobs ----

    def add(
        self,
        claim: Claim,
        requests: Iterable[GenerationRequest],
        now_s: float,
        made: Mapping[RequestId, SampleRecord] = NOTHING_MADE,
    ) -> None:
        """Takes in a job's requests. Those already known keep their state, except that what had failed or was cancelled starts over.

        What another job has `made` already is scored from the start.
        """
        self.claims[claim.job_id] = claim
        self._waiting.pop(claim.job_id, None)
        for record in self.of_job(claim.job_id):
            self._count(record)
        for request in requests:
            known = self.records.get(request.request_id)
            if known is None:
                sample = made.get(request.request_id)
                self.restore(taken_over(request, sample) if sample else RequestRecord(request=request))
                self.dirty.add(request.request_id)
            elif known.state in (RequestState.FAILED, RequestState.ABORTED):
                self._revive(known, now_s)

    def restore(self, record: RequestRecord) -> None:
        """Puts a record in place as it is, from `add` or from the journal in the order of numbers; its claim must exist."""
        request_id = record.request_id
        record.number = record.number or self._next_number
        self._next_number = max(self._next_number, record.number + 1)
        self.records[request_id] = record
        self._by_job.setdefault(record.request.job_id, {})[request_id] = record
        self._count(record)
        if record.state in LEASED_STATES:
            assert record.node_id is not None
            self.held.setdefault(record.node_id, set()).add(request_id)
            self.pulls.book(record.node_id, record.group_id, record.pull, request_id)
        if record.state is RequestState.PENDING:
            self._enqueue(record)

    def update(self, job_id: JobId, *, ready: bool, everywhere: bool) -> None:
        """What changed for a job's requests as a whole."""
        claim = self.claims[job_id]
        claim.ready, claim.everywhere = ready, everywhere
        self._unmatched = True

    def pause(self, job_id: JobId, paused: bool) -> None:
        claim = self.claims.get(job_id)
        if claim is not None and claim.paused != paused:
            claim.paused = paused
            self._unmatched = True

    def change_policy(self, job_id: JobId, policy: PolicyRef) -> None:
        """Samples of the job that have yet to begin are drawn with this policy."""
        self.claims[job_id].policy = policy
        self._heaps.pop(job_id, None)
        for record in self.of_job(job_id):
            if record.state is RequestState.PENDING:
                self._enqueue(record)

    def cancel(
        self, job_id: JobId, now_s: float, *, keep: frozenset[RequestState] = frozenset()
    ) -> list[tuple[NodeId, RequestId]]:
        """Aborts what is neither final nor in `keep`; returns what nodes must drop."""
        self._heaps.pop(job_id, None)
        return self._abort((r for r in self.of_job(job_id) if r.state not in keep), now_s)

    def close(self, job_id: JobId, now_s: float) -> list[tuple[NodeId, RequestId]]:
        """Aborts what is not denoised, and from now on what comes back before it is scored; returns what nodes must drop."""
        self.claims[job_id].closed = True
        return self.cancel(job_id, now_s, keep=frozenset({RequestState.DONE}))

    def cancel_filling(self, job_id: JobId, now_s: float) -> list[tuple[NodeId, RequestId]]:
        """Aborts what only fills the window and is not final; returns what nodes must drop."""
        return self._abort((r for r in self.of_job(job_id) if r.request.fills_window), now_s)

    def _abort(self, records: Iterable[RequestRecord], now_s: float) -> list[tuple[NodeId, RequestId]]:
        dropped = []
        for record in records:
            if record.is_final:
                continue
            if record.state in LEASED_STATES and record.node_id is not None:
                dropped.append((record.node_id, record.request_id))
            self._move(record, RequestEvent.CANCELLED, now_s)
        return dropped

    def forget(self, job_id: JobId) -> None:
        """Drops a finished job's requests from memory."""
        for record in self.of_job(job_id):
            assert record.is_final, record.state
            self._drop(record)
        self.claims.pop(job_id, None)
        self._heaps.pop(job_id, None)
        self._waiting.pop(job_id, None)
        self._by_job.pop(job_id, None)

    def of_job(self, job_id: JobId) -> list[RequestRecord]:
        return list(self._by_job.get(job_id, {}).values())

    def draw_again(self, request_ids: Iterable[RequestId], now_s: float, note: str) -> None:
        """Scored requests whose samples are gone start over, from the first step."""
        lost = [
            self.records[i] for i in request_ids if i in self.records and self.records[i].state is RequestState.SCORED
        ]
        for record in lost:
            self.claims[record.request.job_id].reward_sum -= record.reward
            record.resume = None
            self._lose(record, now_s, note)

    def _revive(self, record: RequestRecord, now_s: float) -> None:
        """Starts over under the next lease id, so that nothing said of an old lease can concern it."""
        record.failures = record.losses = 0
        record.resume, record.reason = None, ""
        self._move(record, RequestEvent.REVIVED, now_s)
        self._enqueue(record)

    def _drop(self, record: RequestRecord) -> None:
        request_id = record.request_id
        del self.records[request_id], self._by_job[record.request.job_id][request_id]
        self.dirty.discard(request_id)

    # ---- pulls ----

    def pull(self, pull: PullWork) -> Grant | None:
        """Takes a group's pull in; `grants` answers it. Returns the answer that it had already, if it was only said again."""
        held = self._held_under(pull)
        if held:
            open_yet = tuple(_assignment(r) for r in held if r.state is RequestState.IN_FLIGHT)
            return Grant(pull.node_id, pull.group_id, open_yet, pull.number) if open_yet else None
        self._unmatched |= self.pulls.take(pull)
        return None

    def _held_under(self, pull: PullWork) -> list[RequestRecord]:
        known = [record for request_id in self.pulls.given(pull) if (record := self.records.get(request_id))]
        mine = (pull.node_id, pull.group_id, pull.number)
        return [r for r in known if r.state in LEASED_STATES and (r.node_id, r.group_id, r.pull) == mine]

    @property
    def may_grant(self) -> bool:
        """Whether `grants` is worth a call under the same supply: a pull or work came since the last."""
        return self._unmatched and bool(self.pulls.parked) and bool(self._waiting)

    def grants(self, pools: Mapping[NodeId, Pool], *, slots: int, spot_slots: int, now_s: float) -> list[Grant]:
        """Answers parked pulls of the nodes in `pools`, oldest first, as far as there is work that their pool may take.

        No pull gets more than the share that its slots are of all `slots` that may come, so that a slow group does not sit on the tail.
        """
        self._unmatched = False
        granted: list[Grant] = []
        best: dict[tuple[Pool, int, int], Claim | None] = {}
        for pull in list(self.pulls.parked.values()):
            if not self._waiting:
                break
            if (pool := pools.get(pull.node_id)) is None:
                continue
            what = (pool, pull.height, pull.width)
            if what not in best:
                best[what] = self._best_claim(pool, pull, spot_slots)
            if (claim := best[what]) is None:
                continue
            takers = slots if claim.open_to_reserved(spot_slots) else spot_slots
            share = -(-claim.pending * pull.sequence_parallel_degree // max(1, takers))
            records = self._take(claim, pull, min(pull.room, share))
            if not records:
                continue
            self.pulls.answered(pull)
            for record in records:
                self._lease(record, pull, pool, now_s)
            assignments = tuple(_assignment(record) for record in records)
            granted.append(Grant(pull.node_id, pull.group_id, assignments, pull.number))
            if not claim.pending:
                best.clear()
        return granted

    def _best_claim(self, pool: Pool, pull: PullWork, spot_slots: int) -> Claim | None:
        allowed = (c for c in self._waiting.values() if pool is Pool.SPOT or c.open_to_reserved(spot_slots))
        return min((claim for claim in allowed if claim.fits(pull)), key=lambda claim: claim.rank, default=None)

    def _take(self, claim: Claim, pull: PullWork, room: int) -> list[RequestRecord]:
        """Up to `room` pending requests of one claim that one batch can hold: same policy and sampling parameters. Those whose policy the
        group keeps bound go first, then the oldest.
        """
        kinds = self._heaps.get(claim.job_id, {})
        for kind in list(kinds):
            if self._oldest(kinds[kind], kind) is None:
                del kinds[kind]
        if not kinds:
            return []
        kind = min(kinds, key=lambda kind: (kind[1] not in pull.policies, kinds[kind][0]))
        taken: list[RequestRecord] = []
        while len(taken) < room and (record := self._oldest(kinds[kind], kind)) is not None:
            heapq.heappop(kinds[kind])
            taken.append(record)
        return taken

    def _oldest(self, heap: list[tuple[int, RequestId]], kind: Kind) -> RequestRecord | None:
        """The head of a heap, after what is not pending any more, or of another kind by now, was dropped from it."""
        while heap:
            record = self.records.get(heap[0][1])
            if record is not None and record.state is RequestState.PENDING and self._kind(record) == kind:
                return record
            heapq.heappop(heap)
        return None

    def _kind(self, record: RequestRecord) -> Kind:
        return record.request.params, self._new_policy(record) or record.request.policy

    def _new_policy(self, record: RequestRecord) -> PolicyRef | None:
        """What the request is drawn with instead of what it says; what has begun goes on as it began."""
        return self.claims[record.request.job_id].policy if record.resume is None else None

    def _lease(self, record: RequestRecord, pull: PullWork, pool: Pool, now_s: float) -> None:
        record.attempts += 1
        if (policy := self._new_policy(record)) is not None:
            record.change_policy(policy)
        self._move(record, RequestEvent.LEASED, now_s, pull.node_id)
        record.lease_id = LeaseId(f"{record.request_id}.{record.attempts}")
        record.node_id, record.group_id, record.pull, record.pool = pull.node_id, pull.group_id, pull.number, pool
        record.leased_at_s = record.renewed_at_s = now_s
        self.held.setdefault(pull.node_id, set()).add(record.request_id)
        self.pulls.book(pull.node_id, pull.group_id, pull.number, record.request_id)

    # ---- what nodes report ----

    def finished(self, message: SampleDone, now_s: float) -> None:
        """The first complete result of the present lease wins; any other is dropped."""
        record = self.leased(message.request_id, message.lease_id)
        if record is None or record.state is not RequestState.IN_FLIGHT:
            return
        if message.policy != record.request.policy:
            self._error(record, now_s, f"PolicyMismatchError: ran {message.policy}, asked {record.request.policy}")
            return
        self._move(record, RequestEvent.FINISHED, now_s)
        record.sample_key, record.sample_digest = message.sample_key, message.sample_digest
        record.image_key, record.policy = message.image_key, message.policy
        record.started_s, record.finished_s = message.started_s, message.finished_s
        record.effective_steps, record.made_busy_s = message.effective_steps, message.busy_s
        self._book_busy(record, message.busy_s)
        if message.sample_key:
            record.resume = ResumePoint(denoising_step=record.request.params.num_steps, commit_key=message.sample_key)

    def scored(self, message: SampleScored, now_s: float) -> None:
        record = self.leased(message.request_id, message.lease_id)
        if record is None or record.state is not RequestState.DONE:
            return
        self._move(record, RequestEvent.SCORED, now_s)
        record.scored_s = now_s
        self.claims[record.request.job_id].reward_sum += message.reward
        record.reward, record.correct, record.reason = message.reward, message.correct, message.reason

    def committed(self, message: RequestCommitted) -> None:
        """A request that goes on can be resumed from a later step than was known."""
        record = self.leased(message.request_id, message.lease_id)
        if record is None or record.state is not RequestState.IN_FLIGHT or not message.commit_key:
            return
        if record.resume is None or record.resume.denoising_step < message.denoising_step:
            record.resume = ResumePoint(denoising_step=message.denoising_step, commit_key=message.commit_key)
            self.dirty.add(record.request_id)

    def returned(self, message: RequestReturned, now_s: float) -> None:
        record = self.leased(message.request_id, message.lease_id)
        if record is None:
            return
        self._book_busy(record, message.busy_s)
        if message.commit_key:
            record.resume = ResumePoint(denoising_step=message.denoising_step, commit_key=message.commit_key)
        self._move(record, RequestEvent.RETURNED, now_s, message.reason)
        self._requeue_or_fail(record, now_s)

    def failed(self, message: RequestFailed, now_s: float) -> None:
        record = self.leased(message.request_id, message.lease_id)
        if record is None:
            return
        self._book_busy(record, message.busy_s)
        note = f"{message.error_class}: {message.error}"
        if message.error_class in UNTRUSTED_COMMIT and record.resume is not None:
            record.resume, record.reason = None, note
            self._lose(record, now_s, note)
        elif message.error_class in (LOST_EMBEDDING, LOST_POLICY):
            record.reason = note
            self._lose(record, now_s, note)
        else:
            self._error(record, now_s, note)

    @staticmethod
    def _book_busy(record: RequestRecord, busy_s: float) -> None:
        record.busy_s += busy_s
        record.spot_busy_s += busy_s if record.pool is Pool.SPOT else 0.0

    def renew(self, node_id: NodeId, held: Iterable[HeldLease], now_s: float) -> list[RequestId]:
        """Renews the leases that a node lists; returns the requests that it holds without a valid lease and must drop."""
        strangers = []
        for lease in held:
            record = self.leased(lease.request_id, lease.lease_id)
            if record is None or record.node_id != node_id:
                strangers.append(lease.request_id)
            else:
                record.renewed_at_s = now_s
        return strangers

    def renew_all(self, now_s: float) -> None:
        """Every lease runs from now on."""
        for node_id in self.held:
            for record in self._held_by(node_id):
                record.renewed_at_s = now_s

    def reclaim(self, node_id: NodeId, now_s: float, note: str, keep: frozenset[LeaseId] = frozenset()) -> None:
        """A node is gone, or came back with only `keep`: its other leases end, and its pulls."""
        for record in self._held_by(node_id):
            if record.lease_id not in keep:
                self._lose(record, now_s, note)
        self.pulls.withdraw(node_id)
        if not keep:
            self.pulls.forget_answers(node_id)

    def expire(self, now_s: float) -> None:
        """Ends leases that no heartbeat renewed for `lease_s`: the node lives but never got or has forgotten the request."""
        for node_id in list(self.held):
            for record in self._held_by(node_id):
                if now_s - record.renewed_at_s > self.lease_s:
                    self._lose(record, now_s, "lease expired")

    def _held_by(self, node_id: NodeId) -> list[RequestRecord]:
        """What a node holds, oldest first: sets have no order that a second run would repeat."""
        held = [self.records[request_id] for request_id in self.held.get(node_id, ())]
        return sorted(held, key=lambda record: record.number)

    # ---- transitions ----

    def leased(self, request_id: RequestId, lease_id: LeaseId) -> RequestRecord | None:
        """The request, if that is its present lease."""
        record = self.records.get(request_id)
        return record if record is not None and record.lease_id == lease_id else None

    def _lose(self, record: RequestRecord, now_s: float, note: str) -> None:
        record.losses += 1
        self.leases_lost += 1
        self._move(record, RequestEvent.LOST, now_s, note)
        self._requeue_or_fail(record, now_s)

    def _error(self, record: RequestRecord, now_s: float, note: str) -> None:
        record.failures += 1
        record.reason = note
        self._move(record, RequestEvent.ERRORED, now_s, note)
        self._requeue_or_fail(record, now_s)

    def _requeue_or_fail(self, record: RequestRecord, now_s: float) -> None:
        if record.failures >= self.failures_max or record.losses >= LOSSES_PER_ATTEMPT * self.failures_max:
            self._move(record, RequestEvent.EXHAUSTED, now_s)
        elif self.claims[record.request.job_id].closed:
            self._move(record, RequestEvent.CANCELLED, now_s)
        else:
            self._move(record, RequestEvent.REQUEUED, now_s)
            self._enqueue(record)

    def _move(self, record: RequestRecord, event: RequestEvent, now_s: float, note: str = "") -> None:
        before, node_id = record.state, record.node_id
        record.move(event, now_s, note)
        claim = self.claims[record.request.job_id]
        claim.moved_s = now_s
        claim.tally[before] -= 1
        claim.tally[record.state] += 1
        claim.unfinished += (before in FINAL_STATES) - (record.state in FINAL_STATES)
        self._note_waiting(claim)
        if before in LEASED_STATES and record.state not in LEASED_STATES and node_id is not None:
            self.held[node_id].discard(record.request_id)
            if not self.held[node_id]:
                del self.held[node_id]
        self.dirty.add(record.request_id)

    def _enqueue(self, record: RequestRecord) -> None:
        self._unmatched = True
        job_id = record.request.job_id
        heap = self._heaps.setdefault(job_id, {}).setdefault(self._kind(record), [])
        heapq.heappush(heap, (record.number, record.request_id))

    def _count(self, record: RequestRecord) -> None:
        """Adds a record to its claim as it is."""
        claim = self.claims[record.request.job_id]
        claim.tally[record.state] += 1
        claim.unfinished += record.state not in FINAL_STATES
        claim.size = (record.request.params.height, record.request.params.width)
        if record.state is RequestState.SCORED:
            claim.reward_sum += record.reward
        self._note_waiting(claim)

    def _note_waiting(self, claim: Claim) -> None:
        if claim.pending:
            self._waiting[claim.job_id] = claim
        else:
            self._waiting.pop(claim.job_id, None)


def _assignment(record: RequestRecord) -> Assignment:
    assert record.lease_id is not None, record.request_id
    return Assignment(lease_id=record.lease_id, request=record.request, resume=record.resume)
