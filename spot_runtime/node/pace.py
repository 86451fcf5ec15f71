"""How long things take on this machine, as measured. Owns the averages that a drain is planned with; never decides what to let go of."""

from __future__ import annotations

from dataclasses import dataclass, field

WEIGHT = 0.3
"""Of the newest measurement, where it is shorter than the average; a longer one counts in full, so that plans err on the safe side."""
GUESS_LATENTS_S = 32.0
"""Latents a second that a store is assumed to take before it was seen to."""
ELAPSED_S_MIN = 1e-4


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
class Bandwidth:
    """Bytes a second that the store takes, all commits under way together; slower is believed at once and faster slowly.

    n commits under way get 1/n of the store each, so one of S bytes from t_0 to t_1 shows S / (V(t_1) - V(t_0)), where
    V(t) = ∫ dt / n(t) is `shared_s`.
    """

    guess_bytes_s: float
    measured_bytes_s: float | None = None
    shared_s: float = 0.0
    _at_s: float = 0.0

    @property
    def value_bytes_s(self) -> float:
        return self.guess_bytes_s if self.measured_bytes_s is None else self.measured_bytes_s

    def advance(self, now_s: float, under_way: int) -> None:
        """So many commits have been under way since it was told last."""
        if under_way:
            self.shared_s += (now_s - self._at_s) / under_way
        self._at_s = now_s

    def observe(self, size_bytes: int, since_shared_s: float) -> None:
        """A commit of `size_bytes` that began at `shared_s` = `since_shared_s` ended now."""
        seen_bytes_s = size_bytes / max(self.shared_s - since_shared_s, ELAPSED_S_MIN)
        before_bytes_s = seen_bytes_s if self.measured_bytes_s is None else self.measured_bytes_s
        self.measured_bytes_s = min(seen_bytes_s, before_bytes_s + WEIGHT * (seen_bytes_s - before_bytes_s))

    def seconds(self, size_bytes: float) -> float:
        """How long the store takes for so much."""
        return size_bytes / self.value_bytes_s


@dataclass
class Pace:
    """`step`: one denoising step of a batch. `decode`: one decoding of a batch. `commit`: from the order to the receipt. `finish`: from
    decoded to judged. `store`: all commits together. An unknown step takes forever: nothing is begun that was never seen to end.
    """

    step: Duration = field(default_factory=lambda: Duration(float("inf")))
    decode: Duration = field(default_factory=lambda: Duration(1.0))
    commit: Duration = field(default_factory=lambda: Duration(1.0))
    finish: Duration = field(default_factory=lambda: Duration(2.0))
    store: Bandwidth = field(default_factory=lambda: Bandwidth(GUESS_LATENTS_S))

    @classmethod
    def for_latents(cls, latent_bytes: int) -> Pace:
        """Of a machine that has measured nothing yet and whose samples have latents of so many bytes."""
        return cls(store=Bandwidth(GUESS_LATENTS_S * latent_bytes))
