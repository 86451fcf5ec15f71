"""Processes of a node's core that do at once what they are told: start, load, join, sleep, wake. What else the core says is handed back."""

from __future__ import annotations

from spot_runtime.messages import (
    GroupJoined,
    SleepWorker,
    WakeWorker,
    WorkerReady,
    WorkerSeeded,
    WorkerSlept,
    WorkerWoke,
)
from spot_runtime.node.commands import Command, FormGroup, SeedWorker, SendToWorker, StartWorker
from spot_runtime.node.core import NodeCore, NodeEvent

DIGEST = "weights"


def settle(core: NodeCore, commands: list[Command], now_s: float) -> list[Command]:
    """Carries out starts, loads, joins, sleep and waking until there are none; returns the other commands, in order."""
    said: list[Command] = []
    todo = list(commands)
    while todo:
        command = todo.pop(0)
        answers = answers_to(command)
        if not answers:
            said.append(command)
        for answer in answers:
            todo += core.handle(answer, now_s)
    return said


def answers_to(command: Command) -> list[NodeEvent]:
    match command:
        case StartWorker():
            return [WorkerReady(worker_id=command.worker_id, pid=1)]
        case SeedWorker():
            return [WorkerSeeded(worker_id=command.worker_id, seq=command.seq, digest=DIGEST)]
        case FormGroup():
            return [GroupJoined(worker_id=worker_id, seq=command.seq) for worker_id in command.ranks]
        case SendToWorker(message=SleepWorker(seq=seq)):
            return [WorkerSlept(worker_id=command.worker_id, seq=seq)]
        case SendToWorker(message=WakeWorker(seq=seq)):
            return [WorkerWoke(worker_id=command.worker_id, seq=seq)]
        case _:
            return []
