"""Nodes and a trainer that speak the wire and do no work, against a real control daemon: for benchmarks and fault tests of control.

A node answers an assignment at once, or after `work_s`, with SampleDone and SampleScored, and pulls again. It repeats what has no receipt
and says hello when it is asked to, as real nodes do.
"""

from __future__ import annotations

import heapq
import itertools
import time
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from spot_runtime.client import job_spec
from spot_runtime.config import ClusterConfig, EvaluationConfig, GrpoConfig, RunSettings, TrainConfig
from spot_runtime.daemons.process import Child, spawn
from spot_runtime.daemons.settings import ControlSettings
from spot_runtime.messages import (
    Assignment,
    AssignWork,
    Codec,
    DropRequests,
    EncodePrompts,
    HeldLease,
    JobSpec,
    NodeHeartbeat,
    NodeHello,
    PromptsEncoded,
    PullWork,
    Refused,
    SampleDone,
    SampleScored,
    ToNode,
    ToTrainer,
    TrainerHeartbeat,
    TrainerHello,
)
from spot_runtime.rewards.prompts import row_json, shapes_rows
from spot_runtime.store.tensors import TensorStore
from spot_runtime.transport import Channel, Dealer, Poller
from spot_runtime.types import NodeId, Op, PolicyRef, Pool, RequestId, RunId

HEARTBEAT_S = 1.0
SAY_AGAIN_S = 2.0


@dataclass
class Held:
    """A request at a node: when it is finished, and when its result was last said."""

    assignment: Assignment
    group_id: str
    finished_s: float
    said_s: float | None = None


@dataclass
class FakeNode:
    """One machine with `groups` groups. A request takes 0.5 to 1.5 of `work_s`, so that groups do not march in step.

    `latencies_s`: from a pull to its answer, but for the first of each group, which waits for the job; `results`: samples finished.
    """

    node_id: NodeId
    endpoint: str
    groups: int = 8
    room: int = 1
    work_s: float = 0.0
    context: zmq.Context[zmq.Socket[bytes]] | None = None
    pool: Pool = Pool.SPOT
    held: dict[RequestId, Held] = field(default_factory=dict)
    latencies_s: list[float] = field(default_factory=list)
    results: int = 0
    dealer: Dealer[ToNode] = field(init=False)

    def __post_init__(self) -> None:
        self.dealer = Dealer(self.endpoint, Codec(ToNode), self.node_id, context=self.context)
        self._pulled_s: dict[str, float] = {}
        self._numbers: dict[str, int] = {}
        self._asked = int(time.time() * 1000)
        self._warm: set[str] = set()
        self._open: dict[str, int] = {f"{self.node_id}-w{index}": 0 for index in range(self.groups)}
        self._due: list[tuple[float, int, RequestId]] = []
        self._order = itertools.count()
        self._beat_s = 0.0
        self.hello()

    def hello(self) -> None:
        self.dealer.send(NodeHello(node_id=self.node_id, pool=self.pool, slots=self.groups, held=self._leases()))
        for group_id, count in self._open.items():
            if count == 0:
                self._pull(group_id)

    def turn(self) -> None:
        """Reads what is there, finishes what is due."""
        for message in self.dealer.receive(0.0):
            match message:
                case AssignWork():
                    self._assigned(message)
                case DropRequests():
                    for request_id in message.request_ids:
                        self._drop(request_id)
                case Refused() if message.error_class == "UnknownNodeError":
                    self.hello()
                case _:
                    pass
        now_s = time.monotonic()
        while self._due and self._due[0][0] <= now_s:
            self._finish(heapq.heappop(self._due)[2], now_s)
        if now_s - self._beat_s > HEARTBEAT_S:
            self._beat(now_s)

    def _assigned(self, message: AssignWork) -> None:
        now_s = time.monotonic()
        pulled_s = self._pulled_s.pop(message.group_id, None)
        if pulled_s is not None and message.group_id in self._warm:
            self.latencies_s.append(now_s - pulled_s)
        self._warm.add(message.group_id)
        if message.number == self._numbers.get(message.group_id):
            del self._numbers[message.group_id]
        for assignment in message.assignments:
            request_id = assignment.request.request_id
            known = self.held.get(request_id)
            if known is not None and known.assignment.lease_id == assignment.lease_id:
                continue  # an answer that was said again
            self._drop(request_id)
            due_s = now_s + self.work_s * (0.5 + assignment.request.seed % 1000 / 1000)
            self.held[request_id] = Held(assignment, message.group_id, due_s)
            self._open[message.group_id] += 1
            if self.work_s:
                heapq.heappush(self._due, (due_s, next(self._order), request_id))
            else:
                self._finish(request_id, now_s)

    def _finish(self, request_id: RequestId, now_s: float) -> None:
        held = self.held.get(request_id)
        if held is None or held.said_s is not None or held.finished_s > now_s:
            return
        self._say(held, now_s)
        self.results += 1
        self._open[held.group_id] -= 1
        if self._open[held.group_id] == 0:
            self._pull(held.group_id)

    def _say(self, held: Held, now_s: float) -> None:
        held.said_s = now_s
        request, lease_id = held.assignment.request, held.assignment.lease_id
        self.dealer.send(
            SampleDone(
                node_id=self.node_id,
                lease_id=lease_id,
                request_id=request.request_id,
                sample_key=f"samples/{request.request_id}",
                sample_digest="d",
                policy=request.policy,
                started_s=0.0,
                finished_s=1.0,
            )
        )
        reward = request.seed % 97 / 97
        self.dealer.send(
            SampleScored(
                node_id=self.node_id, lease_id=lease_id, request_id=request.request_id, reward=reward, correct=True
            )
        )

    def _pull(self, group_id: str) -> None:
        self._pulled_s[group_id] = time.monotonic()
        self._ask(group_id)

    def _ask(self, group_id: str) -> None:
        if group_id not in self._numbers:
            self._asked += 1
            self._numbers[group_id] = self._asked
        number = self._numbers[group_id]
        self.dealer.send(PullWork(node_id=self.node_id, group_id=group_id, room=self.room, number=number))

    def _drop(self, request_id: RequestId) -> None:
        held = self.held.pop(request_id, None)
        if held is not None and held.said_s is None:
            self._open[held.group_id] -= 1
            if self._open[held.group_id] == 0:
                self._pull(held.group_id)

    def _beat(self, now_s: float) -> None:
        self._beat_s = now_s
        self.dealer.send(NodeHeartbeat(node_id=self.node_id, slots=self.groups, held=self._leases()))
        for held in self.held.values():
            if held.said_s is not None and now_s - held.said_s > SAY_AGAIN_S:
                self._say(held, now_s)
        for group_id, pulled_s in list(self._pulled_s.items()):
            if now_s - pulled_s > SAY_AGAIN_S:
                self._ask(group_id)

    def _leases(self) -> tuple[HeldLease, ...]:
        return tuple(
            HeldLease(request_id=request_id, lease_id=held.assignment.lease_id)
            for request_id, held in self.held.items()
        )


