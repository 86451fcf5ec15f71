"""What the node's core asks of its shell. Imperatives; the shell carries them out in order and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from spot_runtime.messages import Assignment, DecodeSamples, DenoiseStep, FromNode, SleepWorker, WakeWorker
from spot_runtime.types import PolicyRef, RequestId, WorkerId


@dataclass(frozen=True)
class SendToControl:
    message: FromNode


@dataclass(frozen=True)
class SendToWorker:
    worker_id: WorkerId
    message: DenoiseStep | DecodeSamples | SleepWorker | WakeWorker


@dataclass(frozen=True)
class BindPolicy:
    """Send LoadPolicy with the file that holds this policy."""

    worker_id: WorkerId
    policy: PolicyRef


@dataclass(frozen=True)
class AdmitTo:
    """Send AdmitRequest with the request's embedding."""

    worker_id: WorkerId
    slot: int
    request_id: RequestId
    denoising_step: int


@dataclass(frozen=True)
class DismissFrom:
    """Send DismissRequest: what this worker holds of the request in `slot` is of no use any more."""

    worker_id: WorkerId
    slot: int


@dataclass(frozen=True)
class FetchInputs:
    """Get embedding, policy and committed latents; answer with InputsFetched or AttemptFailed."""

    slot: int
    assignment: Assignment


@dataclass(frozen=True)
class StoreSample:
    """Commit a finished sample from its arena slot (rollouts), its image (evaluation), or nothing; answer with SampleStored."""

    request_id: RequestId
    slot: int


@dataclass(frozen=True)
class StoreProgress:
    """Commit in-flight latents from the arena; answer with ProgressStored."""

    request_id: RequestId
    slot: int
    denoising_step: int


@dataclass(frozen=True)
class Judge:
    """Post these images to the reward service; answer with SampleJudged or AttemptFailed for each."""

    request_ids: tuple[RequestId, ...]


@dataclass(frozen=True)
class Forget:
    """The request is no longer this node's: drop its cached embedding and image."""

    request_id: RequestId


@dataclass(frozen=True)
class KillWorker:
    """It did not answer in time, or must not serve; its death is reported like any other."""

    worker_id: WorkerId


@dataclass(frozen=True)
class StartWorker:
    """Start a process under this id, which no other has had; it waits as a standby until it is seeded."""

    worker_id: WorkerId
    delay_s: float = 0.0


@dataclass(frozen=True)
class SeedWorker:
    """Send LoadWeights: this standby serves `slot` from now on. `digest` is what its weights must have, "" while nobody knows."""

    worker_id: WorkerId
    seq: int
    slot: int
    from_peer: bool
    digest: str


@dataclass(frozen=True)
class ReleaseWorker:
    """Tell it to end: its slot is going, or it is one standby too many."""

    worker_id: WorkerId


@dataclass(frozen=True)
class FormGroup:
    """Send JoinGroup to each of `ranks`, in this order, with a rendezvous that was never used before."""

    seq: int
    generation: int
    ranks: tuple[WorkerId, ...]


@dataclass(frozen=True)
class FailNode:
    """No worker can start: end the node with this error, or with what the process said as it ended."""

    worker_id: WorkerId
    error_class: str = ""
    error: str = ""


@dataclass(frozen=True)
class EndNode:
    """All is drained."""


Command = (
    SendToControl
    | SendToWorker
    | BindPolicy
    | AdmitTo
    | DismissFrom
    | FetchInputs
    | StoreSample
    | StoreProgress
    | Judge
    | Forget
    | KillWorker
    | StartWorker
    | SeedWorker
    | ReleaseWorker
    | FormGroup
    | FailNode
    | EndNode
)
