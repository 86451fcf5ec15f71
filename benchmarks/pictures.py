"""Two standalone SVG pictures: stacked phases, and rates over time with marked moments. Owns geometry and colours; never measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 760, 70, 20, 40, 46
COLOURS = ("#3b6ea8", "#d98032", "#5a9a5a", "#a45a9a", "#8a8a8a")
_TEXT = 'font-family="sans-serif" font-size="12" fill="#333"'


def phases(title: str, bars: Mapping[str, Mapping[str, float]]) -> str:
    """One bar a row of `bars`, its phases in seconds side by side."""
    names = list(dict.fromkeys(phase for bar in bars.values() for phase in bar))
    longest_s = max(sum(bar.values()) for bar in bars.values()) or 1.0
    scale = (WIDTH - LEFT - RIGHT - 90) / longest_s
    height = TOP + 40 * len(bars) + BOTTOM
    body = [_text(WIDTH / 2, 18, title, "middle")]
    for row, (label, bar) in enumerate(bars.items()):
        x, y = float(LEFT), TOP + 40 * row
        body.append(_text(LEFT - 8, y + 17, label, "end"))
        for phase, seconds in bar.items():
            colour = COLOURS[names.index(phase) % len(COLOURS)]
            body.append(
                f'<rect x="{x:.1f}" y="{y}" width="{seconds * scale:.1f}" height="26" fill="{colour}">'
                f"<title>{escape(phase)}: {seconds:.3f} s</title></rect>"
            )
            x += seconds * scale
        body.append(_text(x + 6, y + 17, f"{sum(bar.values()):.2f} s", "start"))
    body += _legend(names, height - 16)
    return _svg(height, body)


def rates(title: str, lines: Mapping[str, Sequence[tuple[float, float]]], marks: Mapping[str, float]) -> str:
    """Lines of (seconds, rate), and moments as dashed verticals."""
    height = 320
    x_max = max(x for line in lines.values() for x, _ in line) or 1.0
    y_max = max(y for line in lines.values() for _, y in line) * 1.1 or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / x_max * (WIDTH - LEFT - RIGHT), height - BOTTOM - y / y_max * (height - TOP - BOTTOM)

    body = [_text(WIDTH / 2, 18, title, "middle")]
    for part in range(5):
        x, y = place(x_max * part / 4, y_max * part / 4)
        body.append(_text(x, height - BOTTOM + 16, f"{x_max * part / 4:.0f} s", "middle"))
        body.append(_text(LEFT - 6, y + 4, f"{y_max * part / 4:.1f}", "end"))
        body.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
    for name, at_s in marks.items():
        x, top = place(at_s, y_max)
        body.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - BOTTOM}" stroke="#c00" stroke-dasharray="4 3"/>'
        )
        body.append(_text(x + 4, top + 10, name, "start"))
    for index, line in enumerate(lines.values()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line))
        body.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[index]}" stroke-width="2"/>')
    body += _legend(list(lines), height - 10)
    return _svg(height, body)


def _legend(names: Sequence[str], y: float) -> list[str]:
    parts = []
    for index, name in enumerate(names):
        x = LEFT + index * 165
        parts.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{COLOURS[index % len(COLOURS)]}"/>')
        parts.append(_text(x + 16, y, name, "start"))
    return parts


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {_TEXT}>{escape(text)}</text>'


def _svg(height: float, body: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}">'
    return f'{head}<rect width="100%" height="100%" fill="white"/>{"".join(body)}</svg>\n'
