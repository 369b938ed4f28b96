# SPDX-License-Identifier: Apache-2.0
"""Numbers and findings in words: shared by the terminal summary and the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LABELS = {"muon": "Muon", "adamw": "AdamW"}
METRICS = {"loss": "held-out loss", "exact_match": "held-out exact match"}


def bytes_text(count: float) -> str:
    """Return bytes in the largest binary unit that leaves a number of at least one."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def number_text(key: str, value: float | None) -> str:
    """Return one value of a metric: a share as per cent, a loss with three decimals."""
    if value is None or not math.isfinite(value):
        return "diverged"
    return f"{value:.1%}" if key == "exact_match" else f"{value:.3f}"


def metric_text(key: str, values: Mapping[str, Any]) -> str:
    """Return a mean with the range over seeds: `4.31 (4.29 to 4.33)`."""
    mean = number_text(key, values["mean"])
    if len(values["values"]) < 2:
        return mean
    return f"{mean} ({number_text(key, values['min'])} to {number_text(key, values['max'])})"


def verdict(document: Mapping[str, Any]) -> str:
    """Return what the run found, in two or three sentences that claim no more than it measured."""
    comparison = document["comparison"]
    key = comparison["metric"]
    equal = comparison["equal_steps"]
    score = equal[key]
    seeds = len(score["muon"]["values"])
    text = (
        f"After {equal['steps']} steps the {METRICS[key]} is {number_text(key, score['muon']['mean'])} with Muon "
        f"and {number_text(key, score['adamw']['mean'])} with AdamW"
    )
    if seeds > 1:
        touch = "overlap" if score["ranges_overlap"] else "do not overlap"
        text += f" (means of {seeds} seeds, whose ranges {touch})"
    at = comparison["equal_seconds"]
    other = "muon" if at["faster"] == "adamw" else "adamw"
    text += (
        f". {LABELS[at['faster']]} is done first, after {at['seconds']:.1f} s of training, with a held-out loss of "
        f"{number_text('loss', at['loss'][at['faster']]['mean'])}; {LABELS[other]} is then at "
        f"{number_text('loss', at['loss'][other]['mean'])}."
    )
    return text


def cautions(document: Mapping[str, Any]) -> list[str]:
    """Return what the numbers themselves say against reading too much into them."""
    comparison = document["comparison"]
    found = []
    for name, label in LABELS.items():
        best = comparison["best"][name]
        if best["at_edge_of_grid"]:
            found.append(
                f"{label}'s best learning rate, {best['learning_rate']:g}, lies at the edge of its grid: "
                "a wider grid may do better."
            )
    seeds = len(comparison["best"]["muon"]["seeds"])
    if seeds == 1:
        found.append("One seed only: the difference may be chance.")
    elif comparison["equal_steps"][comparison["metric"]]["ranges_overlap"]:
        found.append(f"The ranges of the {seeds} seeds overlap: the difference may be chance.")
    at = comparison["equal_seconds"]
    other = "Muon" if at["faster"] == "adamw" else "AdamW"
    found.append(
        f"At equal seconds {other} is still inside its learning-rate schedule and its loss is read between two "
        "evaluations; a shorter schedule might serve it better."
    )
    key = comparison["metric"]
    favourable = comparison["most_favourable_to_adamw"]
    found.append(
        f"Choosing AdamW's learning rate on the test rows themselves, which is unfair in its favour, gives "
        f"{number_text(key, favourable[f'test_{key}'])} at {favourable['learning_rate']:g}."
    )
    if not comparison["same_start"]:
        found.append("The runs of a seed did not start from the same weights: do not compare them.")
    return found
