"""What the node's core handles beside wire messages: past facts that its shell reports. Commands are in commands.py."""

from __future__ import annotations

from dataclasses import dataclass

from spot_runtime.types import RequestId, WorkerId


@dataclass(frozen=True)
class WorkerDied:
    """A worker's process ended, whatever the reason."""

    worker_id: WorkerId


@dataclass(frozen=True)
class InputsFetched:
    """Embedding and policy are here, and the arena slot holds the committed latents where the request resumes."""

    request_id: RequestId


@dataclass(frozen=True)
class SampleStored:
    """The finished sample (or its image, or nothing, as the op wants) is committed."""

    request_id: RequestId
    sample_key: str = ""
    sample_digest: str = ""
    image_key: str = ""


@dataclass(frozen=True)
class SampleJudged:
    """The reward service answered."""

    request_id: RequestId
    reward: float
    correct: bool
    reason: str


@dataclass(frozen=True)
class ProgressStored:
    """In-flight latents after `denoising_step` steps are committed under `commit_key`."""

    request_id: RequestId
    denoising_step: int
    commit_key: str


@dataclass(frozen=True)
class AttemptFailed:
    """Fetching, storing or scoring of this request failed for good."""

    request_id: RequestId
    error_class: str
    error: str


@dataclass(frozen=True)
class NoticeReceived:
    """The machine will go in `grace_period_s`."""

    grace_period_s: float


@dataclass(frozen=True)
class SlotsChanged:
    """The machine has these slots from now on; those that it loses are gone in `grace_period_s`."""

    slots: tuple[int, ...]
    grace_period_s: float


@dataclass(frozen=True)
class TimePassed:
    """Deadlines are looked at; sent several times a second."""


Fact = (
    WorkerDied
    | InputsFetched
    | SampleStored
    | SampleJudged
    | ProgressStored
    | AttemptFailed
    | NoticeReceived
    | SlotsChanged
    | TimePassed
)
