# SPDX-License-Identifier: Apache-2.0
"""Benchmark scores and predicted memory beside the published numbers: rows of text for terminal and page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from .wording import bytes_text

NAMES = {"gsm8k": "GSM8K", "mmlu": "MMLU", "mbpp": "MBPP", "mbpp_plus": "MBPP+"}
WHO = {"base": "before training", "adamw": "AdamW", "muon": "Muon"}
PARTS = ("weights", "gathered", "gradients", "states", "activations", "temporaries")
GIB = 2**30


def score_text(score: float, stderr: float) -> str:
    """Return a share in points with its standard error: `12.5 ± 3.3`."""
    return f"{100 * score:.1f} ± {100 * stderr:.1f}"


def measured_text(row: Mapping[str, Any]) -> str:
    """Return a measured score; where none or all rows are right the binomial error is 0 and a bound says more.

    References:
        The rule of three: after 0 of n the true share lies below 3/n with 95 % confidence.
    """
    bound = min(100.0, 300 / row["n"])
    if row["score"] == 0:
        return f"0.0 (below {bound:.1f})"
    if row["score"] == 1:
        return f"100.0 (above {100 - bound:.1f})"
    return score_text(row["score"], row["stderr"])


def benchmark_rows(document: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Return benchmark, who, score, rows and published score of every measured model."""
    found = []
    for name, entry in document["comparison"].get("benchmarks", {}).items():
        published = entry["published"]
        for who, row in entry["measured"].items():
            there = score_text(published[who], published["stderr"]) if who in published else ""
            seeds = f", {row['seeds']} seeds" if row["seeds"] > 1 else ""
            found.append((NAMES[name], WHO[who], measured_text(row), f"{row['n']}{seeds}", there))
    return found


def benchmark_sentences(document: Mapping[str, Any]) -> list[str]:
    """Return the paired test of each benchmark in a sentence, and what was not scored."""
    said = []
    for name, entry in document["comparison"].get("benchmarks", {}).items():
        paired = entry.get("paired")
        if paired is None:
            said.append(f"{NAMES[name]} was not scored: it runs generated programs (--allow-code-execution).")
            continue
        differing = paired["n01"] + paired["n10"]
        text = (
            f"{NAMES[name]}, Muon minus AdamW on the same {paired['n']} rows: {100 * paired['difference']:+.1f} "
            f"points (standard error {100 * paired['standard_error']:.1f}); {differing} rows differ, "
            f"{paired['n10']} of them right with Muon alone, p = {paired['p']:.2f} (exact McNemar test)"
        )
        said.append(f"{text}: {'a difference' if paired['p'] < 0.05 else 'no difference that these rows can show'}.")
    return said


def published_note(document: Mapping[str, Any]) -> str:
    """Return what the published column is of."""
    models = {
        f"{entry['published']['model']}, {entry['published']['n']:,} rows"
        for entry in document["comparison"].get("benchmarks", {}).values()
        if entry["published"]
    }
    return f"Points of 100 with standard errors. Published: {'; '.join(sorted(models))}." if models else ""


def benchmark_section(document: Mapping[str, Any]) -> str:
    """Return the section of the page, or nothing for a recipe without benchmarks."""
    rows = benchmark_rows(document)
    said = benchmark_sentences(document)
    if not rows and not said:
        return ""
    body = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(who)}</td><td class=num>{score}</td>"
        f"<td class=num>{count}</td><td class=num>{published}</td></tr>"
        for name, who, score, count, published in rows
    )
    table = (
        '<div class="scroll"><table><thead><tr><th>benchmark</th><th>model</th><th class=num>measured</th>'
        f"<th class=num>rows</th><th class=num>published</th></tr></thead><tbody>{body}</tbody></table></div>"
    )
    sentences = "".join(f"<p>{escape(text)}</p>" for text in said)
    note = f'<p class="note">{escape(published_note(document))}</p>'
    return f"<section><h2>Benchmarks</h2>{note}{table if rows else ''}{sentences}</section>"


