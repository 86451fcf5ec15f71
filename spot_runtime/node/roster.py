"""Which process serves which slot: standbys, seeding, replacement, release. Never knows groups or requests, never touches a process.

A process is started without a slot, imports everything and waits as a standby, touching neither weights nor GPU. A vacant slot takes the
oldest standby, which gets the weights from what a peer of this machine has left in shared memory, or from the model folder where no peer
has or where the copy was found wrong. Only then is it SEEDED and may be in a group. A process is never used again: each has its own id.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

from spot_runtime.messages import WorkerFailed, WorkerSeeded
from spot_runtime.node.commands import Command, FailNode, KillWorker, ReleaseWorker, SeedWorker, StartWorker
from spot_runtime.types import NodeId, PolicyRef, WorkerId

FAILED_STARTS_MAX = 3
"""Processes in a row that may end before they are seeded, while none serves; then the node ends with the last one's error."""
RESPAWN_S = 1.0
"""Wait before another process is started, times the starts that failed in a row."""
RESPAWN_S_MAX = 30.0
STANDBY_DELAY_S = 1.0
"""Wait before a standby that was given a slot is replaced: its import must not slow down the group that has just formed."""
RELEASE_S = 3.0
"""A released process that is still there after this is killed."""


class WorkerState(StrEnum):
    STARTING = "starting"
    STANDBY = "standby"
    LOADING = "loading"
    SEEDED = "seeded"
    ENDING = "ending"


class WorkerEvent(StrEnum):
    IMPORTED = "imported"
    ASSIGNED = "assigned"
    GOT_WEIGHTS = "got_weights"
    GIVEN_UP = "given_up"


S, E = WorkerState, WorkerEvent
TRANSITIONS: dict[tuple[WorkerState, WorkerEvent], WorkerState] = {
    (S.STARTING, E.IMPORTED): S.STANDBY,
    (S.STANDBY, E.ASSIGNED): S.LOADING,
    (S.LOADING, E.GOT_WEIGHTS): S.SEEDED,
    **{(state, E.GIVEN_UP): S.ENDING for state in S},
}
"""GIVEN_UP: told to end, or killed; its death is reported like any other."""


@dataclass
class Worker:
    """One process. `slot` is its slot from assignment until its death, `seq` its order to load, `policies` what it keeps bound, the least
    recently used first. `is_asleep` from the order to sleep until it has answered one to wake, through whatever groups.
    """

    worker_id: WorkerId
    since_s: float
    state: WorkerState = WorkerState.STARTING
    slot: int | None = None
    seq: int = 0
    policies: OrderedDict[PolicyRef, None] = field(default_factory=OrderedDict)
    is_asleep: bool = False

    def move(self, event: WorkerEvent, now_s: float) -> None:
        target = TRANSITIONS.get((self.state, event))
        assert target is not None, f"{self.worker_id}: {event} cannot happen in state {self.state}"
        self.state, self.since_s = target, now_s


