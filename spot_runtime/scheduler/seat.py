"""The trainer as control knows it: one process has the seat, and at most one order is out. Never decides what is ordered, or when.

Rules: whoever speaks first has the seat until it is silent for a lease; a second one is refused meanwhile. Orders are numbered, upwards
over restarts of control too. A job that is ordered again keeps its earlier numbers: whoever was asked may answer,
also after another took the seat, for any trainer makes the same of it. Only the newest order can fail the job. Number 0 is an order of an
earlier life of control; an answer to it counts if it comes from the seat.
"""

from __future__ import annotations

from dataclasses import dataclass

from spot_runtime.messages import PromptsEncoded, TrainerFailed, TrainingFinished
from spot_runtime.types import JobId

Answer = PromptsEncoded | TrainingFinished | TrainerFailed


@dataclass
class TrainerSeat:
    """Who has it, when it last spoke, since when its silence counts, and the order it is at work on.

    `orders` are the numbers under which `job_id` was ordered, the newest last; empty while nothing is.
    """

    trainer_id: str = ""
    seen_s: float = 0.0
    patient_since_s: float = 0.0
    job_id: JobId | None = None
    ordered_s: float = 0.0
    orders: tuple[int, ...] = ()
    last_order: int = 0

    @property
    def is_free(self) -> bool:
        return bool(self.trainer_id) and self.job_id is None

    def admits(self, trainer_id: str) -> bool:
        return self.trainer_id in ("", trainer_id)

    def order(self, job_id: JobId, now_s: float) -> int:
        """Gives the job to whoever has the seat; returns the number of the order."""
        earlier = self.orders if job_id == self.job_id else ()
        self.last_order = max(self.last_order + 1, int(now_s * 1000))
        self.job_id, self.ordered_s, self.orders = job_id, now_s, (*earlier, self.last_order)
        return self.last_order

    def adopt(self, job_id: JobId, now_s: float) -> None:
        """The trainer is at work on an order of an earlier life of control."""
        self.job_id, self.ordered_s, self.orders = job_id, now_s, (0,)

    def vacate(self) -> None:
        self.job_id, self.orders = None, ()

    def is_answered_by(self, answer: Answer) -> bool:
        """Whether this answers what is out. With nothing out, as after a restart, any answer may; its job decides."""
        if self.job_id is None:
            return self.admits(answer.trainer_id)
        if self.job_id != answer.job_id:
            return False
        if not self.admits(answer.trainer_id):
            return answer.order > 0 and answer.order in self.orders and not isinstance(answer, TrainerFailed)
        valid = self.orders[-1:] if isinstance(answer, TrainerFailed) else self.orders
        return answer.order == 0 or 0 in valid or answer.order in valid

    def is_silent(self, now_s: float, deadline_s: float) -> bool:
        return now_s - max(self.seen_s, self.patient_since_s) > deadline_s
