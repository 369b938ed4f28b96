# SPDX-License-Identifier: Apache-2.0
"""The panel of live diagnostics: there when the recipe asked the optimizer for them (`diagnostics=N`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from .charts import Axes, Series, both_widths, line_chart
from .figures import best_runs

PANELS = {
    "stable_rank": ("Stable rank", "of what is orthogonalized", "1 where one direction rules it"),
    "orthogonality_error": ("Orthogonality error", "of the update, 0 is orthogonal", "what Newton-Schulz leaves"),
    "update_rms_group0": ("Update size", "RMS per element, first group", "weight decay aside"),
    "max_attention_logit": ("Largest attention logit", "of all heads, before the step", "what qk_clip acts on"),
}


def diagnostics_panel(document: Mapping[str, Any]) -> str:
    """Return the panel of the chosen Muon run of the first seed, or nothing where no run has diagnostics."""
    runs = [run for run in best_runs(document, "muon") if run.get("diagnostics")]
    if not runs:
        return ""
    entries = runs[0]["diagnostics"]
    figures = [_figure(key, entries) for key in PANELS if any(key in entry for entry in entries)]
    pairs = ["".join(figures[start : start + 2]) for start in range(0, len(figures), 2)]
    body = "".join(f'<div class="pair">{pair}</div>' for pair in pairs)
    note = f"Muon, seed {runs[0]['seed']}, every so many steps; stable rank and orthogonality of one matrix in turn."
    return f"<section>\n<h2>Inside the optimizer</h2>\n<p class=note>{escape(note)}</p>\n{body}\n</section>\n"


def _figure(key: str, entries: list[Mapping[str, Any]]) -> str:
    title, axis, note = PANELS[key]
    points = [(entry["step"], entry[key]) for entry in entries if key in entry and math.isfinite(entry[key])]
    tips = [f"step {step}: {value:.4g}" for step, value in points]
    series = [Series("muon", points, dots=True, tips=tips)]
    axes = Axes(title, "step", axis, whole_x=True)
    chart = both_widths(lambda width, height: line_chart(series, axes, width, height))
    return f"<figure>{chart}<figcaption class=note>{escape(title)}: {escape(note)}.</figcaption></figure>"
