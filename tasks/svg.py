"""Two small charts as inline SVG: lines over iterations, bars over time. Owns geometry; colours come from the page's style sheet.

Never reads data of its own, and draws nothing but what it is given. All text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 860
"""User units; the drawing scales with the page."""
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 14, 40
LABEL_CHARACTERS_WIDTH = 7.0


@dataclass(frozen=True)
class Series:
    """One line: (x, y) points in order. `style` is the class that colours it."""

    name: str
    style: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Bar:
    """One bar: seconds from `start_s` to `end_s` in row `row`. `note` shows on hover."""

    row: int
    start_s: float
    end_s: float
    style: str
    note: str


def line_chart(series: Sequence[Series], *, x_label: str, height: int = 280) -> str:
    """Lines with dots and a legend; y from 0 to the next tenth above the highest value, at least 0.1."""
    points = [point for line in series for point in line.points]
    x_max = max([x for x, _ in points] or [1.0]) or 1.0
    y_max = max(0.1, math.ceil(max([y for _, y in points] or [0.0]) * 10 - 1e-9) / 10)
    plot = _Plot(x_max, y_max, height)
    body = [plot.y_axis(), plot.x_axis(_ticks(x_max, whole=True), x_label)]
    for place, line in enumerate(series):
        body.append(plot.line(line))
        body.append(_legend(place, line.name, line.style))
    return _svg(height, WIDTH, body, "validation and reward over iterations")


def timeline(
    rows: Sequence[str], bars: Sequence[Bar], legend: Sequence[tuple[str, str]], *, row_height: int = 26
) -> str:
    """Bars by row over seconds; `legend` has (name, style) pairs. The drawing grows with the number of bars and may scroll."""
    end_s = max([bar.end_s for bar in bars] or [1.0]) or 1.0
    width = max(WIDTH, min(6000, 12 * len(bars)))
    left = 20 + LABEL_CHARACTERS_WIDTH * max(len(row) for row in rows)
    scale = (width - left - RIGHT) / end_s
    top = TOP + 22
    height = top + row_height * len(rows) + BOTTOM
    body = [
        f'<text class="axis" x="{left - 10:.0f}" y="{top + row_height * (place + 0.62):.1f}" text-anchor="end">{escape(name)}</text>'
        for place, name in enumerate(rows)
    ]
    for tick in _ticks(end_s, whole=False):
        x = left + tick * scale
        body.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - BOTTOM + 4}"/>')
        body.append(f'<text class="axis" x="{x:.1f}" y="{height - BOTTOM + 20}" text-anchor="middle">{tick:g} s</text>')
    for bar in bars:
        x, length = left + bar.start_s * scale, max(1.0, (bar.end_s - bar.start_s) * scale - 1)
        y = top + row_height * bar.row + 4
        body.append(
            f'<rect class="{bar.style}" x="{x:.1f}" y="{y}" width="{length:.1f}" height="{row_height - 8}" rx="2">'
            f"<title>{escape(bar.note)}</title></rect>"
        )
    body += [_legend(place, name, style, left=left) for place, (name, style) in enumerate(legend)]
    return _svg(height, width, body, "phases by pool over time")


class _Plot:
    """Maps data to user units."""

    def __init__(self, x_max: float, y_max: float, height: int) -> None:
        self._x_max, self._y_max, self._height = x_max, y_max, height

    def x(self, value: float) -> float:
        return LEFT + value / self._x_max * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return self._height - BOTTOM - value / self._y_max * (self._height - TOP - BOTTOM - 22)

    def y_axis(self) -> str:
        parts = []
        for value in _ticks(self._y_max, whole=False):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="axis" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
        return "".join(parts)

    def x_axis(self, ticks: Sequence[float], label: str) -> str:
        y = self._height - BOTTOM + 18
        parts = [
            f'<text class="axis" x="{self.x(tick):.1f}" y="{y}" text-anchor="middle">{tick:g}</text>' for tick in ticks
        ]
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text class="axis" x="{middle:.0f}" y="{y + 17}" text-anchor="middle">{escape(label)}</text>')
        return "".join(parts)

    def line(self, series: Series) -> str:
        places = [(self.x(x), self.y(y)) for x, y in series.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dots = "".join(
            f'<circle class="{series.style}" cx="{px:.1f}" cy="{py:.1f}" r="3.2">'
            f"<title>{escape(series.name)} at {x:g}: {y:.3f}</title></circle>"
            for (px, py), (x, y) in zip(places, series.points, strict=True)
        )
        return f'<polyline class="{series.style}" points="{path}"/>{dots}'


def _legend(place: int, name: str, style: str, *, left: float = LEFT) -> str:
    x = left + place * 190
    return (
        f'<rect class="{style}" x="{x:.0f}" y="{TOP - 6}" width="12" height="12" rx="2"/>'
        f'<text class="axis" x="{x + 18:.0f}" y="{TOP + 4}">{escape(name)}</text>'
    )


def _ticks(top: float, *, whole: bool) -> list[float]:
    """Round values from 0 to `top`, about six of them."""
    step = 10 ** math.floor(math.log10(top / 5)) if top > 0 else 1.0
    step = next((step * factor for factor in (1, 2, 5, 10) if top / (step * factor) <= 6), step * 10)
    if whole:
        step = max(1.0, round(step))
    return [round(step * place, 9) for place in range(int(top / step + 1e-9) + 1)]


def _svg(height: float, width: float, body: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="min-width:{min(width, WIDTH) * 0.75:.0f}px;width:{width / WIDTH:.0%}" '
        f'role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'
    )
