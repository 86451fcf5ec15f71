"""Pulls of groups: which wait for work, and which were answered with what. Never knows the state of a request.

Rules: one question a group; a newer one replaces it, room 0 withdraws it. Questions are numbered upwards by whoever asks. One that is said
again is no new question and has the same answer, so that what piled up while control stood still takes no more than its share; one from
before the last answer is over. Number 0 is always new.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from spot_runtime.messages import Assignment, PullWork
from spot_runtime.types import NodeId, RequestId

PARKED_PULLS_MAX = 4096


@dataclass(frozen=True)
class Grant:
    """Assignments for one group, in answer to its pull."""

    node_id: NodeId
    group_id: str
    assignments: tuple[Assignment, ...]
    number: int = 0


@dataclass
class Answer:
    """The newest pull of a group that was answered, and the requests that it got."""

    number: int
    request_ids: list[RequestId]


class ParkedPulls:
    """`parked`: the latest unanswered pull of each group, oldest first. `_answers`: by group, the most recently answered last."""

    def __init__(self) -> None:
        self.parked: OrderedDict[tuple[NodeId, str], PullWork] = OrderedDict()
        self._answers: OrderedDict[tuple[NodeId, str], Answer] = OrderedDict()

    def given(self, pull: PullWork) -> Sequence[RequestId]:
        """The requests that this very pull was answered with; none where it was not answered, or is withdrawn by this."""
        answer = self._answers.get((pull.node_id, pull.group_id))
        return answer.request_ids if answer and pull.room > 0 and answer.number == pull.number else ()

    def take(self, pull: PullWork) -> bool:
        """Parks or withdraws; returns whether there is something to answer. One that is only said again keeps its place."""
        key = (pull.node_id, pull.group_id)
        answer = self._answers.get(key)
        if pull.room <= 0:
            self.parked.pop(key, None)
            return False
        if answer is not None and 0 < pull.number < answer.number:
            return False
        if key in self.parked and not 0 < pull.number == self.parked[key].number:
            del self.parked[key]
        self.parked[key] = pull
        while len(self.parked) > PARKED_PULLS_MAX:
            self.parked.popitem(last=False)
        return True

    def answered(self, pull: PullWork) -> None:
        del self.parked[pull.node_id, pull.group_id]

    def book(self, node_id: NodeId, group_id: str, number: int, request_id: RequestId) -> None:
        """Remembers under which pull a request was leased; a bounded number of groups."""
        if not number:
            return
        key = (node_id, group_id)
        answer = self._answers.get(key)
        if answer is None or answer.number < number:
            self._answers[key] = answer = Answer(number, [])
            self._answers.move_to_end(key)
            while len(self._answers) > PARKED_PULLS_MAX:
                self._answers.popitem(last=False)
        if answer.number == number:
            answer.request_ids.append(request_id)

    def withdraw(self, node_id: NodeId) -> None:
        """Forgets a node's parked pulls."""
        for key in [key for key in self.parked if key[0] == node_id]:
            del self.parked[key]

    def forget_answers(self, node_id: NodeId) -> None:
        """Another process of that name counts its pulls anew."""
        for key in [key for key in self._answers if key[0] == node_id]:
            del self._answers[key]
