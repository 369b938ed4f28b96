# SPDX-License-Identifier: Apache-2.0
"""The table of `hf-muon plan` on optimizer state: AdamW, Muon and its variants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def state_table(variants: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the table of what `variant_table` counted, GiB per rank."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("optimizer state, GiB per rank", no_wrap=True)
    for column in ("device", "host", "device of AdamW's"):
        table.add_column(column, justify="right")
    for label, row in variants.items():
        host = row["host_bytes_per_rank"]
        table.add_row(
            label,
            f"{row['device_bytes_per_rank'] / 2**30:,.3f}",
            f"{host / 2**30:,.3f}" if host else "",
            f"{row['device_of_adamw']:.0%}",
        )
    return table
