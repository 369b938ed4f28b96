# SPDX-License-Identifier: Apache-2.0
"""The parts of the report that are words, numbers and bars."""

from __future__ import annotations

import time
from collections.abc import Mapping
from html import escape
from typing import Any

from ..recipe.schema import Recipe
from .figures import smoothing_width
from .wording import LABELS, METRICS, bytes_text, number_text


def meta_line(recipe: Recipe, document: Mapping[str, Any]) -> str:
    """Return size of the model, number of runs, device and date."""
    model = document["model"]
    device = document["versions"].get("device", [{"name": "?"}])[0]
    pieces = [
        f"{model['parameters'] / 1e6:.2f} M parameters",
        f"{len(document['runs'])} runs of {recipe.training.steps} steps",
        device["name"],
        time.strftime("%d %B %Y"),
    ]
    return " <span>·</span> ".join(escape(piece) for piece in pieces)


def scores(document: Mapping[str, Any]) -> str:
    """Return the two score cards: the metric, its range, learning rate, seconds."""
    comparison = document["comparison"]
    keys = [comparison["metric"], *(key for key in comparison["equal_steps"] if key in METRICS)]
    keys = list(dict.fromkeys(keys))
    cards = []
    for name, label in LABELS.items():
        best = comparison["best"][name]
        head, *others = keys
        rows = [(METRICS[key], _with_range(key, best["test"][key])) for key in others]
        rows += [
            ("learning rate", f"{best['learning_rate']:g}"),
            ("training time", f"{best['seconds']:.1f} s"),
            ("optimizer state", bytes_text(best["optimizer_state_bytes"])),
        ]
        listed = "".join(f"<div><dt>{escape(term)}</dt><dd>{escape(text)}</dd></div>" for term, text in rows)
        test = best["test"][head]
        cards.append(
            f'<article class="score {name}"><h2><i></i>{label}</h2>'
            f'<p class="big">{escape(number_text(head, test["mean"]))}</p>'
            f'<p class="under">{escape(METRICS[head])}{escape(_range_note(head, test))}</p><dl>{listed}</dl></article>'
        )
    return "".join(cards)


def curves_note(document: Mapping[str, Any]) -> str:
    """Return how to read the curves."""
    best = document["comparison"]["best"]
    width = smoothing_width(document["comparison"]["equal_steps"]["steps"])
    rates = ", ".join(f"{label} {best[name]['learning_rate']:g}" for name, label in LABELS.items())
    text = f"Each optimizer at its chosen learning rate ({rates})."
    if len(best["muon"]["seeds"]) > 1:
        text += " Strong lines are means over seeds, faint lines single seeds."
    if width > 1:
        text += f" Training loss is averaged over the last {width} steps."
    return text


def cost_bars(document: Mapping[str, Any]) -> str:
    """Return seconds per step: inside the optimizer, and everything else."""
    best = document["comparison"]["best"]
    steps = document["comparison"]["equal_steps"]["steps"]
    per_step = {name: (best[name]["optimizer_seconds"] / steps, best[name]["seconds"] / steps) for name in LABELS}
    most = max(total for _, total in per_step.values()) or 1.0
    rows = [
        f'<div class="bar {name}"><span class="who">{label}</span><span class="track">'
        f'<i class="solid" style="width:{inside / most:.2%}"></i>'
        f'<i class="pale" style="width:{(total - inside) / most:.2%}"></i></span>'
        f'<span class="amount">{inside * 1e3:.0f} of {total * 1e3:.0f} ms</span></div>'
        for (name, label), (inside, total) in zip(LABELS.items(), per_step.values(), strict=True)
    ]
    return "".join(rows)


def memory_bars(document: Mapping[str, Any]) -> str:
    """Return bars of the bytes of optimizer state."""
    best = document["comparison"]["best"]
    sizes = {name: best[name]["optimizer_state_bytes"] for name in LABELS}
    most = max(sizes.values()) or 1
    return "".join(
        f'<div class="bar {name}"><span class="who">{label}</span><span class="track">'
        f'<i class="solid" style="width:{sizes[name] / most:.2%}"></i></span>'
        f'<span class="amount">{bytes_text(sizes[name])}</span></div>'
        for name, label in LABELS.items()
    )


def routing(document: Mapping[str, Any]) -> str:
    """Return which share of the model the Muon half trains."""
    routed = document["model"]["routing"]
    total = sum(part["elements"] for part in routed.values()) or 1
    share = routed["muon"]["elements"] / total
    words = {"muon": "hidden matrices", "adamw": "embeddings, output head, norms"}
    rows = "".join(
        f"<tr><th>{label}</th><td>{words[name]}</td><td class=num>{routed[name]['tensors']:,}</td>"
        f"<td class=num>{routed[name]['elements']:,}</td></tr>"
        for name, label in LABELS.items()
    )
    return (
        f'<div class="split" role="img" aria-label="Muon trains {share:.0%} of the elements">'
        f'<i class="muon" style="width:{share:.2%}">{share:.0%}</i><i class="adamw">{1 - share:.0%}</i></div>'
        f'<div class="scroll"><table class="routing"><thead><tr><th>half</th><th>what</th><th class=num>tensors</th>'
        f"<th class=num>elements</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def runs_table(document: Mapping[str, Any]) -> str:
    """Return every run as a row, the chosen ones marked."""
    comparison = document["comparison"]
    keys = [key for key in METRICS if key in comparison["equal_steps"]]
    head = "".join(
        f"<th class=num>validation {key.replace('_', ' ')}</th><th class=num>test {key.replace('_', ' ')}</th>"
        for key in keys
    )
    body = []
    for run in document["runs"]:
        name = run["optimizer"]
        rate = run["config"]["learning_rate"]
        chosen = rate == comparison["best"][name]["learning_rate"]
        cells = "".join(
            f"<td class=num>{number_text(key, run['eval']['validation'][key])}</td>"
            f"<td class=num>{number_text(key, run['eval'][key])}</td>"
            for key in keys
        )
        body.append(
            f'<tr class="{name}{" chosen" if chosen else ""}"><th><i></i>{LABELS[name]}</th>'
            f"<td class=num>{rate:g}</td><td class=num>{run['seed']}</td>{cells}"
            f"<td class=num>{run['seconds']:.1f} s</td>"
            f"<td class=num>{run['optimizer_seconds']:.1f} s</td>"
            f"<td class=num>{bytes_text(run['peak_memory_bytes'])}</td></tr>"
        )
    return (
        "<table><thead><tr><th>optimizer</th><th class=num>learning rate</th><th class=num>seed</th>"
        f"{head}<th class=num>training</th><th class=num>in optimizer</th><th class=num>peak memory</th></tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def versions(document: Mapping[str, Any]) -> str:
    """Return versions as a definition list."""
    pairs = [(name, value) for name, value in document["versions"].items() if isinstance(value, str)]
    return "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)


def _range_note(key: str, values: Mapping[str, Any]) -> str:
    if len(values["values"]) < 2:
        return ", one seed"
    low, high = number_text(key, values["min"]), number_text(key, values["max"])
    return f", {len(values['values'])} seeds: {low} to {high}"


def _with_range(key: str, values: Mapping[str, Any]) -> str:
    return number_text(key, values["mean"])
