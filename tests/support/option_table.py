# SPDX-License-Identifier: Apache-2.0
"""The option table of docs/trainer.md, made from the metadata of `MuonConfig`. Run as a module to rewrite it."""

import dataclasses
import re
from pathlib import Path

from hf_muon import MuonConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainer.md"
_BLOCK = re.compile(r"(<!-- options: begin[^\n]*-->\n).*?(<!-- options: end -->)", re.DOTALL)


def render() -> str:
    """Return the table, one row per option."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(MuonConfig):
        default = "" if field.default in (None, ()) else f"`{str(field.default).lower()}`"
        lines.append(f"| `{field.name}` | {default} | {field.metadata['help']} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """Return the page with the table brought up to date."""
    return _BLOCK.sub(lambda found: found[1] + render() + found[2], page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
