"""What a job's requests may have, and before whom: priorities and pool rules. Knows no single request.

Rules (paper §4.3.4, §4.5): rollout before leftover exploration before exploration before evaluation. Exploration is for spot groups only
until the trainer is done, evaluation while there is spot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from spot_runtime.messages import PullWork
from spot_runtime.types import JobId, Op, PolicyRef, RequestState

PRIORITY = {Op.ROLLOUT: 0, Op.EXPLORE: 2, Op.EVALUATE: 3}
LEFTOVER_PRIORITY = 1


@dataclass
class Claim:
    """What a job's requests may have: `ready` once their prompts are encoded, `everywhere` once reserved slots may take them too (the
    trainer is done, paper §4.3.4). Nothing more of it begins while it is `paused`.

    Once it is `closed` nothing begins again either: what comes back unscored is dropped.

    `policy` is what a sample that has yet to begin is drawn with, if not what its request says; `size` is (height, width) of all samples.
    `tally` counts its records by state, `unfinished` those in no final one, `reward_sum` adds up what is scored; `moved_s` is when a
    record last changed.
    """

    job_id: JobId
    sequence: int
    op: Op
    ready: bool
    everywhere: bool
    policy: PolicyRef | None = None
    size: tuple[int, int] = (0, 0)
    paused: bool = False
    closed: bool = False
    tally: dict[RequestState, int] = field(default_factory=lambda: dict.fromkeys(RequestState, 0))
    unfinished: int = 0
    reward_sum: float = 0.0
    moved_s: float = 0.0

    @property
    def pending(self) -> int:
        return self.tally[RequestState.PENDING]

    @property
    def total(self) -> int:
        return sum(self.tally.values())

    @property
    def rank(self) -> tuple[int, int]:
        leftover = self.op is Op.EXPLORE and self.everywhere
        return (LEFTOVER_PRIORITY if leftover else PRIORITY[self.op], self.sequence)

    def fits(self, pull: PullWork) -> bool:
        """Whether it gives work out, of a size that the group's arena holds."""
        return (
            self.ready and not self.paused and (pull.height in (0, self.size[0])) and (pull.width in (0, self.size[1]))
        )

    def open_to_reserved(self, spot_slots: int) -> bool:
        """Pool rules: the spot pool may take all; evaluation rides on spot while there is any."""
        return self.op is Op.ROLLOUT or self.everywhere or (self.op is Op.EVALUATE and spot_slots == 0)
