# SPDX-License-Identifier: Apache-2.0
"""Charts as inline SVG: lines and strips of dots, drawn for a given width so that letters keep their size.

Colours come from CSS classes (`muon`, `adamw`), so that one drawing serves the light and the dark page. AdamW's lines
are dashed: the two differ without colour too. Points carry their text in `data-points`; a few lines of script show it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from .scales import Scale, padded, tick_text, ticks
from .wording import LABELS

WIDTHS = {"wide": 540, "narrow": 324}
HEIGHT = {"wide": 300, "narrow": 270}
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 30, 40


@dataclass
class Series:
    """One line: points (x, y), the optimizer that gives its colour, and how it is drawn."""

    optimizer: str
    points: list[tuple[float, float]]
    faint: bool = False
    dots: bool = False
    ringed: int | None = None  # index of a point to mark as chosen
    tips: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Axes:
    """Titles of a chart's axes and how values read."""

    title: str
    x: str
    y: str
    log_x: bool = False
    y_text: Callable[[float], str] = tick_text
    value_text: Callable[[float], str] = tick_text
    x_ticks: tuple[float, ...] = ()
    whole_x: bool = False


def both_widths(draw: Callable[[int, int], str]) -> str:
    """Return the chart drawn twice; CSS shows the one that fits the screen."""
    return "".join(f'<div class="chart {name}">{draw(width, HEIGHT[name])}</div>' for name, width in WIDTHS.items())


def line_chart(series: Sequence[Series], axes: Axes, width: int, height: int) -> str:
    """Return the SVG of lines over a common pair of axes."""
    finite = [[(x, y) for x, y in one.points if math.isfinite(y)] for one in series]
    xs = [x for points in finite for x, _ in points] or [0.0, 1.0]
    low_y, high_y = padded([y for points in finite for _, y in points])
    low_x, high_x = min(xs), max(xs)
    if axes.log_x:
        low_x, high_x = low_x / 1.25, high_x * 1.25
    elif low_x == high_x:
        high_x = low_x + 1
    x = Scale(low_x, high_x, LEFT, width - RIGHT, axes.log_x)
    y = Scale(low_y, high_y, height - BOTTOM, TOP)
    body = [_frame(axes, x, y, width, height)]
    tips = []
    for one, points in zip(series, finite, strict=True):
        path = " ".join(f"{'L' if k else 'M'}{x(a):.1f} {y(b):.1f}" for k, (a, b) in enumerate(points))
        if path:
            body.append(f'<path class="line {one.optimizer}{" faint" if one.faint else ""}" d="{path}"/>')
        if one.dots:
            body += [
                _dot(one.optimizer, x(a), y(b), one.ringed == k)
                for k, (a, b) in enumerate(one.points)
                if math.isfinite(b)
            ]
        if one.tips:
            tips += [
                {"s": one.optimizer, "x": round(x(a), 1), "y": round(y(b), 1), "t": tip}
                for (a, b), tip in zip(one.points, one.tips, strict=True)
                if math.isfinite(b)
            ]
    return _svg(axes.title, body, tips, width, height)


def strip_chart(values: dict[str, list[float]], names: Sequence[str], axes: Axes, width: int, height: int) -> str:
    """Return the SVG of one dot per seed and a bar at the mean, one column per optimizer."""
    low, high = padded([value for group in values.values() for value in group], 0.15)
    y = Scale(low, high, height - BOTTOM, TOP)
    x = Scale(0, len(values), LEFT, width - RIGHT)
    body = [_frame(axes, None, y, width, height)]
    tips = []
    for column, (optimizer, group) in enumerate(values.items()):
        finite = [value for value in group if math.isfinite(value)]
        middle = x(column + 0.5)
        body.append(f'<text class="label strong" x="{middle:.1f}" y="{height - 14}">{LABELS[optimizer]}</text>')
        if not finite:
            continue
        mean = sum(finite) / len(finite)
        text = escape(axes.value_text(mean))
        body.append(
            f'<path class="mean {optimizer}" d="M{middle - 34:.1f} {y(mean):.1f}H{middle + 34:.1f}"/>'
            f'<text class="label value" x="{middle + 40:.1f}" y="{y(mean) + 4:.1f}">{text}</text>'
        )
        for k, value in enumerate(group):
            if not math.isfinite(value):
                continue
            at = middle + (k - (len(group) - 1) / 2) * 18
            body.append(_dot(optimizer, at, y(value), False))
            tip = f"{names[k]}: {axes.value_text(value)}"
            tips.append({"s": optimizer, "x": round(at, 1), "y": round(y(value), 1), "t": tip})
    return _svg(axes.title, body, tips, width, height)


def _frame(axes: Axes, x: Scale | None, y: Scale, width: int, height: int) -> str:
    """Return grid lines, tick labels and axis titles."""
    parts = [f'<text class="label title" x="2" y="14">{escape(axes.y)}</text>']
    for value in ticks(y.low, y.high, 5):
        at = y(value)
        parts.append(
            f'<path class="rule" d="M{LEFT} {at:.1f}H{width - RIGHT}"/>'
            f'<text class="label tick-y" x="{LEFT - 8}" y="{at + 4:.1f}">{escape(axes.y_text(value))}</text>'
        )
    if x is not None:
        for value in axes.x_ticks or ticks(x.low, x.high, 5 if width > 400 else 4, whole=axes.whole_x):
            text = f"{value:g}" if axes.log_x else tick_text(value)
            parts.append(f'<text class="label" x="{x(value):.1f}" y="{height - BOTTOM + 17}">{text}</text>')
        middle = (LEFT + width - RIGHT) / 2
        parts.append(f'<text class="label title-x" x="{middle:.0f}" y="{height - 4}">{escape(axes.x)}</text>')
    return "".join(parts)


def _dot(optimizer: str, x: float, y: float, ringed: bool) -> str:
    ring = f'<circle class="ring {optimizer}" cx="{x:.1f}" cy="{y:.1f}" r="8"/>' if ringed else ""
    if optimizer == "adamw":  # a square: the two kinds of dots differ without colour
        return f'{ring}<rect class="dot adamw" x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" width="7.2" height="7.2" rx="1"/>'
    return f'{ring}<circle class="dot {optimizer}" cx="{x:.1f}" cy="{y:.1f}" r="4.2"/>'


def _svg(title: str, body: Sequence[str], tips: Sequence[dict[str, object]], width: int, height: int) -> str:
    data = escape(json.dumps(tips), quote=True)
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title, quote=True)}" '
        f'data-points="{data}">{"".join(body)}</svg>'
    )
