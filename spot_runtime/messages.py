"""Every message on a socket, and their framing. Owns wire names, version and size bound; never opens a socket.

A frame is `VERSION + msgpack`. Fields are only ever added, with defaults. Messages from a node or trainer to control are past facts and are
what the pure cores handle; messages from control are imperatives and are what the cores return.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from spot_runtime.errors import ProtocolError
from spot_runtime.types import (
    BanditState,
    FailedRequest,
    Generation,
    JobId,
    JobPhase,
    JobResult,
    LeaseId,
    NodeId,
    Op,
    PolicyRef,
    Pool,
    RequestId,
    RunId,
    WorkerId,
)

VERSION = b"SL01"
RESIDENT_POLICIES_MAX = 4
"""Policies that a worker keeps bound. Node and worker count them alike: the least recently used goes first."""
SEAT_TAKEN = "SeatTakenError"
"""Class of control's refusal of a second trainer; it may speak on and gets the seat when the first is gone."""
FRAME_BYTES_MAX = 64 * 1024 * 1024


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all: frozen, tagged with the class name."""


# ---- what a sample is -------------------------------------------------------------------------------------------------------------


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """What all requests of a job share. `noise_level` is a of the SDE step; `sde` is "sde" or "cps".

    `cache_threshold` 0 is no step cache; else a sample may do without forwards while the polynomial of its input's changes, highest power
    first, adds up to less. `cache_last_full`: its last denoising step takes a forward whatever changed.
    """

    height: int
    width: int
    num_steps: int
    noise_level: float
    sde: str = "sde"
    cache_threshold: float = 0.0
    cache_polynomial: tuple[float, ...] = (1.0, 0.0)
    cache_last_full: bool = True


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sample to make. Initial latents and SDE noise are functions of (seed, denoising_step): see rl.noise.

    `sde_window` is [start, stop): the denoising steps that take SDE noise and record log-probs; (0, 0) is a pure ODE sample.
    """

    request_id: RequestId
    job_id: JobId
    run_id: RunId
    op: Op
    prompt_id: str
    prompt: str
    row_json: str
    seed: int
    sde_window: tuple[int, int]
    params: SamplingParams
    policy: PolicyRef
    embedding_key: str
    keep_image: bool = False
    keep_trajectory: bool = False
    """Whether an exploration's sample is stored as a rollout's is."""
    fills_window: bool = False
    """Whether it is drawn only while training lasts: beyond the plan, by slots that would be idle."""

    @property
    def stores_trajectory(self) -> bool:
        """Whether window latents and log-probs are kept: what training reads."""
        return self.op is Op.ROLLOUT or self.keep_trajectory


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A committed state of an unfinished request. `denoising_step == num_steps`: only decoding and scoring are left."""

    denoising_step: int
    commit_key: str


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """A request under a lease."""

    lease_id: LeaseId
    request: GenerationRequest
    resume: ResumePoint | None = None


class HeldLease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that a node says it holds."""

    request_id: RequestId
    lease_id: LeaseId
    denoising_step: int = 0


