"""What control's core asks of its shell. Imperatives; the shell carries them out in order and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from spot_runtime.messages import JobSpec, ToNode, ToTrainer
from spot_runtime.scheduler.jobs import JobRecord, manifest
from spot_runtime.scheduler.requests import RequestRecord
from spot_runtime.types import ExplorationPlan, FailedRequest, JobId, Manifest, NodeId


@dataclass(frozen=True)
class SendToNode:
    node_id: NodeId
    message: ToNode


@dataclass(frozen=True)
class SendToTrainer:
    """`trainer_id` is "" for the one that has the seat."""

    message: ToTrainer
    trainer_id: str = ""


@dataclass(frozen=True)
class ReadJobInputs:
    """Read prompt sets, bank and feedback from the store; answer with JobInputsRead or JobStepFailed."""

    job: JobSpec


@dataclass(frozen=True)
class WriteManifest:
    """Put the manifest into the store; answer with ManifestWritten or JobStepFailed.

    `counted` are scored and do not change before the answer, so that the manifest of a large job may be made beside the loop.
    """

    key: str
    job: JobSpec
    plan: ExplorationPlan
    counted: tuple[RequestRecord, ...]
    failed: tuple[FailedRequest, ...]
    replaces: bool = False
    """Whether it goes in the place of one that names samples which the store has lost."""

    @property
    def job_id(self) -> JobId:
        return self.job.job_id

    @property
    def manifest(self) -> Manifest:
        return manifest(self.job, self.plan, self.counted, self.failed)


@dataclass(frozen=True)
class Changes:
    """Records to be journalled as they are now, and jobs to be forgotten with their requests, before anything else is done."""

    jobs: tuple[JobRecord, ...]
    requests: tuple[RequestRecord, ...]
    forgotten: tuple[JobId, ...]


Command = SendToNode | SendToTrainer | ReadJobInputs | WriteManifest
