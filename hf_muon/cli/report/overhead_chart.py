# SPDX-License-Identifier: Apache-2.0
"""Overhead over AdamW against ranks: one self-contained SVG, its lines told apart by dash and mark without colour."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from .scales import Scale, tick_text

if TYPE_CHECKING:
    from ...planning.simulation import Simulation

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 420, 64, 20, 62, 46
LOW, HIGH = 0.001, 10.0  # overheads below the first are drawn on the axis: the scale is logarithmic
LINES = {  # colour in light, in dark, dash, mark
    "naive": ("#6b665e", "#a6a39c", "2 4", "M-4 -4L4 4M-4 4L4 -4"),
    "all-to-all": ("#245f9e", "#7db8f2", "7 4", "M-3.6 -3.6H3.6V3.6H-3.6Z"),
    "dmuon-z2": ("#e3a071", "#a8623a", "", "M0 -4.6L4.4 3.4H-4.4Z"),
    "dmuon-z3": ("#b9410e", "#ff9a5c", "", "M-4.2 0A4.2 4.2 0 1 0 4.2 0A4.2 4.2 0 1 0 -4.2 0Z"),
    "dmuon-hsdp": ("#4d7a3a", "#9bcf83", "11 3", "M0 -5L5 0L0 5L-5 0Z"),
}
STYLE = """
.sim{--ink:#1c1b19;--soft:#5d5a54;--rule:#e6e2da}
@media (prefers-color-scheme:dark){.sim{--ink:#eceae6;--soft:#a6a39c;--rule:#2d3036}}
.sim text{font:12.5px Inter,ui-sans-serif,system-ui,"Segoe UI",Roboto,Arial,sans-serif;fill:var(--soft);
font-variant-numeric:tabular-nums}
.sim .x{text-anchor:middle}.sim .y{text-anchor:end}.sim .rule{stroke:var(--rule)}
.sim .line{fill:none;stroke-width:2}.sim .mark{stroke-width:1.6}
"""


def overhead_chart(found: Simulation) -> str:
    """Return the SVG of the overhead of every design against the number of ranks, both axes logarithmic."""
    counts = found.ranks
    x = Scale(min(counts) / 1.15, max(counts) * 1.15, LEFT, WIDTH - RIGHT, log=True)
    y = Scale(LOW, HIGH, HEIGHT - BOTTOM, TOP, log=True)
    body, css, at = [_axes(x, y, counts)], [STYLE], float(LEFT)
    for name, (light, dark, dash, mark) in LINES.items():
        steps = [step for step in found.steps if step.design == name]
        if not steps:
            continue
        css.append(f".sim .{name}{{stroke:{light}}}.sim .{name}.mark{{fill:{'none' if name == 'naive' else light}}}")
        css.append(f"@media (prefers-color-scheme:dark){{.sim .{name}{{stroke:{dark}}}")
        css.append(f".sim .{name}.mark{{fill:{'none' if name == 'naive' else dark}}}}}")
        points = [(x(step.ranks), y(min(max(step.overhead, LOW), HIGH))) for step in steps]
        path = " ".join(f"{'L' if k else 'M'}{a:.1f} {b:.1f}" for k, (a, b) in enumerate(points))
        body.append(f'<path class="line {name}" stroke-dasharray="{dash}" d="{path}"/>')
        for step, (a, b) in zip(steps, points, strict=True):
            tip = f"{name}, {step.ranks:,} ranks: {step.overhead:+.1%}, step {1e3 * step.step_seconds:,.1f} ms"
            body.append(
                f'<g transform="translate({a:.1f} {b:.1f})"><title>{escape(tip)}</title>'
                f'<path class="mark {name}" d="{mark}"/></g>'
            )
        body.append(
            f'<path class="line {name}" stroke-dasharray="{dash}" d="M{at} 12h30"/>'
            f'<g transform="translate({at + 15} 12)"><path class="mark {name}" d="{mark}"/></g>'
            f'<text x="{at + 37}" y="16">{name}</text>'
        )
        at += 37 + 7.4 * len(name) + 24
    label = f"Simulated step of {found.model} over AdamW's against ranks on {found.device.name}"
    return (
        f'<svg class="sim" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(label, quote=True)}"><style>{"".join(css)}</style>{"".join(body)}</svg>'
    )


def simulation_section(found: Simulation, sentences: list[str]) -> str:
    """Return the section of the page: what was assumed, the chart, and what it says."""
    device = found.device
    note = (
        f"Simulated at stated rates, not measured: {device.name}, {found.micro_batch} x {found.seq_len} tokens per "
        f"rank, {device.product_flops / 1e12:,.4g} TFLOP/s, {device.intra_bytes / 1e9:,.4g} GB/s inside and "
        f"{device.inter_bytes / 1e9:,.4g} GB/s out of a machine of {device.ranks_per_node} ranks. Each Muon design is "
        f"compared with AdamW under the same sharding; overheads below {LOW:.1%} lie on the axis."
    )
    text = "".join(f"<li>{escape(line)}</li>" for line in sentences)
    return (
        f'<section><h2>Step time over AdamW, by ranks</h2><p class="note">{escape(note)}</p>'
        f"<figure>{overhead_chart(found)}</figure><ul>{text}</ul></section>"
    )


def _axes(x: Scale, y: Scale, counts: list[int]) -> str:
    parts = [f'<text x="2" y="{TOP - 22}">step over AdamW</text>']
    for power in range(-3, 2):
        at = y(10.0**power)
        parts.append(f'<path class="rule" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="y" x="{LEFT - 8}" y="{at + 4:.1f}">{tick_text(100 * 10.0**power)} %</text>')
    for count in counts:
        parts.append(f'<text class="x" x="{x(count):.1f}" y="{HEIGHT - BOTTOM + 18}">{count:,}</text>')
    parts.append(f'<text class="x" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}">ranks</text>')
    return "".join(parts)
