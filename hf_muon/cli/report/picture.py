# SPDX-License-Identifier: Apache-2.0
"""`loss.png`: the loss curves as a picture, for places that show no HTML. Needs matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .figures import best_runs, smoothed, smoothing_width
from .wording import LABELS

COLOURS = {"muon": "#c2410c", "adamw": "#2563a8"}


def draw_loss_curves(document: Mapping[str, Any], path: Path) -> bool:
    """Draw training loss by step and held-out loss by seconds; return False when matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 4), dpi=140, layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, label in LABELS.items():
        runs = best_runs(document, name)
        style = {"color": COLOURS[name], "linestyle": "-" if name == "muon" else "--"}
        width = smoothing_width(len(runs[0]["loss"]))
        losses = [smoothed(run["loss"], width) for run in runs]
        mean = [statistics.fmean(column) for column in zip(*losses, strict=True)]
        for line in losses if len(losses) > 1 else ():
            left.plot(range(1, len(line) + 1), line, alpha=0.25, linewidth=1, **style)
        left.plot(range(1, len(mean) + 1), mean, linewidth=2, label=label, **style)
        for run in runs:
            curve = run["eval"]["curve"]
            right.plot(
                [point["seconds"] for point in curve],
                [point["loss"] for point in curve],
                marker="o" if name == "muon" else "s",
                markersize=4,
                label=label if run is runs[0] else None,
                **style,
            )
    left.set(xlabel="optimizer step", ylabel="training loss (nats per token)")
    right.set(xlabel="training time (s)", ylabel="held-out loss (nats per token)")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
        axes.legend(frameon=False)
    figure.savefig(path)
    return True
