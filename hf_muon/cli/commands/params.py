# SPDX-License-Identifier: Apache-2.0
"""`hf-muon params`: which parameter gets which algorithm, and the rule that decided."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..console import print_json, quick_imports, results
from ..errors import UsageError
from .options import Debug, Json


def params(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A local folder, a hub id, or a built-in configuration name.")
    ],
    include: Annotated[list[str] | None, typer.Option(help="Regex of names that must be on Muon; may repeat.")] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Regex of names that must be on AdamW; may repeat.")
    ] = None,
    matrix_split: Annotated[
        str, typer.Option(help="auto, fused or none: split fused QKV and gate-up; per_head: also by attention head.")
    ] = "auto",
    conv: Annotated[str, typer.Option(help="adamw, or flatten: convolution kernels as matrices on Muon.")] = "adamw",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show which parameters of MODEL are trained by Muon and which by AdamW, without loading any weight."""
    from ...config import MuonConfig

    try:
        options = MuonConfig(
            include=tuple(include or ()), exclude=tuple(exclude or ()), matrix_split=matrix_split, conv=conv
        )
    except (ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from None
    document = _explain(model, options)
    if json:
        print_json(document)
    else:
        _print_table(document)


def _explain(name: str, options: Any) -> dict[str, Any]:
    with quick_imports():
        from ...param_groups import explain_parameters
        from ...planning.model_source import ModelNotFoundError, build_meta_model, resolve_model

        try:
            source = resolve_model(name)
            model = build_meta_model(source.config)
        except ModelNotFoundError as error:
            raise UsageError(str(error)) from None
    try:
        rows = explain_parameters(
            model,
            include=options.include,
            exclude=options.exclude,
            matrix_split=options.matrix_split,
            conv=options.conv,
        )
    except (ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from None
    totals = {
        algorithm: {
            "tensors": sum(row.algorithm == algorithm for row in rows),
            "elements": sum(row.count for row in rows if row.algorithm == algorithm),
        }
        for algorithm in ("muon", "adamw")
    }
    parameters = [
        {"name": row.name, "shape": list(row.shape), "algorithm": row.algorithm, "rule": row.rule} for row in rows
    ]
    return {"model": source.name, **totals, "parameters": parameters}


def _print_table(document: dict[str, Any]) -> None:
    from rich.table import Table

    from .routing_rows import fold_layers

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("parameter", "shape", "algorithm", "rule"):
        table.add_column(column, overflow="fold")
    for name, shape, algorithm, rule in fold_layers(document["parameters"]):
        style = "bold" if algorithm == "muon" else "dim"
        table.add_row(name, " x ".join(map(str, shape)), algorithm, rule, style=style)
    results.print(table)
    total = sum(document[key]["elements"] for key in ("muon", "adamw"))
    results.print()
    for key, label in (("muon", "Muon"), ("adamw", "AdamW")):
        part = document[key]
        share = part["elements"] / total if total else 0.0
        results.print(f"{label:5} {part['tensors']:6,} tensors {part['elements']:16,} elements {share:7.1%}")
    results.print(f"{document['model']}: {total:,} trainable parameters", markup=False)
