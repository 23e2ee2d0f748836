"""Charts as SVG, for notebooks: small, and without a library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import cycle
from typing import Any

COLORS = ("#3d6be0", "#c8590f", "#0d8a6a", "#a03fb0", "#8a6d00", "#c2334d", "#2b7fa8", "#6b6b6b")
WIDTH = 420
HEIGHT = 220
LEFT = 56
RIGHT = 12
TOP = 40
BOTTOM = 30
"""The last four are the room around the curves."""
LETTER = 7
"""The width of a character of a legend."""
STEPS = (1, 2, 5, 10)
Point = tuple[float, float]


def line_chart(
    curves: Mapping[str, Sequence[Point]],
    title: str = "",
    x: str = "",
    *,
    log: bool = False,
    marks: Mapping[str, float] | None = None,
) -> str:
    """Draw curves into one chart, as SVG with a legend; points that are infinite or undefined are left out.

    Args:
        curves: By name, the points of each.
        title: The words above the drawing.
        x: The name of the horizontal axis.
        log: Give the horizontal axis powers of ten; points at 0 and below are left out.
        marks: By name, places of vertical lines.

    >>> line_chart({"val": [(1, 0.5), (2, 0.25)]}, "loss", "epoch").count("<polyline")
    1
    """
    marks = marks or {}
    drawn = {}
    for name, points in curves.items():
        drawn[name] = [point for point in points if _is_drawn(point, log)]
    xs = [point[0] for points in drawn.values() for point in points]
    ys = [point[1] for points in drawn.values() for point in points]
    place_x = _placing([*xs, *marks.values()], LEFT, WIDTH - RIGHT, log)
    place_y = _placing(ys, HEIGHT - BOTTOM, TOP, False)
    middle = WIDTH / 2
    parts = [
        _text(middle, 14, title, "middle", bold=True),
        _text(middle, HEIGHT - 2, x, "middle"),
    ]
    parts += [_tick_y(value, place_y(value)) for value in _ticks(ys, False)]
    parts += [_tick_x(at, place_x(at)) for at in _ticks(xs, log)]
    colors = dict(zip(drawn, cycle(COLORS), strict=False))
    for name, points in drawn.items():
        places = [(place_x(at), place_y(value)) for at, value in points]
        parts.append(_line(places, colors[name]))
    parts += [_mark(place_x(at)) for at in marks.values()]
    parts += _legend({**colors, **dict.fromkeys(marks, "gray")})
    return _svg(parts, f"{title} over {x}: {', '.join(drawn)}")


def _svg(parts: Sequence[str], label: str) -> str:
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    style = 'font-family="sans-serif" font-size="11" fill="currentColor"'
    label = escape(label)
    content = "".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style} role="img" aria-label="{label}">{content}</svg>'


def charts(rows: Sequence[Mapping[str, Any]], x: str) -> str:
    """Draw the metrics of a history's rows, such as ``"val/loss"``: a chart a metric, with a curve for each phase.

    Args:
        rows: The rows, of numbers by name.
        x: The name of the number to draw over, which is in each row.

    >>> charts([{"epoch": 1, "val/loss": 0.5}, {"epoch": 1, "train/loss": 0.7}], "epoch").count("<svg")
    1
    """
    panels: dict[str, dict[str, list[Point]]] = {}
    for row in rows:
        for name, value in row.items():
            phase, slash, metric = name.partition("/")
            if slash:
                curves = panels.setdefault(metric, {})
                curves.setdefault(phase, []).append((row[x], value))
    drawn = [line_chart(curves, metric, x) for metric, curves in panels.items()]
    return f"<div>{''.join(drawn)}</div>"


def _is_drawn(point: Point, log: bool) -> bool:
    x, y = point
    if log and not x > 0:
        return False
    return math.isfinite(x) and math.isfinite(y)


def _placing(values: Sequence[float], begin: float, end: float, log: bool) -> Callable[[float], float]:
    """From values to places; a single value is in the middle."""
    form: Callable[[float], float] = math.log10 if log else float
    low = form(min(values, default=1))
    high = form(max(values, default=2))
    if low == high:
        return lambda value: (begin + end) / 2
    return lambda value: begin + (form(value) - low) / (high - low) * (end - begin)


def _ticks(values: Sequence[float], log: bool) -> list[float]:
    """Round values that an axis names."""
    if not values or min(values) == max(values):
        return sorted(set(values))
    low = min(values)
    high = max(values)
    if log:
        first = math.ceil(math.log10(low))
        last = math.floor(math.log10(high))
        each = max((last - first) // 4, 1)
        powers = [10.0**power for power in range(first, last + 1, each)]
        return powers or [low, high]
    size = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(size * factor for factor in STEPS if size * factor * 4 >= high - low)
    first = math.ceil(low / step)
    last = math.floor(high / step)
    return [number * step for number in range(first, last + 1)]


def _line(points: list[Point], color: str) -> str:
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{text}" fill="none" stroke="{color}" stroke-width="1.8"/>'


def _mark(x: float) -> str:
    ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"'
    return f'<line {ends} stroke="gray" stroke-dasharray="5 4"/>'


def _text(x: float, y: float, text: str, anchor: str, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def _tick_x(value: float, at: float) -> str:
    return _text(at, HEIGHT - BOTTOM + 14, f"{value:.6g}", "middle")


def _tick_y(value: float, at: float) -> str:
    line = f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="gray" stroke-opacity="0.25"/>'
    return line + _text(LEFT - 6, at + 4, f"{value:.6g}", "end")


def _legend(colors: Mapping[str, str]) -> list[str]:
    parts = []
    at = float(LEFT)
    for name, color in colors.items():
        parts.append(f'<rect x="{at:.0f}" y="24" width="12" height="3" fill="{color}"/>')
        parts.append(_text(at + 16, 29, name, "start"))
        at += 30 + LETTER * len(name)
    return parts
