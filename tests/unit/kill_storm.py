"""Control's core and node cores in one seeded world in which every process may be killed at any tick. Owns the world's log; never asserts.

`life(seed)` draws kills from one source; `iteration(kills)` runs a whole iteration under given ones. Everything that any core was told and
ordered is a line of the log. With a journal, control comes back from what that gives, and dies between deciding and writing.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
from test_cores_together import CONFIG, POLICY, SETTINGS, Wired

from spot_runtime.config import CalibratedSteps, CalibrationConfig, EvaluationConfig, ExplorationConfig, GrpoConfig
from spot_runtime.daemons.journal import Journal
from spot_runtime.messages import JobSpec
from spot_runtime.node import commands as node_commands
from spot_runtime.node import events as node_events
from spot_runtime.scheduler import events
from spot_runtime.scheduler.core import TRAINER_RESTARTS_MAX, ControlCore
from spot_runtime.scheduler.jobs import JobRecord
from spot_runtime.scheduler.requests import RequestRecord
from spot_runtime.types import ExplorationPlan, JobId, JobPhase, NodeId, Op, PolicyRef, Pool, RunId

NODES = {"reserved-0": Pool.RESERVED, "spot-0": Pool.SPOT, "spot-1": Pool.SPOT}
TRAINING_TICKS = 12
REJOIN_TICKS = 15
SETTLE_TICKS = 600
PHASE_TICKS = 60
"""Ticks of the rollout, and of what follows it, in which something may be killed."""
STORM_SETTINGS = SETTINGS.model_copy(
    update={
        "config": CONFIG.model_copy(
            update={
                "grpo": GrpoConfig(prompts_per_iteration=5, group_size=8, optimizer_steps=1),
                "exploration": ExplorationConfig(
                    max_sequences=12,
                    unexplored_prompts=1,
                    calibrated_train_s=10_000.0,
                    calibration=CalibrationConfig(
                        resolution=64,
                        num_steps=10,
                        step_s=0.1,
                        rows=(CalibratedSteps(effective_steps=10, cache_threshold=0.0, accuracy=1.0),),
                    ),
                ),
                "evaluation": EvaluationConfig(pairs=12),
            }
        )
    }
)

WHATS = (
    *(f"{name} dies" for name in NODES),
    *(f"a worker of {name} dies" for name in NODES),
    *(f"{name} is noticed" for name in NODES if NODES[name] is Pool.SPOT),
    "control dies",
    "messages are lost",
    "the trainer dies",
)
T = TypeVar("T")
Records = list[tuple[JobRecord, list[RequestRecord]]]
Kill = tuple[int, str]
"""(tick, what)"""


def job(op: Op, leftovers: str, **fields: str) -> JobSpec:
    config = STORM_SETTINGS.config
    exploration = config.exploration.model_copy(update={"leftovers": leftovers})
    settings = STORM_SETTINGS.model_copy(update={"config": config.model_copy(update={"exploration": exploration})})
    return JobSpec(
        job_id=JobId(f"{op}-0"),
        run_id=RunId("run-a"),
        op=op,
        iteration=0,
        policy=POLICY,
        settings_json=settings.model_dump_json(),
        **fields,
    )


@dataclass
class Storm(Wired):
    """A cluster of cores that is killed as told, and comes back by itself as real processes do."""

    log: list[str] = field(default_factory=list)
    journal: Journal | None = None
    """Written after every event, as the daemon does; without one control comes back from copies of its records."""
    hits: Counter[str] = field(default_factory=Counter)
    """What kills found at work."""
    tick: int = 0
    away: dict[str, int] = field(default_factory=dict)
    trained_at: int = 0
    trainer_deaths: int = 0

    def control(self, event: object) -> None:
        commands = self.core.handle(event, self.now_s)  # type: ignore[arg-type]
        self._write()
        self._note("control", event, commands)
        self._obey_control(commands)

    def _write(self) -> None:
        changes = self.core.take_changes()
        if self.journal is not None:
            self.journal.write(changes.jobs, changes.requests, changes.forgotten)

    def node(self, node_id: NodeId, event: object) -> None:
        if node_id in self.nodes:
            commands = self.nodes[node_id].handle(event, self.now_s)  # type: ignore[arg-type]
            self._note(node_id, event, commands)
            self._obey_node(node_id, commands)

    def _note(self, who: str, event: object, commands: list[object]) -> None:
        self.log.append(f"{self.now_s:.3f} {who} <- {event!r}")
        self.log += [f"    -> {command!r}" for command in commands]

    def _obey_node(self, node_id: NodeId, wanted: list[node_commands.Command]) -> None:
        judged = [command for command in wanted if isinstance(command, node_commands.Judge)]
        super()._obey_node(node_id, [command for command in wanted if command not in judged])
        if any(isinstance(command, node_commands.FailNode) for command in wanted):
            self.nodes.pop(node_id, None)
        for command in judged:
            for request_id in command.request_ids:
                reward = zlib.crc32(request_id.encode()) % 97 / 97
                self._later(node_id, node_events.SampleJudged(request_id, reward, reward > 0.5, ""))

    def _train(self, order: object) -> None:
        super()._train(order)
        self.trained_at = self.tick + TRAINING_TICKS

    def step_on(self, kills: list[str]) -> None:
        """One tick of 0.1 s."""
        self.tick += 1
        for what in kills:
            self.kill(what)
        for name, at in list(self.away.items()):
            if self.tick >= at:
                del self.away[name]
                self.join(name, NODES[name])
        if self.training is not None and self.tick >= self.trained_at:
            self.finish_training(self.core.jobs[self.training].job)
        for job_id in list(self.core.open_jobs):
            self.control(events.JobPolled(job_id=job_id))
        self.run(1)
        for name in NODES:
            if NodeId(name) not in self.nodes and name not in self.away:  # it drained and left
                self.away[name] = self.tick + REJOIN_TICKS

    # ---- kills ----

    def kill(self, what: str) -> None:
        self.log.append(f"{self.now_s:.3f} {what}")
        name = what.removeprefix("a worker of ").split()[0]
        node = self.nodes.get(NodeId(name))
        match what:
            case "control dies":
                self.restart_control()
            case "messages are lost":
                self.hits[what] += bool(self.queue)
                self._lose_messages()
            case "the trainer dies" if self.trainer_deaths < TRAINER_RESTARTS_MAX:
                self.hits[what] += self.training is not None
                self.trainer_deaths += self.training is not None
                self.trainer()
            case _ if node is None:
                pass
            case _ if what.startswith("a worker of"):
                self.hits[what] += any(group.batch for group in node.groups.values())
                for lead in [group.lead for group in node.groups.values()][:1]:
                    self.node(NodeId(name), node_events.WorkerDied(lead))
            case _ if what.endswith("is noticed"):
                self.hits[what] += bool(node.flights)
                self.node(NodeId(name), node_events.NoticeReceived(1.0))
            case _:
                self.hits[what] += bool(node.flights)
                del self.nodes[NodeId(name)]
                self.away[name] = self.tick + REJOIN_TICKS

    def _lose_messages(self) -> None:
        """What is between control and nodes: connections broke. A node's own work goes on."""
        between = {NodeId(name) for name in self.nodes}
        kept = [(who, what) for who, what in self.queue if who in between and not _is_from_control(what)]
        self.queue = deque(kept + [(w, e) for w, e in self.queue if w == "control" and _is_of_shell(e)])

    def restart_control(self) -> None:
        """From what was journalled; what was on its way to it or from its shell is lost."""
        self.hits["control dies"] += any(not job.phase.is_final for job in self.core.jobs.values())
        records = self._journalled() if self.journal is not None else self._copied()
        self.queue = deque((who, event) for who, event in self.queue if who != "control")
        self.core = ControlCore(CONFIG.cluster)
        for record, mine in records:
            self.core.restore(record, mine, self.now_s)
        commands = self.core.resume(self.now_s)
        self._write()
        self._note("control", "restart", commands)
        self._obey_control(commands)

    def _copied(self) -> Records:
        jobs = [_copy(record, JobRecord) for record in self.core.jobs.values()]
        return [(job, [_copy(r, RequestRecord) for r in self.core.queue.of_job(job.job_id)]) for job in jobs]

    def _journalled(self) -> Records:
        """What a new process finds; the old one had decided about one more event and told nobody."""
        assert self.journal is not None
        live = [(job.phase, job.leftover_policy, job.plan) for job in self.core.jobs.values()]
        requests = {r.request_id: said(r) for r in self.core.queue.records.values()}
        unwritten = next((event for who, event in self.queue if who == "control"), events.TimePassed())
        self.core.handle(unwritten, self.now_s)  # type: ignore[arg-type]
        self.journal.close()
        self.journal = Journal(self.journal.path)
        found = self.journal.load()
        assert [(job.phase, job.leftover_policy, job.plan) for job, _ in found] == live
        assert {r.request_id: said(r) for _, mine in found for r in mine} == requests
        self.hits["another policy is restored"] += any(r.changed_policy for _, mine in found for r in mine)
        return found

    # ---- phases ----

    def settle(self, *ops: Op) -> None:
        """Without kills until these jobs have ended; AssertionError where they do not."""
        for _ in range(SETTLE_TICKS):
            if self.ended(*ops) and self.is_whole:
                return
            self.step_on([])
        raise AssertionError({op: self.core.jobs[JobId(f"{op}-0")].phase for op in ops})

    @property
    def is_whole(self) -> bool:
        """Whether every node is there and takes work, so that the plan of what follows is the same."""
        return all(self.core.instances.takes_work(NodeId(name)) for name in NODES) and not self.away

    def ended(self, *ops: Op) -> bool:
        return all(self.core.jobs[JobId(f"{op}-0")].phase.is_final for op in ops)


