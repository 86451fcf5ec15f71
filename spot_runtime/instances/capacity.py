"""A step function of time with bounded memory: slots that are held, or take work. Knows nothing of nodes."""

from __future__ import annotations

from bisect import bisect_right

POINTS_MAX = 4096


class StepFunction:
    """Piecewise constant, 0 before its first point, its last value for ever after.

    Invariant: `_starts_s` ascend strictly, one value each, never two equal values in a row. Beyond `points_max` points the older half is
    made coarser by averaging neighbours: the integral from before the first point on stays exact, only its shape within the old part fades.
    """

    def __init__(self, points_max: int = POINTS_MAX) -> None:
        assert points_max >= 4, f"points_max = {points_max}: must be >= 4"
        self.points_max = points_max
        self._starts_s: list[float] = []
        self._values: list[float] = []

    def set(self, start_s: float, value: float) -> None:
        """From `start_s` on the value is `value`. Time only goes forward; a second value at the same time replaces the first."""
        assert not self._starts_s or start_s >= self._starts_s[-1], f"{start_s} s is before {self._starts_s[-1]} s"
        if self._starts_s and self._starts_s[-1] == start_s:
            del self._starts_s[-1], self._values[-1]
        if value != self.last:
            self._starts_s.append(start_s)
            self._values.append(value)
        if len(self._starts_s) > self.points_max:
            self._coarsen()

    def at(self, time_s: float) -> float:
        """The value at `time_s`."""
        place = bisect_right(self._starts_s, time_s)
        return self._values[place - 1] if place else 0.0

    @property
    def last(self) -> float:
        """The value since the last point."""
        return self._values[-1] if self._values else 0.0

    def integral(self, from_s: float, to_s: float) -> float:
        """Integral over [from_s, to_s]: slots make slot-seconds."""
        assert from_s <= to_s, f"from {from_s} s to {to_s} s"
        total, place = 0.0, max(0, bisect_right(self._starts_s, from_s) - 1)
        while place < len(self._starts_s) and self._starts_s[place] < to_s:
            begin_s = max(from_s, self._starts_s[place])
            total += self._values[place] * (min(to_s, self._end_s(place, to_s)) - begin_s)
            place += 1
        return total

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """(start_s, value) of every piece, oldest first."""
        return tuple(zip(self._starts_s, self._values, strict=True))

    def _end_s(self, place: int, otherwise_s: float) -> float:
        return self._starts_s[place + 1] if place + 1 < len(self._starts_s) else otherwise_s

    def _coarsen(self) -> None:
        half = len(self._starts_s) // 4 * 2
        merged = []
        for place in range(0, half, 2):
            begin_s, end_s = self._starts_s[place], self._starts_s[place + 2]
            merged.append((begin_s, self.integral(begin_s, end_s) / (end_s - begin_s)))
        self._replace(half, merged)

    def _replace(self, count: int, pieces: list[tuple[float, float]]) -> None:
        """Puts `pieces` in place of the first `count` points."""
        rest = list(self.points[count:])
        self._starts_s, self._values = [], []
        for start_s, value in pieces + rest:
            if value != self.last:
                self._starts_s.append(start_s)
                self._values.append(value)
