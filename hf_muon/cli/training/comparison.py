# SPDX-License-Identifier: Apache-2.0
"""Compare the runs of a recipe: choose on validation, report on the test split. Pure numbers in, numbers out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Run = Mapping[str, Any]


def rate_of(run: Run) -> float:
    """Return the learning rate of a run."""
    return float(run["config"]["learning_rate"])


def better(metric: str, a: float, b: float) -> bool:
    """Return whether `a` is better than `b`; a non-finite value is worse than any."""
    if a != a or b != b:
        return a == a
    return a > b if metric == "exact_match" else a < b


def best_rate(runs: Sequence[Run], optimizer: str, metric: str) -> float:
    """Return the learning rate with the best validation score, averaged over the seeds it was run with.

    Equal scores (all answers right, or none) are told apart by the validation loss.
    """
    by_rate: dict[float, list[Run]] = {}
    for run in runs:
        if run["optimizer"] == optimizer:
            by_rate.setdefault(rate_of(run), []).append(run)
    if not by_rate:
        raise ValueError(f"runs must include {optimizer}; got none.")
    # A rate that only some seeds tried is judged on the seeds that every rate has.
    shared = min(len(group) for group in by_rate.values())

    def mean(rate: float, key: str) -> float:
        return statistics.fmean(run["eval"]["validation"][key] for run in by_rate[rate][:shared])

    chosen = next(iter(by_rate))
    for rate in by_rate:
        key = metric if mean(rate, metric) != mean(chosen, metric) else "loss"
        if better(key, mean(rate, key), mean(chosen, key)):
            chosen = rate
    return chosen


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return mean, minimum, maximum, standard deviation over seeds, and the values."""
    return {
        "mean": statistics.fmean(values),
        "min": min(values),
        "max": max(values),
        "stdev": statistics.stdev(values) if len(values) > 1 else None,
        "values": list(values),
    }


def interpolate(curve: Sequence[Mapping[str, float]], seconds: float, start: float) -> float:
    """Return the loss of an evaluation curve at a time, linear between its points, clamped at its end.

    Args:
        curve: points with `seconds` and `loss`, in order.
        seconds: the time asked for.
        start: loss at time 0.
    """
    before = {"seconds": 0.0, "loss": start}
    for point in curve:
        if seconds <= point["seconds"]:
            width = point["seconds"] - before["seconds"]
            share = (seconds - before["seconds"]) / width if width else 1.0
            return before["loss"] + share * (point["loss"] - before["loss"])
        before = {"seconds": point["seconds"], "loss": point["loss"]}
    return before["loss"]


def compare(runs: Sequence[Run], metric: str) -> dict[str, Any]:
    """Return the `comparison` of `results.json`.

    Args:
        runs: finished runs of both optimizers.
        metric: what chose the learning rate: `loss` or `exact_match`.
    """
    names = ("muon", "adamw")
    rates = {name: best_rate(runs, name, metric) for name in names}
    best = {
        name: sorted(
            (run for run in runs if run["optimizer"] == name and rate_of(run) == rates[name]),
            key=lambda run: run["seed"],
        )
        for name in names
    }
    grid = {name: _grid(runs, name) for name in names}
    keys = [key for key in ("loss", "exact_match") if key in best["muon"][0]["eval"]]
    equal_steps = {
        key: _difference({name: spread([run["eval"][key] for run in best[name]]) for name in names}) for key in keys
    }
    return {
        "metric": metric,
        "selected_on": "validation",
        "reported_on": "test",
        "best": {name: _best(best[name], rates[name], grid[name], keys) for name in names},
        "equal_steps": {"steps": best["muon"][0]["steps"], **equal_steps},
        "equal_seconds": _equal_seconds(best),
        "grid": grid,
        "most_favourable_to_adamw": _favourable(grid["adamw"], metric),
        "same_start": _same_start(runs),
    }


def _best(runs: Sequence[Run], rate: float, grid: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    tried = [row["learning_rate"] for row in grid]
    return {
        "learning_rate": rate,
        "at_edge_of_grid": len(tried) > 1 and rate in (min(tried), max(tried)),
        "seeds": [run["seed"] for run in runs],
        "test": {key: spread([run["eval"][key] for run in runs]) for key in keys},
        "seconds": statistics.fmean(run["seconds"] for run in runs),
        "optimizer_seconds": statistics.fmean(run["optimizer_seconds"] for run in runs),
        "peak_memory_bytes": max(run["peak_memory_bytes"] for run in runs),
        "optimizer_state_bytes": runs[0]["optimizer_state_bytes"],
    }


def _grid(runs: Sequence[Run], optimizer: str) -> list[dict[str, Any]]:
    by_rate: dict[float, list[Run]] = {}
    for run in runs:
        if run["optimizer"] == optimizer:
            by_rate.setdefault(rate_of(run), []).append(run)
    rows = []
    for rate, group in sorted(by_rate.items()):
        row: dict[str, Any] = {"learning_rate": rate, "seeds": [run["seed"] for run in group]}
        for key in ("loss", "exact_match"):
            if key in group[0]["eval"]:
                row[f"validation_{key}"] = statistics.fmean(run["eval"]["validation"][key] for run in group)
                row[f"test_{key}"] = statistics.fmean(run["eval"][key] for run in group)
        rows.append(row)
    return rows


def _difference(by_optimizer: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        **by_optimizer,
        "muon_minus_adamw": by_optimizer["muon"]["mean"] - by_optimizer["adamw"]["mean"],
        # Do the seeds' ranges touch? A plain answer that three seeds can give.
        "ranges_overlap": by_optimizer["muon"]["min"] <= by_optimizer["adamw"]["max"]
        and by_optimizer["adamw"]["min"] <= by_optimizer["muon"]["max"],
    }


def _equal_seconds(best: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Compare at the time the faster optimizer finished; the slower one is then still in its schedule."""
    time = {name: statistics.fmean(run["seconds"] for run in runs) for name, runs in best.items()}
    faster = min(time, key=lambda name: time[name])
    at = {
        name: spread(
            [interpolate(run["eval"]["curve"], time[faster], run["loss"][0]) for run in runs]
            if name != faster
            else [run["eval"]["loss"] for run in runs]
        )
        for name, runs in best.items()
    }
    return {"seconds": time[faster], "faster": faster, "loss": _difference(at)}


def _favourable(grid: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any]:
    """Return AdamW's best test score over its whole grid: chosen on the test split, so an upper bound for it."""
    key = f"test_{metric}"
    row = (max if metric == "exact_match" else min)(grid, key=lambda entry: entry[key])
    return {"learning_rate": row["learning_rate"], key: row[key]}


def _same_start(runs: Sequence[Run]) -> bool:
    """Return whether all runs of a seed began from the same weights."""
    digests: dict[int, set[str]] = {}
    for run in runs:
        digests.setdefault(run["seed"], set()).add(run["initial_weights"])
    return all(len(found) == 1 for found in digests.values())
