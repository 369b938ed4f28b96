# SPDX-License-Identifier: Apache-2.0
"""The routing table of a training run as text: one line per kind of tensor, layers folded together."""

from __future__ import annotations

import functools
import io
import logging
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...optim import MuonWithAuxAdam
from ...param_groups import ParameterRow
from ...param_groups.sites import true_shape

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


def fine_tuning_advice(model: Any, rows: Sequence[ParameterRow]) -> str | None:
    """Return a recommendation where most of a pretrained model is trained by Muon, else None.

    Whether Adam pretrained it is not written in a checkpoint; most published ones were. docs/fine_tuning.md has the
    evidence. Adapters and partly frozen models get no advice: their updates are constrained already.

    Args:
        model: the model as the Trainer holds it; its configuration says where weights came from.
        rows: how its trainable tensors are routed.
    """
    source = getattr(model, "name_or_path", "") or getattr(getattr(model, "config", None), "_name_or_path", "")
    on_muon = sum(row.count for row in rows if row.is_muon and row.role != "lora")
    total = sum(math.prod(true_shape(parameter)) for parameter in model.parameters())
    if not source or 2 * sum(row.count for row in rows) < total or 2 * on_muon < sum(row.count for row in rows):
        return None
    return (
        f"Full fine-tuning of {source} with Muon: if AdamW pretrained it, as most published models, AdamW is often"
        " level or better here. LoRA with Muon does not show this gap, and neither does a model that Muon pretrained."
        " Compare both before a long run; docs/fine_tuning.md has the evidence."
    )


@functools.cache
def warn_once(text: str) -> None:
    """Write `text` as a warning; the same text once per process."""
    logger.warning("%s", text)