def memory_rows(document: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Return optimizer, predicted peak, predicted states, measured peak and published peak."""
    memory = document["comparison"].get("memory")
    if not memory:
        return []
    rows = []
    for name in ("adamw", "muon"):
        predicted = memory["predicted"][name]
        measured = memory["measured"].get(name)
        published = memory["published"].get(f"{name}_gib")
        rows.append(
            (
                WHO[name],
                bytes_text(predicted["peak_bytes"]),
                bytes_text(predicted["parts"].get("states", 0)),
                bytes_text(measured) if measured else "",
                f"{published:.1f} GiB" if published else "",
            )
        )
    return rows


def memory_sentences(document: Mapping[str, Any]) -> list[str]:
    """Return what was predicted, what was not measured, and what the states alone explain."""
    memory = document["comparison"].get("memory")
    if not memory:
        return []
    muon, adamw = memory["predicted"]["muon"], memory["predicted"]["adamw"]
    peak = adamw["peak_bytes"] - muon["peak_bytes"]
    states = adamw["parts"].get("states", 0) - muon["parts"].get("states", 0)
    said = [
        f"Predicted for one rank of {muon['world_size']}, {memory['model']}, {muon['micro_batch']} x "
        f"{muon['seq_len']} tokens: AdamW needs {_signed(peak)} than Muon at the peak (phases: {adamw['phase']}, "
        f"{muon['phase']}); its optimizer states alone {_signed(states)}.",
        "A prediction counts tensors: what a caching allocator wastes and what the libraries keep is not in it.",
    ]
    published = memory["published"]
    if published.get("adamw_gib"):
        gap = published["adamw_gib"] - published["muon_gib"]
        said.append(
            f"Published: {published['where']}, {gap:.1f} GiB apart. The difference of the states predicted here is "
            f"{states / GIB:.1f} GiB; the rest is not explained by them, and no promise is made of it."
        )
    said.append(memory["measured_note"])
    return said


def _signed(count: float) -> str:
    return f"{bytes_text(abs(count))} {'more' if count >= 0 else 'less'}"


def memory_section(document: Mapping[str, Any]) -> str:
    """Return the section of the page, or nothing for a recipe without a memory block."""
    rows = memory_rows(document)
    if not rows:
        return ""
    memory = document["comparison"]["memory"]
    body = "".join(
        f"<tr><th>{who}</th><td class=num>{predicted}</td><td class=num>{states}</td>"
        f"<td class=num>{measured}</td><td class=num>{published}</td></tr>"
        for who, predicted, states, measured, published in rows
    )
    most = max(memory["predicted"][name]["peak_bytes"] for name in ("adamw", "muon")) or 1
    bars = "".join(_bar(name, memory["predicted"][name], most) for name in ("muon", "adamw"))
    parts = "".join(
        _part_row(part, [memory["predicted"][name]["parts"] for name in ("adamw", "muon")]) for part in PARTS
    )
    sentences = "".join(f"<p>{escape(text)}</p>" for text in memory_sentences(document))
    return (
        '<section><h2>Peak memory of a rank</h2><p class="note">Predicted by running the model code without memory. '
        f"Strong: optimizer states. Pale: weights, gradients, activations, buffers.</p>{bars}"
        '<div class="scroll"><table><thead><tr><th>optimizer</th><th class=num>predicted peak</th>'
        "<th class=num>of it states</th><th class=num>measured</th><th class=num>published</th></tr></thead>"
        f"<tbody>{body}</tbody></table></div>{sentences}"
        "<details><summary>Parts at the predicted peak</summary><table><thead><tr><th>part</th><th class=num>AdamW"
        f"</th><th class=num>Muon</th></tr></thead><tbody>{parts}</tbody></table></details></section>"
    )


def _part_row(part: str, both: list[Mapping[str, int]]) -> str:
    cells = "".join(f"<td class=num>{bytes_text(parts.get(part, 0))}</td>" for parts in both)
    return f"<tr><th>{part}</th>{cells}</tr>"


def _bar(name: str, predicted: Mapping[str, Any], most: float) -> str:
    states = predicted["parts"].get("states", 0)
    rest = predicted["peak_bytes"] - states
    return (
        f'<div class="bar {name}"><span class="who">{WHO[name]}</span><span class="track">'
        f'<i class="solid" style="width:{states / most:.2%}"></i><i class="pale" style="width:{rest / most:.2%}"></i>'
        f'</span><span class="amount">{bytes_text(predicted["peak_bytes"])}</span></div>'
    )
