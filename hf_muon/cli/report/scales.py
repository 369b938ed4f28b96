# SPDX-License-Identifier: Apache-2.0
"""Axes: round tick values and the mapping from values to pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to [start, stop] pixels, linearly or by logarithm."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (at - low) / (high - low) * (self.stop - self.start)


def ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """Return about `count` round values inside [low, high]; `whole` keeps them to whole numbers."""
    raw = (high - low) / max(count, 1)
    if whole:
        raw = max(raw, 1.0)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(
        power * factor for factor in ((1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)) if power * factor >= raw * 0.999
    )
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]


def padded(values: Sequence[float], share: float = 0.06) -> tuple[float, float]:
    """Return the range of the finite values with room on both sides."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    room = (high - low) * share or abs(high) * 0.1 or 1.0
    return low - room, high + room


def tick_text(value: float) -> str:
    """Return a tick label without trailing zeros."""
    return f"{value:,.6f}".rstrip("0").rstrip(".") if abs(value) < 1e4 else f"{value:,.0f}"
