"""How long things take on this machine, as measured. Owns the averages that a drain is planned with; never decides what to let go of."""

from __future__ import annotations

from dataclasses import dataclass, field

WEIGHT = 0.3
"""Of the newest measurement, where it is shorter than the average; a longer one counts in full, so that plans err on the safe side."""


@dataclass
class Duration:
    """Seconds; follows a longer measurement at once and a shorter one slowly. `guess_s` until something was measured."""

    guess_s: float
    measured_s: float | None = None

    @property
    def value_s(self) -> float:
        return self.guess_s if self.measured_s is None else self.measured_s

    def observe(self, elapsed_s: float) -> None:
        before_s = elapsed_s if self.measured_s is None else self.measured_s
        self.measured_s = max(elapsed_s, before_s + WEIGHT * (elapsed_s - before_s))


@dataclass
class Pace:
    """`step`: one denoising step of a batch. `decode`: one decoding of a batch. `commit`: from the order to the receipt. `finish`: from
    decoded to judged. An unknown step takes forever: nothing is begun that was never seen to end.
    """

    step: Duration = field(default_factory=lambda: Duration(float("inf")))
    decode: Duration = field(default_factory=lambda: Duration(1.0))
    commit: Duration = field(default_factory=lambda: Duration(1.0))
    finish: Duration = field(default_factory=lambda: Duration(2.0))
