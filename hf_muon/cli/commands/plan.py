# SPDX-License-Identifier: Apache-2.0
"""`hf-muon plan`: owners, bytes on the wire and memory per rank, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..console import print_json, quick_imports, results, say
from ..errors import RunError, UsageError
from .options import Debug, Json
from .simulation import findings, print_simulation, run_simulation

if TYPE_CHECKING:
    from ...planning.plan import Plan
    from ...planning.simulation import Simulation

GIB = 2**30


def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A local folder, a hub id, or a built-in configuration name.")
    ],
    world_size: Annotated[int, typer.Option(help="Ranks (GPUs) of the job.")],
    replicate: Annotated[int, typer.Option(help="Replicas of the sharded model (HSDP); divides --world-size.")] = 1,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences per rank; with --seq-len.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sequence; with --micro-batch.")] = None,
    checkpointing: Annotated[bool, typer.Option(help="Recompute layers in backward.")] = True,
    device_gib: Annotated[float | None, typer.Option(help="Memory of one GPU in GiB, for the advice.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write the pictures to this page.")] = None,
    rates: Annotated[Path | None, typer.Option(help="File of hf-muon calibrate: balance owners by seconds.")] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Simulate a step on 8 to 4,096 ranks.")] = False,
    device: Annotated[str | None, typer.Option(help="For --simulate: a100, h100 (default), h200 or b200.")] = None,
    figures: Annotated[
        list[str] | None, typer.Option("--set", help="For --simulate: KEY=VALUE of the device; may repeat.")
    ] = None,
    grouped: Annotated[
        bool, typer.Option("--grouped", help="For --simulate: what if a unit's broadcasts shared one latency.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show who would own what, what a step would send and take, and what each rank would hold. Loads no weight."""
    with quick_imports():
        from ...planning.plan import plan as make_plan

        try:
            found = make_plan(
                model,
                world_size=world_size,
                replicate=replicate,
                micro_batch=micro_batch,
                seq_len=seq_len,
                checkpointing=checkpointing,
                device_gib=device_gib,
                rates=rates,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None
    if not simulate and (figures or grouped or device):
        raise UsageError("--device, --set and --grouped are for --simulate. Add --simulate.")
    simulated = None
    if simulate:
        simulated = run_simulation(model, found, checkpointing, device or "h100", figures or (), grouped)
    if html is not None:
        _write_page(found, html, simulated)
    if json:
        more = {} if simulated is None else {"simulation": simulated.to_dict()}
        print_json({**found.to_dict(), **more})
    else:
        _print_tables(found)
        if simulated is not None:
            results.print()
            print_simulation(simulated, world_size)


def _write_page(found: Plan, path: Path, simulated: Simulation | None) -> None:
    from ..report.memory_bars import memory_page
    from ..report.overhead_chart import simulation_section

    more = "" if simulated is None else simulation_section(simulated, findings(simulated))
    try:
        path.write_text(memory_page(found, more), encoding="utf-8")
    except OSError as error:
        raise RunError(f"--html must be a path that can be written; got {path}: {error.strerror}.") from None
    say(f"Pictures: {path}")


def _print_tables(found: Plan) -> None:
    from ..report.state_table import state_table

    document = found.to_dict()
    total = document["muon_elements"] + document["adamw_elements"]
    grid = f"{found.world_size:,} ranks"
    if found.replicate > 1:
        grid += f" ({found.replicate} replicas of {found.shard} shards)"
    results.print(f"{found.model} on {grid}", style="bold", markup=False)
    for key, label in (("muon_elements", "Muon (P_M)"), ("adamw_elements", "AdamW")):
        results.print(f"{label:11} {document[key]:16,} parameters {document[key] / total:6.1%}")
    results.print()
    results.print(_modes_table(document))
    results.print()
    _print_balance(document)
    results.print()
    results.print(_memory_table(found))
    _print_batch_note(found)
    results.print()
    results.print(state_table(document["variants"]))
    results.print()
    advice = document["recommendation"]
    results.print(f"Start with {advice['mode']}: {advice['why']}", markup=False, style="bold")


def _modes_table(document: dict[str, Any]) -> Any:
    table = _table("per rank and step", "Z2", "Z3")
    rows = (
        ("elements handed to collectives", "payload_elements_per_step", _count),
        ("elements on the wire", "wire_elements_per_rank_per_step", _count),
        ("  without owners (naive Muon)", "naive_wire_elements_per_rank_per_step", _count),
        ("owned weights and momentum, GiB", "muon_bytes_resident_per_rank", _gib),
        ("gathered matrices at most, GiB", "muon_bytes_transient_per_rank", _gib),
    )
    for label, key, text in rows:
        table.add_row(label, *(text(document["modes"][mode][key]) for mode in ("z2", "z3")))
    return table


def _print_balance(document: dict[str, Any]) -> None:
    owners = document["owners"]
    matrices = [row["matrices"] for row in owners]
    parts = f" and parts of {document['split_stacks']:,} stacks of experts" if document["split_stacks"] else ""
    results.print(
        f"Owners: {sum(matrices):,} parameters{parts}, {min(matrices)} to {max(matrices)} per rank; "
        f"the busiest orthogonalizes {document['imbalance']:.3f} x the mean "
        f"(no choice of owners is below {document['imbalance_lower_bound']:.3f})."
    )
    if document["idle_ranks"]:
        results.print(f"{document['idle_ranks']:,} ranks own nothing: there are more ranks than parameters to own.")


def _memory_table(found: Plan) -> Any:
    from ..report.memory_bars import LABELS

    table = _table("GiB per rank at the peak", *LABELS.values(), "sum", "when")
    for row in found.memory:
        cells = ["n/a" if getattr(row, part) is None else _gib(getattr(row, part)) for part in LABELS]
        style = "bold" if row.layout.removeprefix("hsdp-") == f"dmuon-{found.recommendation.mode}" else None
        table.add_row(f"{row.layout} {row.optimizer}", *cells, _gib(row.peak), row.phase, style=style)
    return table


def _print_batch_note(found: Plan) -> None:
    if found.batch is None:
        note = "Without activations: give --micro-batch and --seq-len."
    else:
        micro_batch, seq_len, checkpointing = found.batch
        how = "with" if checkpointing else "without"
        note = f"Micro-batch {micro_batch} x {seq_len} tokens, {how} activation checkpointing."
        if None in found.activations.values():
            note += " Activations are not estimated for this architecture: the sums are without them."
        else:
            used = {name: 0 if value is None else value.peak for name, value in found.activations.items()}
            note += (
                f" Activations: {_gib(used['with_checkpointing'])} GiB with checkpointing, "
                f"{_gib(used['without_checkpointing'])} without."
            )
    results.print(note, style="dim", markup=False)


def _table(first: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="left" if column == "when" else "right")
    return table


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _gib(value: float) -> str:
    return f"{value / GIB:,.2f}"
