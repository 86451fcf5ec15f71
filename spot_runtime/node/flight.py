"""One request on its way through a node: its stages, its legal transitions, its record. Never decides what runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from spot_runtime.messages import Assignment
from spot_runtime.node.events import SampleJudged, SampleStored
from spot_runtime.types import GroupId, RequestId, WorkerId


class Stage(StrEnum):
    """Where a request stands on the node."""

    FETCHING = "fetching"
    WAITING = "waiting"
    WORKING = "working"
    FINISHING = "finishing"
    RETURNING = "returning"
    REPORTED = "reported"


class FlightEvent(StrEnum):
    """What can happen to it."""

    FETCHED = "fetched"
    BATCHED = "batched"
    STEPPED = "stepped"
    DECODED = "decoded"
    INTERRUPTED = "interrupted"
    GIVEN_UP = "given_up"
    JUDGED = "judged"


S, E = Stage, FlightEvent
TRANSITIONS: dict[tuple[Stage, FlightEvent], Stage] = {
    (S.FETCHING, E.FETCHED): S.WAITING,
    (S.WAITING, E.BATCHED): S.WORKING,
    (S.WAITING, E.GIVEN_UP): S.RETURNING,
    (S.WORKING, E.STEPPED): S.WAITING,
    (S.WORKING, E.INTERRUPTED): S.WAITING,
    (S.WORKING, E.DECODED): S.FINISHING,
    (S.FINISHING, E.JUDGED): S.REPORTED,
}


@dataclass
class Flight:
    """A request under lease. `denoising_step` steps are done and lie in arena slot `slot`; `holders` are the workers that were given it.
    `memories`: the denoising step that each worker's step cache of it goes on with. `interruptions` counts commands in a row that ended
    without a result.

    `started_s` is when its first command that bore fruit was given, so that its stay is the time it was worked on.
    REPORTED: control was told the result and has not yet acknowledged it by dropping the request. `committed_step` steps are safe under
    `commit_key`; `committing_step` is the one commit that is under way, if any: since `committing_since_s`, of `committing_latents`
    latents, at `committing_shared_s` of `Bandwidth`. `forwards` counts the full ones among the steps taken here, `busy_s` its share of
    the worker's time, that of steps taken twice included.
    """

    assignment: Assignment
    group_id: GroupId
    slot: int
    started_s: float
    denoising_step: int = 0
    stage: Stage = Stage.FETCHING
    holders: set[WorkerId] = field(default_factory=set)
    memories: dict[WorkerId, int] = field(default_factory=dict)
    interruptions: int = 0
    stored: SampleStored | None = None
    judged: SampleJudged | None = None
    finished_s: float = 0.0
    reported_s: float = field(default=0.0)
    done_told: bool = False
    committed_step: int = 0
    commit_key: str = ""
    forwards: int = 0
    busy_s: float = 0.0
    committing_step: int | None = None
    committing_since_s: float = 0.0
    committing_latents: int = 0
    committing_shared_s: float = 0.0

    @property
    def request_id(self) -> RequestId:
        return self.assignment.request.request_id

    @property
    def num_steps(self) -> int:
        return self.assignment.request.params.num_steps

    @property
    def steps_left(self) -> int:
        return max(0, self.num_steps - self.denoising_step)

    @property
    def untold_busy_s(self) -> float:
        return 0.0 if self.done_told else self.busy_s

    @property
    def uncommitted_steps(self) -> int:
        """Denoising steps that would be lost with the node."""
        return self.denoising_step - self.committed_step

    def commit_latents(self) -> int:
        """Latents [L, C] that a commit of now writes: its own, and the window's rows that no commit has yet."""
        start, stop = self.assignment.request.sde_window
        first = max(start, self.committed_step + 1 if self.committed_step else start)
        return 1 + max(0, min(stop + 1, self.denoising_step) - first) * (start < stop)

    @property
    def is_cached(self) -> bool:
        """Whether it may do without some forwards."""
        return self.assignment.request.params.cache_threshold > 0

    @property
    def needs_memory(self) -> bool:
        """Whether its next denoising step is the undisturbed one only where its step cache is."""
        return self.is_cached and 0 < self.denoising_step < self.num_steps

    @property
    def keepers(self) -> set[WorkerId]:
        """Workers whose step cache of it goes on with the next denoising step."""
        return {worker_id for worker_id, step in self.memories.items() if step == self.denoising_step}

    @property
    def effective_steps(self) -> int:
        """Full forwards of the whole sample; without a step cache also those of steps that another node took."""
        return self.forwards if self.is_cached else self.denoising_step

    @property
    def is_denoised(self) -> bool:
        return self.denoising_step >= self.num_steps

    def move(self, event: FlightEvent) -> None:
        target = TRANSITIONS.get((self.stage, event))
        assert target is not None, f"{self.request_id}: {event} cannot happen in stage {self.stage}"
        self.stage = target