def _is_from_control(event: object) -> bool:
    return type(event).__module__ == "spot_runtime.messages" and type(event).__name__ in (
        "WelcomeNode",
        "AssignWork",
        "DropRequests",
        "PauseNode",
        "ResumeNode",
        "Refused",
    )


def _is_of_shell(event: object) -> bool:
    return isinstance(event, events.JobInputsRead | events.ManifestWritten)


def said(record: RequestRecord) -> RequestRecord:
    """Without what is not worth a row."""
    return msgspec.structs.replace(record, renewed_at_s=0.0, history=list(record.history))


def _copy(record: T, kind: type[T]) -> T:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=kind)


@dataclass
class Outcome:
    """What a run ended in: seed and reward of every sample by job, the phases, the policy; and what kills had found at work."""

    samples: dict[str, dict[str, tuple[int, float]]]
    phases: dict[str, JobPhase]
    policy: PolicyRef
    plan: ExplorationPlan
    hits: Counter[str]
    log: list[str]


def iteration(kills: list[Kill], journal: Path | None = None, leftovers: str = "pinned") -> Outcome:
    """Rollout under the kills of the first PHASE_TICKS, then training, exploration and evaluation under those of the next."""
    storm = Storm(journal=Journal(journal) if journal else None)
    for name, pool in NODES.items():
        storm.join(name, pool)
    storm.trainer()
    storm.trainer_answers = False
    storm.control(events.JobSubmitted(job=job(Op.ROLLOUT, leftovers)))
    _under(storm, kills, 0, PHASE_TICKS)
    storm.settle(Op.ROLLOUT)
    beside = (Op.TRAIN_STEP, Op.EXPLORE, Op.EVALUATE)
    for op in beside:
        storm.control(events.JobSubmitted(job=job(op, leftovers, manifest_key="" if op is Op.EVALUATE else "m")))
    storm.step_on([])  # inputs are read, the plan is fixed
    _under(storm, kills, PHASE_TICKS, 2 * PHASE_TICKS)
    storm.settle(*beside)
    trained = storm.core.jobs[JobId("train_step-0")].result
    if storm.journal is not None:
        storm.journal.close()
    return Outcome(
        samples={
            job_id: {sample.request_id: (sample.seed, sample.reward) for sample in manifest.samples}
            for job_id, manifest in storm.manifests.items()
        },
        plan=storm.core.jobs[JobId("explore-0")].plan,
        phases={job_id: record.phase for job_id, record in storm.core.jobs.items()},
        policy=trained.policy if trained else PolicyRef(),
        hits=storm.hits,
        log=storm.log,
    )


def _under(storm: Storm, kills: list[Kill], first: int, end: int) -> None:
    for tick in range(first, end):
        storm.step_on([what for at, what in kills if at == tick])


def drawn(seed: int) -> list[Kill]:
    """Twenty kills from one seeded source."""
    source = random.Random(seed)
    return sorted((source.randrange(2 * PHASE_TICKS), source.choice(WHATS)) for _ in range(20))


def life(seed: int) -> bytes:
    """The log of one life."""
    return "\n".join(iteration(drawn(seed)).log).encode()
