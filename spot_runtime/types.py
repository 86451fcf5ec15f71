"""Ids and plain values that every room shares. Owns no behaviour beyond small derived properties; never does I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

RunId = NewType("RunId", str)
JobId = NewType("JobId", str)
RequestId = NewType("RequestId", str)
NodeId = NewType("NodeId", str)
WorkerId = NewType("WorkerId", str)
GroupId = NewType("GroupId", str)
LeaseId = NewType("LeaseId", str)


class Pool(StrEnum):
    """Where a node's capacity comes from."""

    RESERVED = "reserved"
    SPOT = "spot"


class Op(StrEnum):
    """What a job asks of the runtime; one Flyte task each."""

    ROLLOUT = "rollout"
    TRAIN_STEP = "train_step"
    EXPLORE = "explore"
    EVALUATE = "evaluate"


class RequestState(StrEnum):
    """Life of one generation request (docs/architecture.md; paper §5)."""

    PENDING = "pending"
    IN_FLIGHT = "in_flight"
    RECOMPUTE = "recompute"
    DONE = "done"
    SCORED = "scored"
    FAILED = "failed"
    ABORTED = "aborted"


class JobPhase(StrEnum):
    """Life of one job. The last three are final."""

    ADMITTING = "admitting"
    ENCODING = "encoding"
    RUNNING = "running"
    WRITING = "writing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED)


@dataclass(frozen=True)
class PolicyRef:
    """One version of the policy. Version 0 with an empty key is the base model without an adapter."""

    version: int = 0
    key: str = ""
    digest: str = ""


@dataclass(frozen=True)
class Generation:
    """One life of a sequence-parallel group, as one of its ranks sees it. A change of any kind makes another generation with another id.

    `rendezvous` is the path of a file that no other generation of this machine ever used; its ranks find each other there. `timeout_s`
    bounds joining and each collective.
    """

    id: int
    rank: int
    degree: int
    rendezvous: str
    timeout_s: float

    def __str__(self) -> str:
        return f"generation {self.id} rank {self.rank} of {self.degree}"


@dataclass(frozen=True)
class ArmStats:
    """Feedback of one bandit arm: the last W_b observations and how often it was chosen (paper §4.3.3)."""

    sequences: int
    effective_steps: int
    chosen: int = 0
    observations: tuple[float, ...] = ()


@dataclass(frozen=True)
class BanditState:
    """All that the exploration planner remembers; it travels through Flyte's State."""

    arms: tuple[ArmStats, ...] = ()
    pending_sequences: int = 0
    pending_effective_steps: int = 0


@dataclass(frozen=True)
class ExplorationPlan:
    """What one exploration phase does.

    `sequences` candidates for each explored prompt at `effective_steps` full forwards each; `sequences == 0` means no eligible action.
    `planned_s` and `window_s` are GPU-seconds (paper §4.3.1: T_plan and W). Up to `fill_sequences` candidates are drawn by slots that are
    through with those before training ends.
    """

    sequences: int = 0
    effective_steps: int = 0
    cache_threshold: float = 0.0
    explored_prompt_ids: tuple[str, ...] = ()
    planned_s: float = 0.0
    window_s: float = 0.0
    reason: str = ""
    fill_sequences: int = 0


@dataclass(frozen=True)
class SampleRecord:
    """One scored sample as a job's manifest lists it.

    `reward` is what training sees, `correct` the dataset's yes/no rule. `sample_key` names the trajectory in the tensor store (window
    latents and log-probs), `image_key` the PNG where the job kept images, else "". `effective_steps` counts full forwards, `busy_s` the
    slot-seconds that the sample took of its workers from `started_s` to `finished_s`, not what was lost of it before.
    """

    request_id: RequestId
    prompt_id: str
    prompt: str
    seed: int
    reward: float
    correct: bool
    reason: str
    sample_key: str
    sample_digest: str
    embedding_key: str
    sde_window: tuple[int, int]
    policy: PolicyRef
    node_id: NodeId
    pool: Pool
    attempts: int
    started_s: float
    finished_s: float
    image_key: str = ""
    effective_steps: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True)
class FailedRequest:
    """A request that was given up. `history` is what happened to it, oldest first, as `TIME_S event note`; `node_id` had it last."""

    request_id: RequestId
    job_id: JobId
    prompt_id: str
    attempts: int
    failures: int
    losses: int
    reason: str
    history: tuple[str, ...] = ()
    prompt: str = ""
    node_id: NodeId | None = None


@dataclass(frozen=True)
class Manifest:
    """All that one generation job produced, written once as JSON to the tensor store. Of a rollout, groups of `failed_prompt_ids` are left
    out whole.
    """

    job_id: JobId
    op: Op
    iteration: int
    policy: PolicyRef
    samples: tuple[SampleRecord, ...]
    failed_prompt_ids: tuple[str, ...] = ()
    plan: ExplorationPlan = field(default_factory=ExplorationPlan)
    failed: tuple[FailedRequest, ...] = ()


@dataclass(frozen=True)
class Usage:
    """GPU-seconds held while a job ran, by pool: the source of cost (paper §6.2).

    `reserved_total_s` and `spot_total_s` are GPU-seconds held since the cluster began, at `finished_s`: what several jobs that ran side by
    side held together is the last total minus the first one, never a sum. `spot_busy_s` is slot-seconds of spot workers
    that a generation job's own samples took.
    """

    started_s: float = 0.0
    finished_s: float = 0.0
    reserved_gpu_s: float = 0.0
    spot_gpu_s: float = 0.0
    spot_busy_s: float = 0.0
    reserved_total_s: float = 0.0
    spot_total_s: float = 0.0


@dataclass(frozen=True)
class JobResult:
    """What a finished job hands back. Tensors stay in the store; only keys and numbers travel."""

    op: Op
    manifest_key: str = ""
    policy: PolicyRef = field(default_factory=PolicyRef)
    plan: ExplorationPlan = field(default_factory=ExplorationPlan)
    bandit: BanditState = field(default_factory=BanditState)
    usage: Usage = field(default_factory=Usage)
    metrics: dict[str, float] = field(default_factory=dict)
    average: PolicyRef = field(default_factory=PolicyRef)
