# SPDX-License-Identifier: Apache-2.0
"""`hf-muon run`: train what a recipe describes with both optimizers, compare, and write the report."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ..console import notes, print_json, quick_imports, say
from ..errors import RunError
from ..recipe import Recipe, find_recipe, load_recipe
from ..resources import load_evaluation
from .options import Debug, Json


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY=VALUE]...",
            help="A recipe's name or the path of its YAML (default: demo), then overrides: training.steps=20.",
        ),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="Folder of the results [default: runs/<recipe>-<time>].")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="A quick look: the recipe's own small settings.")] = False,
    allow_code_execution: Annotated[
        bool,
        typer.Option("--allow-code-execution", help="Score benchmarks that run generated programs (mbpp, mbpp_plus)."),
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Run RECIPE: both optimizers over as many learning rates each, then a report to open in a browser.

    The same command with the same --output-dir continues an interrupted run.
    """
    started = time.perf_counter()
    recipe = _read(words or [], tiny)
    _check_data(recipe)
    from ..training.output_folder import check_folder, default_folder, open_folder, plain

    folder = output_dir or default_folder(recipe)
    finished = check_folder(folder, recipe)
    prepared = _prepare(recipe)
    allow_code_execution = _may_execute(recipe, allow_code_execution)
    open_folder(folder, recipe)
    say(f"{recipe.name}: {recipe.title}")
    if prepared is None:
        document = _predict(recipe, folder)
    else:
        recipe = _with_steps(recipe, prepared)
        say(f"{recipe.num_runs} runs of {recipe.training.steps} steps. {recipe.time}. Results in {folder}")
        if finished:
            say(f"Continuing: {len(finished)} of {recipe.num_runs} runs are already there.")
        document = _train(recipe, prepared, folder, finished, allow_code_execution)

    from ..report import write_report

    write_report(recipe, document, folder)
    _print_summary(document, folder, time.perf_counter() - started)
    if json:
        print_json(plain(document))


def _read(words: list[str], tiny: bool) -> Recipe:
    """Split the words into a recipe and overrides: the first word is the recipe unless it is an override."""
    name, overrides = "demo", words
    if words and ("=" not in words[0] or Path(words[0]).is_file()):
        name, overrides = words[0], words[1:]
    return load_recipe(find_recipe(name), overrides, tiny=tiny)


def _check_data(recipe: Recipe) -> None:
    """Fail on missing data before anything is written or imported."""
    if recipe.task.kind == "text":
        from ..training.text import SPLITS, find_data, read_rows

        folder = find_data(recipe.task.data)
        for split in SPLITS:
            read_rows(folder / f"{split}.jsonl", recipe.task.max_rows)
    elif recipe.task.kind == "instruct":
        from ..training.instruct import data_files

        data_files(recipe.task.data)


def _prepare(recipe: Recipe) -> Any:
    """Load the libraries, the data and the model: everything that a recipe's values can break, before writing.

    Returns None where the recipe predicts memory and this machine lacks the devices to measure it.
    """
    if notes.is_terminal:  # for who waits; in a log it would stand beside the one line of an error
        say("Loading torch and transformers ...")
    with quick_imports():
        from ..training.quiet import quiet_loaded_libraries

        quiet_loaded_libraries()
    from ..training.memory import predicts_only
    from ..training.search import prepare

    return None if predicts_only(recipe) else prepare(recipe)


def _predict(recipe: Recipe, folder: Path) -> dict[str, Any]:
    from ..environment import provenance
    from ..training.search import predict_only

    say("Predicting the peak memory of a rank for both optimizers; a minute or two.")
    return predict_only(recipe, folder, provenance())


def _may_execute(recipe: Recipe, allowed: bool) -> bool:
    """Return whether generated programs may run; where they may, but cannot be contained here, nothing begins."""
    from ..training.benchmarks import RUNS_CODE

    allowed = allowed or os.environ.get("HF_ALLOW_CODE_EVAL") == "1"
    for name in set(recipe.task.benchmarks) & set(RUNS_CODE) if allowed else ():
        load_evaluation("tasks").require_permission(name, True)
    return allowed


def _with_steps(recipe: Recipe, prepared: Any) -> Recipe:
    from ..training.search import with_steps

    return with_steps(recipe, prepared[0])


def _train(
    recipe: Recipe, prepared: Any, folder: Path, finished: list[dict[str, Any]], allow_code_execution: bool
) -> dict[str, Any]:
    from ..environment import provenance
    from ..progress import SearchProgress
    from ..training.search import run_search

    progress = SearchProgress(recipe.num_runs, recipe.training.steps, len(finished))
    try:
        with progress:
            return run_search(
                recipe,
                prepared,
                folder,
                finished,
                progress,
                provenance(),
                allow_code_execution=allow_code_execution,
            )
    except KeyboardInterrupt:
        raise RunError(
            f"stopped; finished runs are kept. The same command with --output-dir {folder} continues."
        ) from None


def _print_summary(document: dict[str, Any], folder: Path, seconds: float) -> None:
    from ..report.wording import verdict

    notes.print()
    if document["runs"]:
        notes.print(_scores_table(document))
        notes.print()
    _print_published(document)
    if document["runs"]:
        say(verdict(document))
    say(f"Done in {seconds:.0f} s. Report: {folder / 'report.html'}")


def _print_published(document: dict[str, Any]) -> None:
    """Print benchmark scores and predicted memory beside the published numbers."""
    from ..report.benchmarks import benchmark_rows, benchmark_sentences, memory_rows, memory_sentences, published_note

    scores, peaks = benchmark_rows(document), memory_rows(document)
    if scores:
        say(published_note(document))
    for head, rows, sentences in (
        (("benchmark", "model", "measured", "rows", "published"), scores, benchmark_sentences(document)),
        (("peak of a rank", "predicted", "of it states", "measured", "published"), peaks, memory_sentences(document)),
    ):
        if rows:
            table = _table(head)
            for row in rows:
                table.add_row(*row)
            notes.print(table)
            notes.print()
        for text in sentences:
            say(text)


def _table(head: tuple[str, ...]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in head:
        table.add_column(column, justify="left" if column == head[0] else "right")
    return table


def _scores_table(document: dict[str, Any]) -> Any:
    from ..report.wording import METRICS, bytes_text, metric_text

    comparison = document["comparison"]
    keys = [key for key in ("exact_match", "loss") if key in comparison["equal_steps"]]
    table = _table(("at equal steps", "Muon", "AdamW"))
    best = comparison["best"]
    table.add_row("learning rate", *(f"{best[name]['learning_rate']:g}" for name in ("muon", "adamw")))
    for key in keys:
        cells = [metric_text(key, best[name]["test"][key]) for name in ("muon", "adamw")]
        table.add_row(METRICS[key], *cells)
    table.add_row("training seconds", *(f"{best[name]['seconds']:.1f}" for name in ("muon", "adamw")))
    table.add_row("  of them optimizer", *(f"{best[name]['optimizer_seconds']:.1f}" for name in ("muon", "adamw")))
    table.add_row("optimizer state", *(bytes_text(best[name]["optimizer_state_bytes"]) for name in ("muon", "adamw")))
    return table
