# SPDX-License-Identifier: Apache-2.0
"""Which charts a report shows: loss curves, learning-rate grid, seeds, cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .charts import Axes, Series, both_widths, line_chart, strip_chart
from .scales import tick_text
from .wording import LABELS, METRICS, number_text

Run = Mapping[str, Any]


def best_runs(document: Mapping[str, Any], optimizer: str) -> list[Run]:
    """Return the runs of an optimizer at its chosen learning rate, one per seed."""
    rate = document["comparison"]["best"][optimizer]["learning_rate"]
    return [
        run for run in document["runs"] if run["optimizer"] == optimizer and run["config"]["learning_rate"] == rate
    ]


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """Return the mean of the last `width` values at each place; non-finite values are left out."""
    result = []
    for k in range(len(values)):
        window = [value for value in values[max(0, k + 1 - width) : k + 1] if math.isfinite(value)]
        result.append(statistics.fmean(window) if window else math.nan)
    return result


def smoothing_width(steps: int) -> int:
    """Return how many steps the training curve averages."""
    return max(1, min(25, steps // 15))


def training_curves(document: Mapping[str, Any], by: str) -> str:
    """Return the training-loss chart by `step` or by `seconds`: a faint line per seed, a strong mean."""
    faint, strong = [], []
    for name in LABELS:
        runs = best_runs(document, name)
        lines = [smoothed(run["loss"], smoothing_width(len(run["loss"]))) for run in runs]
        xs = [_xs(run, by) for run in runs]
        if len(runs) > 1:
            faint += [
                Series(name, list(zip(x, line, strict=True)), faint=True) for x, line in zip(xs, lines, strict=True)
            ]
        mean_x = [statistics.fmean(column) for column in zip(*xs, strict=True)]
        mean_y = [statistics.fmean(column) for column in zip(*lines, strict=True)]
        tips = [
            f"{_where(by, k + 1, x)}: {number_text('loss', y)}"
            for k, (x, y) in enumerate(zip(mean_x, mean_y, strict=True))
        ]
        strong.append(Series(name, list(zip(mean_x, mean_y, strict=True)), tips=tips))
    axes = Axes(f"Training loss by {by}", _x_title(by), "training loss (nats per token)", whole_x=by == "step")
    return both_widths(lambda width, height: line_chart([*faint, *strong], axes, width, height))


def held_out_curves(document: Mapping[str, Any], by: str) -> str:
    """Return the held-out loss chart by `step` or by `seconds`."""
    faint, strong = [], []
    for name in LABELS:
        runs = best_runs(document, name)
        curves = [run["eval"]["curve"] for run in runs]
        if len(runs) > 1:
            faint += [Series(name, [(point[by], point["loss"]) for point in curve], faint=True) for curve in curves]
        points, tips = [], []
        for column in zip(*curves, strict=True):
            at = statistics.fmean(point[by] for point in column)
            loss = statistics.fmean(point["loss"] for point in column)
            points.append((at, loss))
            tips.append(f"{_where(by, column[0]['step'], at)}: {number_text('loss', loss)}")
        strong.append(Series(name, points, dots=True, tips=tips))
    axes = Axes(f"Held-out loss by {by}", _x_title(by), "held-out loss (nats per token)", whole_x=by == "step")
    return both_widths(lambda width, height: line_chart([*faint, *strong], axes, width, height))


def rate_grid(document: Mapping[str, Any]) -> str:
    """Return the chart of the validation metric over learning rates, the chosen ones ringed."""
    comparison = document["comparison"]
    key = comparison["metric"]
    series = []
    for name in LABELS:
        rows = comparison["grid"][name]
        rates = [row["learning_rate"] for row in rows]
        points = [(row["learning_rate"], row[f"validation_{key}"]) for row in rows]
        tips = [f"lr {rate:g}: {number_text(key, value)}" for rate, value in points]
        ringed = rates.index(comparison["best"][name]["learning_rate"])
        series.append(Series(name, points, dots=True, ringed=ringed, tips=tips))
    every = sorted({x for one in series for x, _ in one.points})
    axes = Axes(
        "Learning-rate grid",
        "learning rate (log scale)",
        METRICS[key].replace("held-out", "validation"),
        log_x=True,
        y_text=_reader(key),
        x_ticks=tuple(_apart(every)),
    )
    return both_widths(lambda width, height: line_chart(series, axes, width, height))


def seed_strip(document: Mapping[str, Any]) -> str:
    """Return the chart of the test metric, one dot per seed."""
    comparison = document["comparison"]
    key = comparison["metric"]
    values = {name: comparison["best"][name]["test"][key]["values"] for name in LABELS}
    names = [f"seed {seed}" for seed in comparison["best"]["muon"]["seeds"]]
    axes = Axes(
        "Spread over seeds",
        "",
        METRICS[key],
        y_text=_reader(key),
        value_text=lambda value: number_text(key, value),
    )
    return both_widths(lambda width, height: strip_chart(values, names, axes, width, height))


def _reader(key: str) -> Any:
    return (lambda value: f"{value * 100:.3g}%") if key == "exact_match" else tick_text


def _apart(values: Sequence[float]) -> list[float]:
    """Return the values that are far enough apart on a log axis to be labelled."""
    kept: list[float] = []
    for value in values:
        if not kept or value / kept[-1] >= 1.7:
            kept.append(value)
    return kept


def _xs(run: Run, by: str) -> list[float]:
    return [float(k + 1) for k in range(len(run["loss"]))] if by == "step" else list(run["step_seconds"])


def _x_title(by: str) -> str:
    return "optimizer step" if by == "step" else "training time (s, evaluation not counted)"


def _where(by: str, step: float, at: float) -> str:
    return f"step {step:.0f}" if by == "step" else f"{at:.1f} s"
