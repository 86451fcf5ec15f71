"""What the node's core asks of its shell. Imperatives; the shell carries them out in order and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from spot_runtime.messages import Assignment, DecodeSamples, DenoiseStep, FromNode
from spot_runtime.types import PolicyRef, RequestId, WorkerId


@dataclass(frozen=True)
class SendToControl:
    message: FromNode


@dataclass(frozen=True)
class SendToWorker:
    worker_id: WorkerId
    message: DenoiseStep | DecodeSamples


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
    """It did not answer in time; its death is reported like any other."""

    worker_id: WorkerId


@dataclass(frozen=True)
class StartWorker:
    """Start a fresh process under this id."""

    worker_id: WorkerId
    delay_s: float = 0.0


@dataclass(frozen=True)
class FailNode:
    """This worker cannot start: end the node with the error that it ended with."""

    worker_id: WorkerId


@dataclass(frozen=True)
class EndNode:
    """All is drained."""


Command = (
    SendToControl
    | SendToWorker
    | BindPolicy
    | AdmitTo
    | FetchInputs
    | StoreSample
    | StoreProgress
    | Judge
    | Forget
    | KillWorker
    | StartWorker
    | FailNode
    | EndNode
)
