# SPDX-License-Identifier: Apache-2.0
"""`hf-muon recipes`: what can be run, what it shows, what it needs."""

from __future__ import annotations

from ..console import print_json, results
from ..recipe import list_recipes
from .options import Debug, Json


def recipes(json: Json = False, debug: Debug = False) -> None:
    """List the recipes: name, what it shows, what it needs, how long it takes."""
    found = list_recipes()
    if json:
        keys = ("name", "title", "reproduces", "needs", "time")
        listed = [
            {**{key: getattr(recipe, key) for key in keys}, "variants": sorted(recipe.variants)} for recipe in found
        ]
        print_json({"recipes": listed})
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 1, 0))
    for column in ("recipe", "what it shows", "needs", "time"):
        table.add_column(column)
    for recipe in found:
        variants = f"\nvariant={'|'.join(sorted(recipe.variants))}" if recipe.variants else ""
        table.add_row(recipe.name, recipe.title + variants, recipe.needs, recipe.time)
    results.print(table)
    results.print("Start one with: hf-muon run NAME   (a quick look: --tiny)", markup=False)