# ---- client and control -----------------------------------------------------------------------------------------------------------


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A job as a task submits it. The id is a digest of all else, so a retried task attaches to its job.

    rollout: `bank_key` (seeds by prompt id, "" = default seeds) and `manifest_key` of the exploration whose samples it takes over, "" =
    none. train_step: `manifest_key` of the rollouts and the `bank_key` that they had. explore: the same two (the bandit's feedback) and
    `bandit`; it explores the prompts of iteration + 1. evaluate: nothing more.
    """

    job_id: JobId
    run_id: RunId
    op: Op
    iteration: int
    policy: PolicyRef
    settings_json: str
    bank_key: str = ""
    manifest_key: str = ""
    bandit: BanditState = BanditState()


class SubmitJob(Message, frozen=True, kw_only=True):
    seq: int
    job: JobSpec


class PollJob(Message, frozen=True, kw_only=True):
    seq: int
    job_id: JobId


class CancelJob(Message, frozen=True, kw_only=True):
    seq: int
    job_id: JobId
    reason: str = ""


class GetStatus(Message, frozen=True, kw_only=True):
    seq: int


class JobStatus(Message, frozen=True, kw_only=True):
    """Where a job stands. `done`/`scored`/`failed` count requests; for train_step `done` counts samples trained."""

    seq: int = 0
    job_id: JobId
    op: Op
    iteration: int
    phase: JobPhase
    total: int = 0
    done: int = 0
    scored: int = 0
    failed: int = 0
    spot_slots: int = 0
    reward_mean: float = 0.0
    elapsed_s: float = 0.0
    message: str = ""
    result: JobResult | None = None
    error_class: str = ""
    error: str = ""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    node_id: NodeId
    pool: Pool
    slots: int
    in_flight: int
    state: str
    last_seen_s: float
    degrees: tuple[int, ...] = ()
    """Slots of each of its sequence-parallel groups."""
    standbys: int = 0
    """Processes that have imported everything and wait for a slot."""


class ClusterStatus(Message, frozen=True, kw_only=True):
    seq: int = 0
    nodes: tuple[NodeStatus, ...] = ()
    jobs: tuple[JobStatus, ...] = ()
    trainer: str = "absent"
    reward_url: str = ""
    store: str = ""
    """URL of the tensor store; every run on this cluster uses it."""
    failures: tuple[FailedRequest, ...] = ()
    """Requests that were given up lately, of jobs that control still knows, the newest last."""


class Refused(Message, frozen=True, kw_only=True):
    """A request that control will not carry out; names the class of the error tree."""

    seq: int = 0
    error_class: str
    error: str


# ---- node and control -------------------------------------------------------------------------------------------------------------


class NodeHello(Message, frozen=True, kw_only=True):
    """First message of a node, and again after either side restarted. Held leases go on if control still knows them."""

    node_id: NodeId
    pool: Pool
    slots: int
    held: tuple[HeldLease, ...] = ()


class NodeHeartbeat(Message, frozen=True, kw_only=True):
    """Renews the leases listed."""

    node_id: NodeId
    slots: int
    held: tuple[HeldLease, ...] = ()
    pause: int = 0
    """Number of the last PauseNode that it obeyed: what it said of an earlier one is no answer to this one."""
    paused: bool = False
    """Whether its slots are parked, no command is at work in any, and their weights sleep where they are to; control corrects what it did
    not mean."""
    step_s: float = 0.0
    """Measured slot-seconds a full sample-step, 0 while unknown: what the planner calls t_step."""
    lost_steps: int = 0
    """Sample-steps that were taken again since the node started: those in hand when a worker died."""
    degrees: tuple[int, ...] = ()
    """Slots of each group that takes work."""
    standbys: int = 0
    """Processes that have imported everything and wait for a slot."""


class PullWork(Message, frozen=True, kw_only=True):
    """A group with room asks for up to `room` requests; control answers when there are some (a parked pull)."""

    node_id: NodeId
    group_id: str
    room: int
    sequence_parallel_degree: int = 1
    number: int = 0
    """Of the question: one that is asked again keeps it and gets the same answer; a new one has a greater one. 0: each is a new one."""
    height: int = 0
    width: int = 0
    """Pixels of the samples that its arena holds; 0: any."""
    policies: tuple[PolicyRef, ...] = ()
    """What its workers keep bound: among requests of one job these go first."""


class SampleDone(Message, frozen=True, kw_only=True):
    """Trajectory and final latents are committed under `sample_key`."""

    node_id: NodeId
    lease_id: LeaseId
    request_id: RequestId
    sample_key: str
    sample_digest: str
    policy: PolicyRef
    started_s: float
    finished_s: float
    image_key: str = ""
    effective_steps: int = 0
    busy_s: float = 0.0
    """Slot-seconds that it took on this node."""


class SampleScored(Message, frozen=True, kw_only=True):
    node_id: NodeId
    lease_id: LeaseId
    request_id: RequestId
    reward: float
    correct: bool
    reason: str = ""


class RequestCommitted(Message, frozen=True, kw_only=True):
    """The request goes on; should its node be lost, it can be resumed from here."""

    node_id: NodeId
    lease_id: LeaseId
    request_id: RequestId
    denoising_step: int
    commit_key: str


class RequestReturned(Message, frozen=True, kw_only=True):
    """The node lets go of an unfinished request; `commit_key` is "" where nothing was committed."""

    node_id: NodeId
    lease_id: LeaseId
    request_id: RequestId
    denoising_step: int = 0
    commit_key: str = ""
    reason: str = ""
    busy_s: float = 0.0
    """Slot-seconds that it took on this node and that no SampleDone has told."""


class RequestFailed(Message, frozen=True, kw_only=True):
    """An attempt ended in an error that is not the node's going away."""

    node_id: NodeId
    lease_id: LeaseId
    request_id: RequestId
    error_class: str
    error: str
    busy_s: float = 0.0
    """Slot-seconds that it took on this node and that no SampleDone has told."""


class NodeNoticed(Message, frozen=True, kw_only=True):
    """A preemption notice reached the node: it stops pulling and drains within `grace_period_s`."""

    node_id: NodeId
    grace_period_s: float


class NodeLeft(Message, frozen=True, kw_only=True):
    """The node ends in order."""

    node_id: NodeId


class WelcomeNode(Message, frozen=True, kw_only=True):
    heartbeat_s: float
    reward_url: str
    paused: bool = False
    pause: int = 0
    """Number of the PauseNode that this stands for, if `paused`."""


class AssignWork(Message, frozen=True, kw_only=True):
    """Answers the pull `number`; said again where that pull is."""

    group_id: str
    assignments: tuple[Assignment, ...]
    number: int = 0


class DropRequests(Message, frozen=True, kw_only=True):
    """Stop these and forget them; no answer is expected."""

    request_ids: tuple[RequestId, ...]


class PauseNode(Message, frozen=True, kw_only=True):
    """The node's GPU belongs to the trainer: park all slots between denoising steps, and sleep where weights are to leave it."""

    number: int = 0


class ResumeNode(Message, frozen=True, kw_only=True):
    """Slots denoise and pull again."""


class EndTrainer(Message, frozen=True, kw_only=True):
    """The trainer of this node, if it has one, is silent: kill its process, and start it again as after any other death."""


# ---- trainer and control ----------------------------------------------------------------------------------------------------------


class TrainerHello(Message, frozen=True, kw_only=True):
    trainer_id: str
    job_id: JobId | None = None
    """The job it is at work on, if any."""


class TrainerHeartbeat(Message, frozen=True, kw_only=True):
    trainer_id: str
    job_id: JobId | None = None
    done: int = 0
    total: int = 0
    message: str = ""


class EncodePrompts(Message, frozen=True, kw_only=True):
    """Compute and store the embeddings that are missing."""

    job_id: JobId
    prompts: tuple[tuple[str, str], ...]
    """(embedding key, prompt)."""
    policy: PolicyRef = PolicyRef()
    """One that the store lost, to be stored again; of key "" where there is none."""
    order: int = 0
    """Number of this order; the answer carries it."""


class PromptsEncoded(Message, frozen=True, kw_only=True):
    trainer_id: str
    job_id: JobId
    order: int = 0


class StartTraining(Message, frozen=True, kw_only=True):
    job: JobSpec
    order: int = 0


class StopTraining(Message, frozen=True, kw_only=True):
    job_id: JobId


class TrainingFinished(Message, frozen=True, kw_only=True):
    trainer_id: str
    job_id: JobId
    policy: PolicyRef
    metrics: dict[str, float]
    order: int = 0
    average: PolicyRef = PolicyRef()
    """The policy's moving average, which validation samples; of key "" where none is kept."""


class TrainerFailed(Message, frozen=True, kw_only=True):
    """Encoding or training of this job ended in an error."""

    trainer_id: str
    job_id: JobId
    error_class: str
    error: str
    order: int = 0
    lost: tuple[RequestId, ...] = ()
    """Requests whose samples the store lost, with LostSamplesError; empty where it lost only the manifest."""


# ---- worker and node --------------------------------------------------------------------------------------------------------------


class WorkerReady(Message, frozen=True, kw_only=True):
    """A process has imported everything and waits: without weights, and without having touched a GPU."""

    worker_id: WorkerId
    pid: int


class LoadWeights(Message, frozen=True, kw_only=True):
    """Take the base weights to `device`: from the machine's shared memory, or from the model folder. A given `digest` must be met."""

    seq: int
    device: str
    from_peer: bool = False
    digest: str = ""


class WorkerSeeded(Message, frozen=True, kw_only=True):
    """The weights are whole and have this digest. `elapsed_s` is what getting and checking them took."""

    worker_id: WorkerId
    seq: int
    digest: str
    elapsed_s: float = 0.0


class JoinGroup(Message, frozen=True, kw_only=True):
    """Leave the present group, if any, and meet the other ranks of this generation. Policies and admitted requests stay."""

    seq: int
    generation: Generation


class GroupJoined(Message, frozen=True, kw_only=True):
    worker_id: WorkerId
    seq: int


class StepItem(msgspec.Struct, frozen=True, kw_only=True):
    """One request's place in a batch: its slot in the latent arena and the denoising step to take."""

    slot: int
    denoising_step: int


class LoadPolicy(Message, frozen=True, kw_only=True):
    """Bind the adapter found in `path` (a safetensors file, "" for the base model)."""

    policy: PolicyRef
    path: str


class PolicyLoaded(Message, frozen=True, kw_only=True):
    worker_id: WorkerId
    policy: PolicyRef


class AdmitRequest(Message, frozen=True, kw_only=True):
    """Make `slot` hold this request. From step 0 the worker draws the initial latents; else the arena already holds them."""

    slot: int
    request: GenerationRequest
    embedding: bytes
    """safetensors with `embeds` (text tokens, width)."""
    denoising_step: int = 0
    schedule_digest: str = ""
    """Of the noise levels that the latents stepped through so far; the worker refuses to go on with others. Empty: none."""


class RequestAdmitted(Message, frozen=True, kw_only=True):
    """`slot` holds the request, which steps through the noise levels of this digest."""

    worker_id: WorkerId
    slot: int
    request_id: RequestId
    schedule_digest: str


class DismissRequest(Message, frozen=True, kw_only=True):
    """Forget what `slot` holds. Not answered; a free slot is no error."""

    slot: int


class DenoiseStep(Message, frozen=True, kw_only=True):
    """Take one denoising step for each item; all items have the same policy and resolution."""

    seq: int
    items: tuple[StepItem, ...]


class StepDone(Message, frozen=True, kw_only=True):
    """Step `seq` is in the arena. `elapsed_s` is the worker's own time for it."""

    worker_id: WorkerId
    seq: int
    elapsed_s: float
    forwards: tuple[bool, ...] = ()
    """Whether each item took a full forward, in the order's order; empty: all did."""


class DecodeSamples(Message, frozen=True, kw_only=True):
    """Turn the final latents of these slots into images."""

    seq: int
    slots: tuple[int, ...]


class SamplesDecoded(Message, frozen=True, kw_only=True):
    """Images of the slots of `seq`, in its order, as PNG."""

    worker_id: WorkerId
    seq: int
    pngs: tuple[bytes, ...]
    elapsed_s: float


class SleepWorker(Message, frozen=True, kw_only=True):
    """The device is the trainer's: move the weights to host memory. Group, policies and requests stay; asleep already is no error."""

    seq: int


class WorkerSlept(Message, frozen=True, kw_only=True):
    worker_id: WorkerId
    seq: int


class WakeWorker(Message, frozen=True, kw_only=True):
    """Move the weights back and check them; where they are not what they were the process ends. Awake already is no error."""

    seq: int


class WorkerWoke(Message, frozen=True, kw_only=True):
    """The weights are back and are those that fell asleep."""

    worker_id: WorkerId
    seq: int


class WorkerFailed(Message, frozen=True, kw_only=True):
    """The command `seq` failed; the worker lives on, out of its group. Policies and admissions have seq -1; `slot`: the admission's."""

    worker_id: WorkerId
    seq: int
    error_class: str
    error: str
    slot: int = -1


class StopWorker(Message, frozen=True, kw_only=True):
    pass


FromClient = SubmitJob | PollJob | CancelJob | GetStatus
ToClient = JobStatus | ClusterStatus | Refused
FromNode = (
    NodeHello
    | NodeHeartbeat
    | PullWork
    | SampleDone
    | SampleScored
    | RequestCommitted
    | RequestReturned
    | RequestFailed
    | NodeNoticed
    | NodeLeft
)
ToNode = WelcomeNode | AssignWork | DropRequests | PauseNode | ResumeNode | EndTrainer | Refused
FromTrainer = TrainerHello | TrainerHeartbeat | PromptsEncoded | TrainingFinished | TrainerFailed
ToTrainer = EncodePrompts | StartTraining | StopTraining | Refused
ToControl = FromClient | FromNode | FromTrainer
FromWorker = (
    WorkerReady
    | WorkerSeeded
    | GroupJoined
    | PolicyLoaded
    | RequestAdmitted
    | StepDone
    | SamplesDecoded
    | WorkerSlept
    | WorkerWoke
    | WorkerFailed
)
ToWorker = (
    LoadWeights
    | JoinGroup
    | LoadPolicy
    | AdmitRequest
    | DismissRequest
    | DenoiseStep
    | DecodeSamples
    | SleepWorker
    | WakeWorker
    | StopWorker
)

M = TypeVar("M")


class Codec(Generic[M]):
    """Encodes any message and decodes the members of one union. Raises ProtocolError, never anything else, on a bad frame."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: Message) -> bytes:
        frame = VERSION + self._encoder.encode(message)
        assert len(frame) <= FRAME_BYTES_MAX, f"{type(message).__name__} of {len(frame)} bytes"
        return frame

    def decode(self, frame: bytes) -> M:
        if len(frame) > FRAME_BYTES_MAX:
            raise ProtocolError(f"frame of {len(frame)} bytes: must be <= {FRAME_BYTES_MAX}")
        if frame[: len(VERSION)] != VERSION:
            raise ProtocolError(f"frame starts with {frame[: len(VERSION)]!r}: this side speaks {VERSION!r}")
        try:
            return self._decoder.decode(frame[len(VERSION) :])
        except RecursionError as error:
            raise ProtocolError("malformed frame: nested too deeply") from error
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ProtocolError(f"malformed frame: {error}") from error
