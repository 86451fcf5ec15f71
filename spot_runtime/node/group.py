"""One generation of a sequence-parallel group: its ranks, the command that they are at, its legal transitions. Never decides what it does.

A change of ranks is a new group with the next generation number, a fresh rendezvous and a fresh process group; a generation never comes
back. Only the lead writes to the latent arena, so what a batch may still write is settled by the lead's answer or its death.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from spot_runtime.messages import WorkerFailed
from spot_runtime.node.flight import Flight
from spot_runtime.node.plan import SlotGroup
from spot_runtime.types import GroupId, NodeId, RequestId, WorkerId


class GroupState(StrEnum):
    FORMING = "forming"
    IDLE = "idle"
    BUSY = "busy"
    DOZING = "dozing"
    ASLEEP = "asleep"
    WAKING = "waking"
    BROKEN = "broken"


class GroupEvent(StrEnum):
    ORDERED = "ordered"
    TOLD_TO_SLEEP = "told_to_sleep"
    TOLD_TO_WAKE = "told_to_wake"
    ANSWERED = "answered"
    FAILED = "failed"


S, E = GroupState, GroupEvent
TRANSITIONS: dict[tuple[GroupState, GroupEvent], GroupState] = {
    (S.FORMING, E.ANSWERED): S.IDLE,
    (S.IDLE, E.ORDERED): S.BUSY,
    (S.BUSY, E.ANSWERED): S.IDLE,
    (S.IDLE, E.TOLD_TO_SLEEP): S.DOZING,
    (S.DOZING, E.ANSWERED): S.ASLEEP,
    (S.ASLEEP, E.TOLD_TO_WAKE): S.WAKING,
    (S.IDLE, E.TOLD_TO_WAKE): S.WAKING,
    (S.WAKING, E.ANSWERED): S.IDLE,
    (S.BROKEN, E.ANSWERED): S.BROKEN,
    **{(state, E.FAILED): S.BROKEN for state in S},
}
"""ANSWERED: by every rank. FAILED: one rank died or refused; the generation only ends.

ASLEEP: the weights of all ranks are off the device. IDLE is told to wake where ranks were asleep in an earlier generation.
"""


@dataclass
class Group:
    """`awaited` are the ranks that have not answered the command `seq`; `batch` is what it works on, with the arena slots that the lead may
    write until it answers. `is_cached`: the batch has step caches, all of it or none; `remembered` are its requests and the denoising step
    that the cache of each rank goes on with once the rank has answered. `has_dead`: a rank is known to be dead, so nobody is searched for.
    `join_error`: why it did not form.
    """

    group_id: GroupId
    generation: int
    slots: SlotGroup
    ranks: tuple[WorkerId, ...]
    seq: int
    since_s: float
    state: GroupState = GroupState.FORMING
    awaited: set[WorkerId] = field(default_factory=set)
    batch: tuple[tuple[RequestId, int], ...] = ()
    is_cached: bool = False
    remembered: tuple[tuple[Flight, int], ...] = ()
    is_decoding: bool = False
    has_dead: bool = False
    join_error: WorkerFailed | None = None

    @property
    def lead(self) -> WorkerId:
        return self.ranks[0]

    @property
    def degree(self) -> int:
        return len(self.ranks)

    @property
    def takes_work(self) -> bool:
        """Whether its ranks have met: it works, or will as soon as it is awake."""
        return self.state not in (GroupState.FORMING, GroupState.BROKEN)

    @property
    def is_awake(self) -> bool:
        return self.state in (GroupState.IDLE, GroupState.BUSY)

    @property
    def has_ended(self) -> bool:
        """Whether a broken generation can be left behind: the culprit is known and nothing is written any more, or all have answered."""
        settled = not self.batch if self.has_dead else not self.awaited
        return self.state is GroupState.BROKEN and settled

    def move(self, event: GroupEvent, now_s: float) -> None:
        target = TRANSITIONS.get((self.state, event))
        assert target is not None, f"{self.group_id}: {event} cannot happen in state {self.state}"
        if target is not self.state:
            self.since_s = now_s
        self.state = target

    def answer(self, worker_id: WorkerId, now_s: float) -> None:
        """One rank has done its part; the last one's answer frees the group."""
        if worker_id in self.awaited:
            self.awaited.remove(worker_id)
            if not self.awaited:
                self.move(GroupEvent.ANSWERED, now_s)


def group_id(node_id: NodeId, slots: SlotGroup) -> GroupId:
    """Named by its first slot, so that a reshaped group keeps its name towards control."""
    return GroupId(f"{node_id}-g{slots[0]}")