class FakeTrainer:
    """Has every embedding at once; never trains."""

    def __init__(self, endpoint: str, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self.dealer: Dealer[ToTrainer] = Dealer(endpoint, Codec(ToTrainer), "trainer", context=context)
        self.dealer.send(TrainerHello(trainer_id="trainer"))
        self._beat_s = 0.0

    def turn(self) -> None:
        for message in self.dealer.receive(0.0):
            if isinstance(message, EncodePrompts):
                self.dealer.send(PromptsEncoded(trainer_id="trainer", job_id=message.job_id))
        if time.monotonic() - self._beat_s > HEARTBEAT_S:
            self._beat_s = time.monotonic()
            self.dealer.send(TrainerHeartbeat(trainer_id="trainer"))


class Crowd:
    """Nodes and a trainer on one thread."""

    def __init__(self, endpoint: str, *, groups: int, groups_per_node: int = 8, room: int = 1, work_s: float = 0.0):
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.trainer = FakeTrainer(endpoint, self._context)
        self.nodes = [
            FakeNode(NodeId(f"spot-{index}"), endpoint, groups_per_node, room, work_s, self._context)
            for index in range(groups // groups_per_node)
        ]
        self._peers: dict[Channel | int, FakeNode | FakeTrainer] = {self.trainer.dealer: self.trainer}
        self._peers |= {node.dealer: node for node in self.nodes}
        self._poller = Poller()
        for peer in self._peers.values():
            self._poller.add(peer.dealer)
        self._all_s = 0.0

    def turn(self, timeout_s: float = 0.01) -> None:
        for dealer in self._poller.ready(timeout_s):
            self._peers[dealer].turn()
        if time.monotonic() - self._all_s > 0.02:
            self._all_s = time.monotonic()
            for peer in self._peers.values():
                peer.turn()

    def close(self) -> None:
        for peer in self._peers.values():
            peer.dealer.close()
        self._context.term()


def start_control(folder: Path, *, bind: str = "tcp://127.0.0.1:0", cluster: ClusterConfig | None = None) -> Child:
    """A control daemon with its journal and store in `folder`; `ready` says where it answers."""
    settings = ControlSettings(
        bind=bind,
        journal_path=str(folder / "journal.sqlite"),
        store=f"file://{folder}/store",
        cluster=cluster or ClusterConfig(),
        reward_url="http://127.0.0.1:9",
        metrics_port=0,
    )
    return spawn("spot_runtime.daemons.control", settings, log_path=folder / "control.log")


def put_prompts(folder: Path, rows: int = 1024) -> None:
    store = TensorStore(f"file://{folder}/store")
    lines = "\n".join(row_json(row) for row in shapes_rows(0, rows, "train"))
    for split in ("train", "validation"):
        store.put_bytes(f"prompts/{split}.jsonl", lines.encode())


def rollout(folder: Path, run_id: str, *, prompts: int, group_size: int, iteration: int = 0) -> JobSpec:
    """A rollout job of `prompts * group_size` requests."""
    config = TrainConfig(
        grpo=GrpoConfig(prompts_per_iteration=prompts, group_size=group_size, optimizer_steps=1),
        evaluation=EvaluationConfig(pairs=1),
    )
    settings = RunSettings(
        run_id=run_id,
        iterations=4,
        resolution=64,
        model="tiny",
        model_digest="0123456789abcdef",
        store=TensorStore(f"file://{folder}/store").url,
        train_prompts_key="prompts/train.jsonl",
        validation_prompts_key="prompts/validation.jsonl",
        config=config,
    )
    return job_spec(
        run_id=RunId(run_id),
        op=Op.ROLLOUT,
        iteration=iteration,
        policy=PolicyRef(),
        settings_json=settings.model_dump_json(),
    )
