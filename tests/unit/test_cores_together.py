"""Control's core and node cores wired to each other without sockets: whole jobs from submission to manifest."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec
from node_processes import answers_to

from spot_runtime.config import ClusterConfig, EvaluationConfig, GrpoConfig, RunSettings, TrainConfig
from spot_runtime.messages import (
    DecodeSamples,
    DenoiseStep,
    EncodePrompts,
    JobSpec,
    PromptsEncoded,
    SamplesDecoded,
    SleepWorker,
    StartTraining,
    StepDone,
    TrainerHeartbeat,
    TrainerHello,
    TrainingFinished,
    WakeWorker,
    WorkerSlept,
    WorkerWoke,
)
from spot_runtime.node import commands as node_commands
from spot_runtime.node import events as node_events
from spot_runtime.node.core import NodeCore
from spot_runtime.scheduler import commands, events
from spot_runtime.scheduler.core import ControlCore
from spot_runtime.scheduler.expansion import JobInputs, PromptRow
from spot_runtime.types import JobId, JobPhase, Manifest, NodeId, Op, PolicyRef, Pool, RunId, WorkerId

CONFIG = TrainConfig(
    grpo=GrpoConfig(prompts_per_iteration=3, group_size=4, optimizer_steps=1),
    evaluation=EvaluationConfig(pairs=5),
    cluster=ClusterConfig(lease_s=5.0, heartbeat_s=1.0, max_batch=4),
)
SETTINGS = RunSettings(
    run_id="run-a",
    iterations=4,
    resolution=64,
    model="tiny",
    store="memory://x",
    train_prompts_key="train",
    validation_prompts_key="validation",
    config=CONFIG,
)
ROWS = tuple(PromptRow(prompt_id=f"p{i}", prompt=f"prompt {i}", row_json="{}") for i in range(12))
POLICY = PolicyRef(1, "runs/run-a/policies/1", "d")


def spec(op: Op, iteration: int = 1, **fields: str) -> JobSpec:
    return JobSpec(
        job_id=JobId(f"{op}-{iteration}"),
        run_id=RunId("run-a"),
        op=op,
        iteration=iteration,
        policy=POLICY,
        settings_json=SETTINGS.model_dump_json(),
        **fields,
    )


@dataclass
class Wired:
    """A cluster of cores. Work takes one tick of 0.1 s a command; `manifests` is what reached the store."""

    core: ControlCore = field(default_factory=lambda: ControlCore(CONFIG.cluster))
    nodes: dict[NodeId, NodeCore] = field(default_factory=dict)
    now_s: float = 1000.0
    manifests: dict[str, Manifest] = field(default_factory=dict)
    trainings: list[JobSpec] = field(default_factory=list)
    trainer_answers: bool = True
    has_trainer: bool = False
    training: JobId | None = None
    queue: deque[tuple[str, object]] = field(default_factory=deque)

    def join(self, name: str, pool: Pool, workers: int = 1) -> None:
        node_id = NodeId(name)
        node = NodeCore(
            node_id,
            pool,
            workers=workers,
            max_batch=4,
            arena_slots=12 * workers,
            step_deadline_s=60.0,
            start_deadline_s=60.0,
            now_s=self.now_s,
            sleeps=pool is Pool.RESERVED,
        )
        self.nodes[node_id] = node
        self._obey_node(node_id, node.start(self.now_s))
        self.control(node.hello())

    def trainer(self) -> None:
        self.has_trainer, self.training = True, None
        self.control(TrainerHello(trainer_id="t"))

    def control(self, event: object) -> None:
        self._obey_control(self.core.handle(event, self.now_s))  # type: ignore[arg-type]

    def node(self, node_id: NodeId, event: object) -> None:
        if node_id in self.nodes:
            self._obey_node(node_id, self.nodes[node_id].handle(event, self.now_s))  # type: ignore[arg-type]

    def run(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now_s += 0.1
            batch, self.queue = self.queue, deque()
            for target, event in batch:
                self.control(event) if target == "control" else self.node(NodeId(target), event)
            for node_id, node in list(self.nodes.items()):
                self.control(node.heartbeat())
                self.node(node_id, node_events.TimePassed())
            if self.has_trainer:
                self.control(TrainerHeartbeat(trainer_id="t", job_id=self.training))
            self.control(events.TimePassed())

    def phase(self, op: Op, iteration: int = 1) -> JobPhase:
        return self.core.jobs[JobId(f"{op}-{iteration}")].phase

    def _later(self, target: str, event: object) -> None:
        self.queue.append((target, event))

    def _obey_control(self, wanted: list[commands.Command]) -> None:
        for command in wanted:
            match command:
                case commands.SendToNode():
                    self._later(command.node_id, command.message)
                case commands.SendToTrainer():
                    self._train(command.message)
                case commands.ReadJobInputs():
                    inputs = JobInputs(train_rows=ROWS, validation_rows=ROWS)
                    self._later("control", events.JobInputsRead(job_id=command.job.job_id, inputs=inputs))
                case commands.WriteManifest():
                    self.manifests[command.job_id] = msgspec.json.decode(
                        msgspec.json.encode(command.manifest), type=Manifest
                    )
                    self._later("control", events.ManifestWritten(job_id=command.job_id, key=command.key))

    def _train(self, order: object) -> None:
        match order:
            case EncodePrompts():
                self._later("control", PromptsEncoded(trainer_id="t", job_id=order.job_id))
            case StartTraining():
                self.trainings.append(order.job)
                self.training = order.job.job_id
                if self.trainer_answers:
                    self.finish_training(order.job)

    def finish_training(self, job: JobSpec) -> None:
        self.training = None
        done = TrainingFinished(trainer_id="t", job_id=job.job_id, policy=PolicyRef(2, "k", "e"), metrics={})
        self._later("control", done)

    def _obey_node(self, node_id: NodeId, wanted: list[node_commands.Command]) -> None:
        for command in wanted:
            match command:
                case node_commands.SendToControl():
                    self._later("control", command.message)
                case node_commands.SendToWorker():
                    self._later(node_id, self._work(command))
                case node_commands.FetchInputs():
                    self._later(node_id, node_events.InputsFetched(command.assignment.request.request_id))
                case node_commands.StoreSample():
                    self._later(node_id, node_events.SampleStored(command.request_id, f"s/{command.request_id}", "d"))
                case node_commands.StoreProgress():
                    key = f"c/{command.request_id}"
                    stored = node_events.ProgressStored(command.request_id, command.denoising_step, key)
                    self._later(node_id, stored)
                case node_commands.Judge():
                    for request_id in command.request_ids:
                        self._later(node_id, node_events.SampleJudged(request_id, 0.5, True, ""))
                case node_commands.EndNode():
                    self.nodes.pop(node_id, None)
                case _:
                    for answer in answers_to(command):
                        self._later(node_id, answer)

    @staticmethod
    def _work(command: node_commands.SendToWorker) -> object:
        match command.message:
            case DenoiseStep():
                return StepDone(worker_id=command.worker_id, seq=command.message.seq, elapsed_s=0.1)
            case DecodeSamples():
                pngs = tuple(b"x" for _ in command.message.slots)
                return SamplesDecoded(worker_id=command.worker_id, seq=command.message.seq, pngs=pngs, elapsed_s=0.1)
            case SleepWorker():
                return WorkerSlept(worker_id=command.worker_id, seq=command.message.seq)
            case WakeWorker():
                return WorkerWoke(worker_id=command.worker_id, seq=command.message.seq)


def cluster() -> Wired:
    wired = Wired()
    wired.join("reserved-0", Pool.RESERVED)
    wired.join("spot-0", Pool.SPOT)
    wired.join("spot-1", Pool.SPOT)
    wired.trainer()
    return wired


def submit(wired: Wired, op: Op, iteration: int = 1, **fields: str) -> None:
    wired.control(events.JobSubmitted(job=spec(op, iteration, **fields)))


def test_a_rollout_runs_on_both_pools_and_lists_every_sample_once() -> None:
    wired = cluster()
    submit(wired, Op.ROLLOUT)
    wired.run(80)
    assert wired.phase(Op.ROLLOUT) is JobPhase.SUCCEEDED
    samples = wired.manifests["rollout-1"].samples
    assert len(samples) == len({s.request_id for s in samples}) == 12
    assert {s.pool for s in samples} == {Pool.RESERVED, Pool.SPOT}
    assert len({s.seed for s in samples}) == 12
    assert set(Counter(s.prompt_id for s in samples).values()) == {4}


def test_exploration_and_evaluation_stay_off_the_reserved_node_while_it_trains() -> None:
    wired = cluster()
    submit(wired, Op.ROLLOUT, 0)
    wired.run(80)
    wired.trainer_answers = False
    submit(wired, Op.TRAIN_STEP, 0, manifest_key="m")
    submit(wired, Op.EVALUATE, 0)
    wired.run(60)
    assert wired.nodes[NodeId("reserved-0")].paused
    assert wired.phase(Op.TRAIN_STEP, 0) is JobPhase.RUNNING
    assert wired.phase(Op.EVALUATE, 0) is JobPhase.SUCCEEDED
    assert {s.pool for s in wired.manifests["evaluate-0"].samples} == {Pool.SPOT}
    wired.finish_training(wired.trainings[0])
    wired.run(5)
    assert wired.phase(Op.TRAIN_STEP, 0) is JobPhase.SUCCEEDED
    assert not wired.nodes[NodeId("reserved-0")].paused


def test_a_lost_spot_node_costs_no_sample() -> None:
    wired = cluster()
    submit(wired, Op.ROLLOUT)
    wired.run(8)
    assert wired.core.queue.held.get(NodeId("spot-0"))
    del wired.nodes[NodeId("spot-0")]
    wired.run(160)
    assert wired.phase(Op.ROLLOUT) is JobPhase.SUCCEEDED
    samples = wired.manifests["rollout-1"].samples
    assert len({s.request_id for s in samples}) == 12
    assert any(s.attempts == 2 for s in samples)


def test_a_notice_hands_the_step_reached_to_another_node() -> None:
    wired = cluster()
    submit(wired, Op.ROLLOUT)
    wired.run(9)
    wired.node(NodeId("spot-0"), node_events.NoticeReceived(2.0))
    wired.run(3)
    resumed = [r.resume for r in wired.core.queue.records.values() if r.resume and r.attempts == 1]
    assert any(0 < point.denoising_step < 10 for point in resumed)
    wired.run(120)
    assert NodeId("spot-0") not in wired.nodes
    assert wired.phase(Op.ROLLOUT) is JobPhase.SUCCEEDED


def test_a_worker_death_costs_one_denoising_step_and_no_lease() -> None:
    wired = cluster()
    submit(wired, Op.ROLLOUT)
    wired.run(9)
    node = wired.nodes[NodeId("spot-0")]
    steps = {f.request_id: f.denoising_step for f in node.flights.values()}
    wired.node(NodeId("spot-0"), node_events.WorkerDied(WorkerId("spot-0-w0")))
    assert {f.request_id: f.denoising_step for f in node.flights.values()} == steps
    wired.run(120)
    assert wired.phase(Op.ROLLOUT) is JobPhase.SUCCEEDED
    assert all(s.attempts == 1 for s in wired.manifests["rollout-1"].samples)


def test_training_is_ordered_again_when_the_trainer_forgot_and_fails_after_the_bound() -> None:
    wired = cluster()
    submit(wired, Op.ROLLOUT, 0)
    wired.run(80)
    wired.trainer_answers = False
    submit(wired, Op.TRAIN_STEP, 0, manifest_key="m")
    wired.run(2)
    for _ in range(4):
        wired.trainer()
        wired.run(1)
    assert len(wired.trainings) == 4
    assert wired.phase(Op.TRAIN_STEP, 0) is JobPhase.FAILED


def test_a_job_submitted_twice_runs_once() -> None:
    wired = cluster()
    submit(wired, Op.ROLLOUT)
    wired.run(5)
    submit(wired, Op.ROLLOUT)
    wired.run(80)
    submit(wired, Op.ROLLOUT)
    assert wired.phase(Op.ROLLOUT) is JobPhase.WRITING, "it sees to its manifest"
    wired.run(3)
    assert wired.phase(Op.ROLLOUT) is JobPhase.SUCCEEDED
    assert len(wired.manifests["rollout-1"].samples) == 12


def test_a_job_that_nobody_can_move_fails_with_a_reason_instead_of_hanging() -> None:
    wired = cluster()
    submit(wired, Op.ROLLOUT)
    wired.run(5)
    wired.nodes.clear()
    stall_s = CONFIG.cluster.stall_deadline_s
    for _ in range(30):
        wired.control(events.JobPolled(job_id=JobId("rollout-1")))
        wired.now_s += stall_s / 20
        wired.run(1)
    job = wired.core.jobs[JobId("rollout-1")]
    assert job.phase is JobPhase.FAILED
    assert "no progress" in job.error
