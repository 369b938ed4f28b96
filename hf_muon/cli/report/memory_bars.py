# SPDX-License-Identifier: Apache-2.0
"""Memory per rank as stacked bars: one self-contained SVG, readable on light and dark pages and without colour."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from .scales import Scale, tick_text, ticks

if TYPE_CHECKING:
    from ...planning.memory import LayoutMemory
    from ...planning.plan import Plan

GIB = 2**30
LABELS = {
    "weights": "weights",
    "gradients": "gradients",
    "states": "optimizer states",
    "buffers": "buffers",
    "activations": "activations",
}
WIDTH, LEFT, RIGHT, TOP = 860, 142, 84, 58
ROW, BAR, GAP = 25, 17, 11  # height of a row, of its bar, space between groups of rows
STYLE = """
.mem{--ink:#1c1b19;--soft:#5d5a54;--rule:#e6e2da;--paper:#fbfaf8;
--weights:#35506b;--gradients:#6f94b8;--states:#b9410e;--buffers:#e3a071;--activations:#c9c2b4}
@media (prefers-color-scheme:dark){.mem{--ink:#eceae6;--soft:#a6a39c;--rule:#2d3036;--paper:#121316;
--weights:#5f86ad;--gradients:#9fc0df;--states:#ff8a48;--buffers:#a8623a;--activations:#565349}}
.mem text{font:12.5px Inter,ui-sans-serif,system-ui,"Segoe UI",Roboto,Arial,sans-serif;fill:var(--soft);
font-variant-numeric:tabular-nums}
.mem .who{text-anchor:end}.mem .opt{font-weight:600;fill:var(--ink)}
.mem .sum{fill:var(--ink);font-weight:600}.mem .tick{text-anchor:middle;font-size:11.5px}
.mem .rule{stroke:var(--rule)}
.mem rect{stroke:var(--paper);stroke-width:1}
""" + "".join(f".mem .{part}{{fill:var(--{part})}}" for part in LABELS)
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title><style>{css}</style></head>
<body><main><p class="eyebrow">hf-muon plan</p><h1>{title}</h1><p class="verdict">{verdict}</p>
<section><h2>Memory of the busiest rank</h2><p class="note">{note}</p><figure>{bars}</figure></section>{more}
</main></body>
</html>
"""


def memory_bars(plan: Plan, layouts: Sequence[str] | None = None) -> str:
    """Return the SVG of one stacked bar per layout and optimizer.

    Args:
        plan: what `hf_muon.plan` returned.
        layouts: which layouts, by name; None: all.

    Raises:
        ValueError: no row is left.
    """
    rows = [row for row in plan.memory if layouts is None or row.layout in layouts]
    if not rows:
        known = ", ".join(dict.fromkeys(row.layout for row in plan.memory))
        raise ValueError(f"layouts must name at least one of {known}; got {list(layouts or ())}.")
    places = _places(rows)
    bottom = places[-1] + ROW
    x = Scale(0.0, max(row.peak for row in rows) / GIB * 1.001, LEFT, WIDTH - RIGHT)
    body = [_legend(), _grid(x, bottom)]
    body += [_row(row, x, at) for row, at in zip(rows, places, strict=True)]
    label = f"Memory per rank of {plan.model} on {plan.world_size} ranks, stacked by part"
    return (
        f'<svg class="mem" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 34}" role="img" '
        f'aria-label="{escape(label, quote=True)}"><style>{STYLE}</style>{"".join(body)}</svg>'
    )


def memory_page(plan: Plan, more: str = "") -> str:
    """Return a page with the bars and the advice that opens offline; `more` is HTML that follows them."""
    if plan.batch is None:
        note = "Without activations: no micro-batch was given. "
    else:
        micro_batch, seq_len, checkpointing = plan.batch
        note = (
            f"Micro-batch {micro_batch} x {seq_len} tokens, {'with' if checkpointing else 'without'} checkpointing. "
        )
        if any(row.activations is None for row in plan.memory):
            note += "Activations are not estimated for this architecture. "
    note += (
        "FSDP2 and DMuon: float32 weights, gradients and states, bfloat16 computation, at the moment of the peak. "
        "DDP and ZeRO: half-precision weights and gradients, master weights among the states, no bucket counted."
    )
    grid = f"{plan.world_size:,} ranks" + (f" in {plan.replicate} replicas" if plan.replicate > 1 else "")
    return PAGE.format(
        title=escape(f"{plan.model} on {grid}"),
        css=(Path(__file__).resolve().parent / "report.css").read_text(encoding="utf-8"),
        verdict=escape(f"Start with {plan.recommendation.mode}: {plan.recommendation.why}"),
        note=escape(note),
        bars=memory_bars(plan),
        more=more,
    )


def _places(rows: Sequence[LayoutMemory]) -> list[float]:
    """Return the top of each row: a gap opens where the layout changes."""
    places, at = [], float(TOP)
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.layout != row.layout:
            at += GAP
        places.append(at)
        at += ROW
    return places


def _legend() -> str:
    parts, at = [], float(LEFT)
    for part, label in LABELS.items():
        parts.append(f'<rect class="{part}" x="{at}" y="4" width="13" height="13" rx="3"/>')
        parts.append(f'<text x="{at + 19}" y="15">{label}</text>')
        at += 19 + 7.2 * len(label) + 22
    return "".join(parts)


def _grid(x: Scale, bottom: float) -> str:
    lines = []
    for value in ticks(0.0, x.high, 6):
        at = x(value)
        lines.append(f'<path class="rule" d="M{at:.1f} {TOP - 12}V{bottom:.1f}"/>')
        lines.append(f'<text class="tick" x="{at:.1f}" y="{bottom + 18:.1f}">{tick_text(value)}</text>')
    lines.append(f'<text x="{WIDTH - RIGHT + 8}" y="{bottom + 18:.1f}">GiB</text>')
    return "".join(lines)


def _row(row: LayoutMemory, x: Scale, top: float) -> str:
    middle = top + ROW / 2 + 4.5
    optimizer = {"adamw": "AdamW", "muon": "Muon"}[row.optimizer]
    parts = [
        f'<text class="who" x="{LEFT - 10}" y="{middle:.1f}">{row.layout} '
        f'<tspan class="opt">{optimizer}</tspan></text>'
    ]
    start = 0.0
    for part, label in LABELS.items():
        size = (getattr(row, part) or 0) / GIB
        if size:
            left, right = x(start), x(start + size)
            parts.append(
                f'<rect class="{part}" x="{left:.1f}" y="{top + (ROW - BAR) / 2:.1f}" width="{right - left:.1f}" '
                f'height="{BAR}" rx="2"><title>{label}: {size:.2f} GiB</title></rect>'
            )
        start += size
    parts.append(f'<text class="sum" x="{x(start) + 8:.1f}" y="{middle:.1f}">{start:.2f}</text>')
    return f"<g>{''.join(parts)}</g>"


__all__ = ["LABELS", "memory_bars", "memory_page"]
