# SPDX-License-Identifier: Apache-2.0
"""The routing table of a training run as text: one line per kind of tensor, layers folded together."""

from __future__ import annotations

import functools
import io
import logging
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...optim import MuonWithAuxAdam
from ...param_groups import ParameterRow

logger = logging.getLogger("hf_muon.integrations.transformers")

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MAX_LINES = 40
_WIDTH = 118


@dataclass
class RoutingLine:
    """Tensors that differ in layer numbers only."""

    pattern: str
    shape: tuple[int, ...]
    algorithm: str
    rule: str
    tensors: int = 0
    elements: int = 0


def fold_rows(rows: Iterable[ParameterRow]) -> list[RoutingLine]:
    """Return one line per name pattern, shape, algorithm and rule; `*` stands for the layer numbers."""
    lines: dict[tuple[Any, ...], RoutingLine] = {}
    for row in rows:
        key = (_NUMBER.sub("*", row.name), row.shape, row.algorithm, row.rule)
        line = lines.setdefault(key, RoutingLine(*key))
        line.tensors += 1
        line.elements += row.count
    return list(lines.values())


def render_routing(optimizer: MuonWithAuxAdam, rows: Sequence[ParameterRow]) -> str:
    """Return the groups of `optimizer`, and where `rows` are known the tensors in them, as plain text."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
    console.print(_groups_table(optimizer))
    if rows:
        lines = sorted(fold_rows(rows), key=lambda line: (line.algorithm != "muon", -line.elements))
        console.print(_tensors_table(lines[:_MAX_LINES]))
        if len(lines) > _MAX_LINES:
            console.print(f"... and {len(lines) - _MAX_LINES} more kinds of tensors")
    output = console.file
    return output.getvalue().rstrip() if isinstance(output, io.StringIO) else ""


@functools.cache
def show_once(text: str, *, to_stderr: bool) -> None:
    """Write `text` to stderr, or as an INFO line where progress bars are off; the same text once per process."""
    if to_stderr:
        print(text, file=sys.stderr, flush=True)
    else:
        logger.info("%s", text)


def _groups_table(optimizer: MuonWithAuxAdam) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title="hf-muon groups", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("group", "tensors", "elements", "lr", "weight decay"):
        table.add_column(name, justify="left" if name == "group" else "right")
    for group, (tensors, elements) in zip(optimizer.param_groups, optimizer.group_sizes(), strict=True):
        kind = "Muon" if group["use_muon"] else "AdamW"
        # At train begin a scheduler with warm-up has already set lr to 0; initial_lr is what was asked for.
        rate = float(group.get("initial_lr", group["lr"]))
        decay = f"{group['weight_decay']:g}"
        table.add_row(kind, str(tensors), f"{elements:,}", f"{rate:g}", decay)
    return table


def _tensors_table(lines: Sequence[RoutingLine]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title="hf-muon routing", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("tensors", justify="right")
    table.add_column("name", overflow="fold", ratio=3)
    table.add_column("shape", no_wrap=True)
    table.add_column("on", no_wrap=True)
    table.add_column("because", overflow="fold", ratio=2)
    for line in lines:
        shape = "x".join(map(str, line.shape)) or "scalar"
        algorithm = "Muon" if line.algorithm == "muon" else "AdamW"
        table.add_row(str(line.tensors), line.pattern, shape, algorithm, line.rule)
    return table
