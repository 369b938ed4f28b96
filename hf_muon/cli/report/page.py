# SPDX-License-Identifier: Apache-2.0
"""Put the report together: template, style and script are files of this package, all written into one page."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import yaml

from ..recipe.schema import Recipe
from . import figures, sections
from .benchmarks import benchmark_section, memory_section
from .diagnostics import diagnostics_panel
from .wording import cautions, verdict

logger = logging.getLogger("hf_muon.cli.report")
HERE = Path(__file__).resolve().parent


def write_report(recipe: Recipe, document: Mapping[str, Any], folder: Path) -> None:
    """Write `report.html` and `loss.png` of a finished search into its folder.

    Note:
        `loss.png` needs matplotlib (extra `plots`); without it one log line says so and the rest is written.
    """
    (folder / "report.html").write_text(render(recipe, document), encoding="utf-8")
    if not document["runs"]:
        return
    from .picture import draw_loss_curves

    if not draw_loss_curves(document, folder / "loss.png"):
        logger.info("loss.png needs matplotlib, which is not installed: pip install 'hf-muon[plots]'.")


def render(recipe: Recipe, document: Mapping[str, Any]) -> str:
    """Return the page: self-contained, no address is fetched, readable without script."""
    if not document["runs"]:
        return _render_prediction(recipe, document)
    return _template("template.html").substitute(
        _frame(recipe, document),
        benchmarks=benchmark_section(document),
        predicted=memory_section(document),
        meta=sections.meta_line(recipe, document),
        verdict=escape(verdict(document)),
        scores=sections.scores(document),
        train_step=figures.training_curves(document, "step"),
        train_seconds=figures.training_curves(document, "seconds"),
        held_step=figures.held_out_curves(document, "step"),
        held_seconds=figures.held_out_curves(document, "seconds"),
        curves_note=escape(sections.curves_note(document)),
        grid=figures.rate_grid(document),
        seeds=figures.seed_strip(document),
        cost=sections.cost_bars(document),
        memory=sections.memory_bars(document),
        diagnostics=diagnostics_panel(document),
        routing=sections.routing(document),
        shows=_items(recipe.shows),
        limits=_items([*recipe.does_not_show, *cautions(document)]),
        runs=sections.runs_table(document),
    )


def _render_prediction(recipe: Recipe, document: Mapping[str, Any]) -> str:
    """Return the page of a memory recipe that trained nothing."""
    return _template("prediction.html").substitute(
        _frame(recipe, document),
        predicted=memory_section(document),
        shows=_items(recipe.shows),
        limits=_items(recipe.does_not_show),
    )


def _template(name: str) -> Template:
    return Template((HERE / name).read_text(encoding="utf-8"))


def _frame(recipe: Recipe, document: Mapping[str, Any]) -> dict[str, str]:
    """Return what every page holds."""
    return {
        "style": (HERE / "report.css").read_text(encoding="utf-8"),
        "script": (HERE / "report.js").read_text(encoding="utf-8"),
        "recipe": escape(recipe.name),
        "title": escape(recipe.title),
        "versions": sections.versions(document),
        "config": escape(yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True, width=88)),
    }


def _items(sentences: list[str]) -> str:
    return "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
