# SPDX-License-Identifier: Apache-2.0
"""`hf-muon plan --simulate`: run the simulation and print it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...config import nearest
from ..console import results
from ..errors import UsageError

if TYPE_CHECKING:
    from ...planning.devices import SimulatedDevice
    from ...planning.plan import Plan
    from ...planning.simulation import SimulatedStep, Simulation

PARTS = {
    "passes": "passes_seconds",
    "Newton-Schulz": "newton_schulz_seconds",
    "elementwise": "elementwise_seconds",
    "copies": "copies_seconds",
    "exposed comm.": "exposed_seconds",
}


def run_simulation(
    model: str, planned: Plan, checkpointing: bool, device: str, figures: Sequence[str], grouped: bool
) -> Simulation:
    """Return the simulation for 8 to 4,096 ranks and for those of the plan.

    Args:
        model: MODEL.
        planned: its ranks are one more number of ranks; replicas set the shard group's size for all of them; batch and
            measured rates are taken over.
        checkpointing: layers are computed again in backward.
        device: a preset.
        figures: KEY=VALUE, replacing figures of the preset or of the measured rates.
        grouped: the broadcasts of a unit share one latency.

    Raises:
        UsageError: anything that cannot be simulated.
    """
    from ...planning.devices import find_device, replace_figures
    from ...planning.simulation import MICRO_BATCH, RANKS, SEQ_LEN, simulate

    micro_batch, seq_len = planned.batch[:2] if planned.batch is not None else (MICRO_BATCH, SEQ_LEN)
    try:
        found = find_device(device.lower())
        if planned.rates is not None:
            found = found.with_rates(planned.rates)
        found = replace_figures(found, _pairs(figures))  # what the user states wins over what was measured
        return simulate(
            model,
            ranks=sorted({*RANKS, planned.world_size}),
            device=found,
            shard=planned.shard if planned.replicate > 1 else None,
            micro_batch=micro_batch,
            seq_len=seq_len,
            checkpointing=checkpointing,
            grouped=grouped,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


def print_simulation(found: Simulation, world_size: int) -> None:
    """Print the parts of a step at `world_size`, the overheads of all numbers of ranks, and where limits lie."""
    device = found.device
    results.print(f"Simulated step on {device.name}", style="bold", markup=False)
    how = "with" if found.checkpointing else "without"
    results.print(
        f"{found.micro_batch} x {found.seq_len} tokens per rank, {how} checkpointing. Products "
        f"{device.product_flops / 1e12:,.4g} TFLOP/s, memory {device.memory_bytes / 1e9:,.4g} GB/s, "
        f"links{_whose(device)} "
        f"{device.intra_bytes / 1e9:,.4g} GB/s in and {device.inter_bytes / 1e9:,.4g} GB/s out of a machine of "
        f"{device.ranks_per_node}. No measurement of a run: see docs/planning.md.",
        style="dim",
        markup=False,
    )
    results.print()
    results.print(_parts_table(found, world_size))
    results.print()
    results.print(_overhead_table(found))
    results.print("Each over AdamW under the same sharding; bold is the shortest step.", style="dim", markup=False)
    results.print()
    for line in findings(found):
        results.print(line, markup=False)


def _whose(device: SimulatedDevice) -> str:
    is_assumed = device.rates is not None and device.rates.link_bytes is None
    return " (assumed, not in the file of rates)" if is_assumed else ""


def findings(found: Simulation) -> list[str]:
    """Return which design wins where, and the limits, as sentences."""
    lines = []
    runs: list[tuple[str, list[int]]] = []
    for count in found.ranks:
        design = found.fastest(count).design
        if not runs or runs[-1][0] != design:
            runs.append((design, []))
        runs[-1][1].append(count)
    for design, counts in runs:
        lines.append(f"Fastest Muon on {_span(counts)} ranks: {design}{_remark(found, design, counts)}.")
    for limit, text in (
        ("latency", "the latency of many collectives costs 5 % of the step or more"),
        ("idle ranks", "some ranks own nothing"),
    ):
        for design in dict.fromkeys(step.design for step in found.steps if "dmuon" in step.design):
            hit = {s.ranks for s in found.steps if s.design == design and limit in s.limits}
            simulated = [count for count in found.ranks if found.find(design, count) is not None]
            for is_hit, group in itertools.groupby(simulated, key=hit.__contains__):
                if is_hit:
                    lines.append(f"{design}, {_span(list(group))} ranks: {text}.")
    return lines


def _remark(found: Simulation, design: str, counts: Sequence[int]) -> str:
    """Return what else to know about the fastest design: one that is as fast, or what there is in its place."""
    steps = [s for s in found.steps if s.ranks in counts and not s.design.startswith("adamw")]
    if design == "all-to-all":
        dmuon = (min((s for s in steps if s.ranks == c and "dmuon" in s.design), key=_seconds) for c in counts)
        offered = " or ".join(dict.fromkeys(step.design for step in dmuon))
        return f", which hf-muon does not offer; next of what it does: {offered}"
    best = {s.ranks: s.step_seconds for s in steps if s.design == design}
    alike = [
        name
        for name in dict.fromkeys(s.design for s in steps if s.design != design)
        if len(near := [s for s in steps if s.design == name]) == len(counts)
        and all(s.step_seconds <= 1.001 * best[s.ranks] for s in near)
    ]
    return f", and {', '.join(alike)} alike" if alike else ""


def _seconds(step: SimulatedStep) -> float:
    return step.step_seconds


def _span(counts: list[int]) -> str:
    return f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"


def _parts_table(found: Simulation, world_size: int) -> Any:
    table = _table(f"ms, {world_size:,} ranks", "step", *PARTS, "over AdamW", "limits")
    for step in (s for s in found.steps if s.ranks == world_size):
        cells = [f"{1e3 * getattr(step, key):,.1f}" for key in ("step_seconds", *PARTS.values())]
        style = "bold" if step == found.fastest(world_size) else None
        table.add_row(step.design, *cells, _overhead(step), ", ".join(step.limits), style=style)
    return table


def _overhead_table(found: Simulation) -> Any:
    designs = [name for name in dict.fromkeys(s.design for s in found.steps) if not name.startswith("adamw")]
    table = _table("step over AdamW's, ranks", *designs)
    for count in found.ranks:
        best = found.fastest(count).design
        cells = []
        for name in designs:
            step = found.find(name, count)
            text = "" if step is None else _overhead(step)
            cells.append(f"[bold]{text}[/bold]" if name == best else text)
        table.add_row(f"{count:,}", *cells)
    return table


def _overhead(step: SimulatedStep) -> str:
    return "" if step.design.startswith("adamw") else f"{step.overhead:+.1%}"


def _table(first: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="left" if column == "limits" else "right", no_wrap=column != "limits")
    return table


def _pairs(words: Sequence[str]) -> dict[str, str]:
    from ...planning.devices import SETTABLE

    pairs = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            hint = f" For instance {word}=0.5." if word in SETTABLE else nearest(word, SETTABLE)
            raise ValueError(f"--set must be KEY=VALUE; got {word!r}.{hint}")
        pairs[key.strip()] = value.strip()
    return pairs
