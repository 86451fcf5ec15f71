"""One generation request: its states, its legal transitions and its record. Never decides who runs what.

Rules: a request is IN_FLIGHT or DONE under exactly one lease; every way back goes through RECOMPUTE, which keeps the last committed step;
SCORED is final unless the store loses the sample before it was trained on, FAILED and ABORTED unless their job is submitted again. Any pair
of state and event that is not in TRANSITIONS raises IllegalTransitionError.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from spot_runtime.messages import GenerationRequest, ResumePoint
from spot_runtime.types import LeaseId, NodeId, PolicyRef, Pool, RequestId, RequestState, SampleRecord

HISTORY_ENTRIES_MAX = 32


class RequestEvent(StrEnum):
    """What can happen to a request."""

    LEASED = "leased"
    FINISHED = "finished"
    SCORED = "scored"
    RETURNED = "returned"
    LOST = "lost"
    ERRORED = "errored"
    REQUEUED = "requeued"
    EXHAUSTED = "exhausted"
    CANCELLED = "cancelled"
    REVIVED = "revived"


S, E = RequestState, RequestEvent
TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (S.PENDING, E.LEASED): S.IN_FLIGHT,
    (S.PENDING, E.CANCELLED): S.ABORTED,
    (S.IN_FLIGHT, E.FINISHED): S.DONE,
    (S.IN_FLIGHT, E.RETURNED): S.RECOMPUTE,
    (S.IN_FLIGHT, E.LOST): S.RECOMPUTE,
    (S.IN_FLIGHT, E.ERRORED): S.RECOMPUTE,
    (S.IN_FLIGHT, E.CANCELLED): S.ABORTED,
    (S.DONE, E.SCORED): S.SCORED,
    (S.DONE, E.RETURNED): S.RECOMPUTE,
    (S.DONE, E.LOST): S.RECOMPUTE,
    (S.DONE, E.ERRORED): S.RECOMPUTE,
    (S.DONE, E.CANCELLED): S.ABORTED,
    (S.SCORED, E.LOST): S.RECOMPUTE,
    (S.RECOMPUTE, E.REQUEUED): S.PENDING,
    (S.RECOMPUTE, E.EXHAUSTED): S.FAILED,
    (S.RECOMPUTE, E.CANCELLED): S.ABORTED,
    (S.FAILED, E.REVIVED): S.PENDING,
    (S.ABORTED, E.REVIVED): S.PENDING,
}
FINAL_STATES = frozenset({S.SCORED, S.FAILED, S.ABORTED})
LEASED_STATES = frozenset({S.IN_FLIGHT, S.DONE})


class IllegalTransitionError(AssertionError):
    """A programmer error: this event cannot happen to a request in this state."""


class RequestProgress(msgspec.Struct, omit_defaults=True):
    """What changes about a request, and is written again when it moves. `failures` counts errors, `losses` leases that ended without one.

    Invariant: `lease_id` is set exactly in IN_FLIGHT and DONE.
    """

    state: RequestState = RequestState.PENDING
    lease_id: LeaseId | None = None
    node_id: NodeId | None = None
    pool: Pool = Pool.SPOT
    leased_at_s: float = 0.0
    renewed_at_s: float = 0.0
    group_id: str = ""
    pull: int = 0
    """Number of the pull that the lease answered."""
    attempts: int = 0
    failures: int = 0
    losses: int = 0
    resume: ResumePoint | None = None
    sample_key: str = ""
    sample_digest: str = ""
    image_key: str = ""
    policy: PolicyRef = PolicyRef()
    changed_policy: PolicyRef | None = None
    """What the request was told to be drawn with instead of what it was made with."""
    started_s: float = 0.0
    finished_s: float = 0.0
    scored_s: float = 0.0
    effective_steps: int = 0
    busy_s: float = 0.0
    """Slot-seconds that it took wherever it ran, as far as its nodes could tell; `spot_busy_s`: of that on spot; `made_busy_s`: of that
    under the lease that finished it, so between `started_s` and `finished_s`."""
    spot_busy_s: float = 0.0
    made_busy_s: float = 0.0
    reward: float = 0.0
    correct: bool = False
    reason: str = ""
    history: list[str] = msgspec.field(default_factory=list)


class RequestRecord(RequestProgress, kw_only=True, omit_defaults=True):
    """A request and all that is known of it. `number` grows with every request that a queue takes in, and orders them; 0: not yet taken."""

    request: GenerationRequest
    number: int = 0

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def is_final(self) -> bool:
        return self.state in FINAL_STATES

    def change_policy(self, policy: PolicyRef) -> None:
        """The request is drawn with another policy than it was made with."""
        self.request, self.changed_policy = msgspec.structs.replace(self.request, policy=policy), policy

    def move(self, event: RequestEvent, now_s: float, note: str = "") -> None:
        """Takes one transition and notes it in the bounded history."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalTransitionError(f"{self.request_id}: {event} cannot happen in state {self.state}")
        self.state = target
        if target not in LEASED_STATES:
            self.lease_id = None
        self.history.append(f"{now_s:.3f} {event} {note}".rstrip())
        del self.history[:-HISTORY_ENTRIES_MAX]


def taken_over(request: GenerationRequest, sample: SampleRecord) -> RequestRecord:
    """A request whose sample another job made: scored from the start, and at no cost of its own."""
    return RequestRecord(
        request=request,
        state=RequestState.SCORED,
        node_id=sample.node_id,
        pool=sample.pool,
        sample_key=sample.sample_key,
        sample_digest=sample.sample_digest,
        policy=sample.policy,
        started_s=sample.started_s,
        finished_s=sample.finished_s,
        effective_steps=sample.effective_steps,
        reward=sample.reward,
        correct=sample.correct,
        reason=sample.reason,
    )