class Roster:
    """Slots and processes of one machine.

    `present` are the slots that the machine has, `leave_by_s` those that it is about to lose, `occupants` the process of each slot, from
    its assignment until its death. `digest` is what all seeded weights have in common. `failed_starts` counts processes that ended before
    they were seeded, since the last one that was.
    """

    def __init__(
        self, node_id: NodeId, slots: Collection[int], *, standbys: int, start_deadline_s: float, now_s: float
    ) -> None:
        self.node_id, self.standbys, self.start_deadline_s = node_id, standbys, start_deadline_s
        self.present = set(slots)
        self.leave_by_s: dict[int, float] = {}
        self.occupants: dict[int, WorkerId] = {}
        self.workers: dict[WorkerId, Worker] = {}
        self.digest = ""
        self.failed_starts = 0
        self.empty_since_s: float | None = None if self.present else now_s
        self._from_disk: set[int] = set()
        self._started = self._seq = 0

    # ---- what there is ----

    def serving(self) -> dict[int, Worker]:
        """Seeded workers by slot, those of slots that leave not among them."""
        found = {slot: self.workers[worker_id] for slot, worker_id in self.occupants.items() if slot in self.present}
        return {slot: worker for slot, worker in found.items() if worker.state is WorkerState.SEEDED}

    @property
    def is_complete(self) -> bool:
        return len(self.serving()) == len(self.present)

    @property
    def waiting(self) -> int:
        """Standbys that have imported everything."""
        return len(self._in(WorkerState.STANDBY))

    def _in(self, *states: WorkerState) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.state in states]

    # ---- what happened ----

    def change_slots(self, present: Collection[int], leave_by_s: float, now_s: float) -> None:
        """The machine has these slots from now on; those that it loses are to be free by `leave_by_s`."""
        for slot in self.present - set(present):
            if slot in self.occupants:
                self.leave_by_s[slot] = leave_by_s
        for slot in present:
            self.leave_by_s.pop(slot, None)
        self.present = set(present)
        if self.present:
            self.empty_since_s = None
        elif self.empty_since_s is None:
            self.empty_since_s = now_s

    def imported(self, worker: Worker, now_s: float) -> None:
        if worker.state is WorkerState.STARTING:
            worker.move(WorkerEvent.IMPORTED, now_s)

    def got_weights(self, worker: Worker, event: WorkerSeeded, now_s: float) -> list[Command]:
        """Lets it serve where its weights are those of the others."""
        if worker.state is not WorkerState.LOADING or event.seq != worker.seq:
            return []
        if self.digest and event.digest != self.digest:
            return self._loading_failed(worker, now_s)
        self.digest = event.digest
        worker.move(WorkerEvent.GOT_WEIGHTS, now_s)
        self.failed_starts = 0
        if worker.slot is not None:
            self._from_disk.discard(worker.slot)
        return []

    def failed(self, worker: Worker, event: WorkerFailed, now_s: float) -> list[Command]:
        """It could not load. What is wrong with the model itself ends the node at once."""
        if worker.state is not WorkerState.LOADING or event.seq != worker.seq:
            return []
        is_lasting = not self.digest and event.error_class not in ("ClusterError", "UnseededError")
        if is_lasting:
            return [FailNode(worker.worker_id, event.error_class, event.error)]
        return self._loading_failed(worker, now_s, event.error_class, event.error)

    def died(self, worker: Worker) -> list[Command]:
        """Frees its slot for another."""
        del self.workers[worker.worker_id]
        if worker.slot is not None:
            del self.occupants[worker.slot]
            if worker.slot not in self.present:
                self.leave_by_s.pop(worker.slot, None)
        if worker.state is not WorkerState.ENDING and worker.state is not WorkerState.SEEDED:
            return self._count_failure(worker)
        return []

    def _loading_failed(self, worker: Worker, now_s: float, error_class: str = "", error: str = "") -> list[Command]:
        """The next process of this slot takes the weights from the model folder."""
        if worker.slot is not None:
            self._from_disk.add(worker.slot)
        worker.move(WorkerEvent.GIVEN_UP, now_s)
        return [KillWorker(worker.worker_id), *self._count_failure(worker, error_class, error)]

    def _count_failure(self, worker: Worker, error_class: str = "", error: str = "") -> list[Command]:
        self.failed_starts += 1
        if self.failed_starts >= FAILED_STARTS_MAX and not self._in(WorkerState.SEEDED):
            return [FailNode(worker.worker_id, error_class, error)]
        return []

    # ---- what to do ----

    def staff(self, busy: Collection[WorkerId], now_s: float, *, seeds: bool = True) -> list[Command]:
        """Fills vacant slots if it `seeds`, keeps standbys, lets go of what has no slot any more; `busy` are the workers in a group."""
        return [*self._release(busy, now_s), *(self._fill(now_s) if seeds else ()), *self._start(now_s)]

    def kill(self, worker_id: WorkerId, now_s: float) -> list[Command]:
        worker = self.workers.get(worker_id)
        if worker is None or worker.state is WorkerState.ENDING:
            return []
        worker.move(WorkerEvent.GIVEN_UP, now_s)
        return [KillWorker(worker_id)]

    def kill_late(self, now_s: float) -> list[Command]:
        """Ends those that take too long to start or load, or to leave."""
        out: list[Command] = []
        for worker in self._in(WorkerState.STARTING, WorkerState.LOADING):
            if now_s - worker.since_s > self.start_deadline_s:
                out += self._loading_failed(worker, now_s, "ClusterError", "not ready in time")
        for worker in self._in(WorkerState.SEEDED):
            if worker.slot is not None and now_s >= self.leave_by_s.get(worker.slot, now_s + 1.0):
                out += self.kill(worker.worker_id, now_s)
        for worker in self._in(WorkerState.ENDING):
            if now_s - worker.since_s > RELEASE_S:
                worker.since_s = now_s
                out.append(KillWorker(worker.worker_id))
        return out

    def _release(self, busy: Collection[WorkerId], now_s: float) -> list[Command]:
        out: list[Command] = []
        for slot in self.leave_by_s:
            worker = self.workers.get(self.occupants.get(slot, WorkerId("")))
            if worker is None or worker.state is WorkerState.ENDING or worker.worker_id in busy:
                continue
            if worker.state is WorkerState.SEEDED:
                worker.move(WorkerEvent.GIVEN_UP, now_s)
                out.append(ReleaseWorker(worker.worker_id))
            else:
                out += self.kill(worker.worker_id, now_s)
        vacant = sum(slot not in self.occupants for slot in self.present)
        for worker in self._in(WorkerState.STANDBY)[vacant + self.standbys :]:
            worker.move(WorkerEvent.GIVEN_UP, now_s)
            out.append(ReleaseWorker(worker.worker_id))
        return out

    def _fill(self, now_s: float) -> list[Command]:
        """One process at a time reads the model folder; the others wait for what it leaves in shared memory."""
        out: list[Command] = []
        waiting = self._in(WorkerState.STANDBY)
        for slot in sorted(self.present - self.occupants.keys()):
            has_peer = bool(self.digest) and slot not in self._from_disk
            if not waiting or (not self.digest and self._in(WorkerState.LOADING)):
                break
            worker = waiting.pop(0)
            self._seq += 1
            worker.slot, worker.seq = slot, self._seq
            self.occupants[slot] = worker.worker_id
            worker.move(WorkerEvent.ASSIGNED, now_s)
            out.append(SeedWorker(worker.worker_id, self._seq, slot, from_peer=has_peer, digest=self.digest))
        return out

    def _start(self, now_s: float) -> list[Command]:
        """Processes for all slots, then standbys once the slots are served."""
        unassigned = len(self._in(WorkerState.STARTING, WorkerState.STANDBY))
        vacant = sum(slot not in self.occupants for slot in self.present)
        standbys = self.standbys if self.is_complete else 0
        missing = max(0, vacant + standbys - unassigned)
        delay_s = min(RESPAWN_S_MAX, RESPAWN_S * self.failed_starts)
        if not vacant:
            delay_s += STANDBY_DELAY_S
        return [self._start_one(delay_s, now_s) for _ in range(missing)]

    def _start_one(self, delay_s: float, now_s: float) -> Command:
        worker_id = WorkerId(f"{self.node_id}-w{self._started}")
        self._started += 1
        self.workers[worker_id] = Worker(worker_id, now_s + delay_s)
        return StartWorker(worker_id, delay_s)
