# SPDX-License-Identifier: Apache-2.0
"""`hf-muon calibrate`: measure this device once, for owner plans and simulations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..console import print_json, results, say
from ..errors import RunError, UsageError
from .options import Debug, Json

if TYPE_CHECKING:
    from ...distributed.rates import DeviceRates, ShapeSeconds


def calibrate(
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("rates.json"),
    seconds: Annotated[float, typer.Option(help="Time to spend, roughly.")] = 60.0,
    device: Annotated[str, typer.Option(help="cpu or cuda; auto takes the GPU where there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="dtype of the Newton-Schulz products; auto as in training.")] = "auto",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure Newton-Schulz, products and copies here; with torchrun --no-python, the links between ranks too."""
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device must be auto, cpu or cuda; got {device!r}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a GPU that torch can see; there is none. Use --device cpu.")
    if not output.parent.is_dir():
        raise UsageError(f"--output must lie in a folder that exists; got {output}.")
    kind = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    rank = int(os.environ.get("RANK", 0))
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    rates = _measure(kind, ranks, seconds, dtype, rank == 0)
    if rank:
        return
    try:
        rates.write(output)
    except OSError as error:
        raise RunError(f"--output must be a path that can be written; got {output}: {error.strerror}.") from None
    say(f"Rates: {output}")
    if json:
        print_json(rates.to_dict())
    else:
        _print_table(rates)


def _measure(kind: str, ranks: int, seconds: float, dtype: str, speaks: bool) -> DeviceRates:
    import torch
    import torch.distributed as dist

    from ...planning.calibration import calibrate as measure

    def tell(row: ShapeSeconds) -> None:
        if speaks:
            say(f"{row.short} x {row.long} {row.method}: {1e3 * row.seconds:.3f} ms")

    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    starts_group = ranks > 1 and not dist.is_initialized()
    if starts_group:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        return measure(device, seconds=seconds, dtype=dtype, on_row=tell)
    except ValueError as error:
        raise UsageError(str(error)) from None
    finally:
        if starts_group:
            dist.destroy_process_group()


def _print_table(rates: DeviceRates) -> None:
    from rich.table import Table

    from ...distributed.rates import NS_STEPS
    from ...orthogonalize import ns_flops

    results.print(f"{rates.device}, {rates.dtype}, {rates.threads} threads", style="bold", markup=False)
    results.print(f"large product {rates.product_flops / 1e12:12,.3f} TFLOP/s")
    results.print(f"copy          {rates.memory_bytes / 1e9:12,.1f} GB/s read and written")
    if rates.link_bytes is not None and rates.link_latency is not None:
        results.print(
            f"all-gather    {rates.link_bytes / 1e9:12,.2f} GB/s, {1e6 * rates.link_latency:,.0f} us per hop"
        )
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("Newton-Schulz", "form", "ms", "TFLOP/s", "of the product"):
        table.add_column(name, justify="left" if name in ("Newton-Schulz", "form") else "right")
    for row in rates.newton_schulz:
        flops = ns_flops(row.short, row.long, steps=NS_STEPS, method=row.method, device_type=rates.device_type)
        rate = flops / row.seconds
        cells = (f"{1e3 * row.seconds:,.3f}", f"{rate / 1e12:,.3f}", f"{rate / rates.product_flops:.0%}")
        table.add_row(f"{row.short} x {row.long}", row.method, *cells)
    results.print()
    results.print(table)
    largest = max(rates.newton_schulz, key=lambda row: row.short * row.long)
    results.print(
        f"Larger matrices are taken to run at the rate of {largest.short} x {largest.long};"
        " more --seconds measure them.",
        style="dim",
        markup=False,
    )
