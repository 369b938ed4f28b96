# SPDX-License-Identifier: Apache-2.0
"""Score the trained models on the recipe's benchmarks, and put the scores beside the published ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..console import say
from ..errors import UsageError
from ..recipe.schema import Recipe
from ..resources import load_evaluation
from .checkpoints import MODEL_FOLDER, full_disk_is_an_error_to_continue_from
from .output_folder import write_results
from .rows import shipped_data, split_files
from .tasks import Task, build_model, load_model

RUNS_CODE = ("mbpp", "mbpp_plus")
BASE = "base"
Progress = Callable[[int, int], None]


def load_benchmark_rows(recipe: Recipe) -> dict[str, Any]:
    """Return the rows of every benchmark of the recipe.

    Raises:
        UsageError: the data is not there or does not parse.
    """
    load_rows = load_evaluation("tasks").load_rows
    rows = {}
    for name in recipe.task.benchmarks:
        try:
            rows[name] = load_rows(name, eval_file(recipe), limit=recipe.task.eval_rows)
        except (ValueError, OSError) as error:
            raise UsageError(f"task.eval_data: {error}") from None
    return rows


def eval_file(recipe: Recipe) -> str | None:
    """Return the file of benchmark rows: a path, the test split of a shipped slice, or None for the hub."""
    given = recipe.task.eval_data
    if given in (shipped := shipped_data()):
        return str(split_files(shipped[given])["test"])
    return given or None


def runnable(recipe: Recipe, allow_code_execution: bool) -> list[str]:
    """Return the benchmarks that may be scored; those that run generated programs want permission."""
    return [name for name in recipe.task.benchmarks if allow_code_execution or name not in RUNS_CODE]


def score_all(
    recipe: Recipe,
    task: Task,
    folder: Path,
    document: dict[str, Any],
    progress: Progress,
    allow_code_execution: bool,
) -> None:
    """Score every run, and the model before training, on every benchmark; fills `document` and writes it each time.

    A killed evaluation continues from its samples file; a finished one is not repeated.
    """
    names = runnable(recipe, allow_code_execution)
    for name in set(recipe.task.benchmarks) - set(names):
        say(f"{name} is not scored: it runs generated programs. The same command with --allow-code-execution adds it.")
    entries = [(run["name"], run["eval"]) for run in document["runs"]]
    if recipe.task.evaluate_base and names:
        document.setdefault("base", {})
        entries.insert(0, (BASE, document["base"]))
    for label, scores in entries:
        found = scores.setdefault("benchmarks", {})
        missing = [name for name in names if name not in found]
        if not missing:
            continue
        with full_disk_is_an_error_to_continue_from(folder):
            model, tokenizer = _trained(recipe, task, folder, label)
            for name in missing:
                say(f"{label}: {name}, {len(task.benchmark_rows[name])} rows")
                found[name] = _score(recipe, task, name, model, tokenizer, folder / label, progress)
                write_results(folder, document)


def _trained(recipe: Recipe, task: Task, folder: Path, label: str) -> tuple[Any, Any]:
    """Return model and tokenizer ready to generate: of a run, or before training."""
    import torch

    model = (
        build_model(recipe, task, recipe.search.seeds[0])
        if label == BASE
        else load_model(str(folder / label / MODEL_FOLDER))
    )
    if torch.cuda.is_available() and recipe.training.device != "cpu":
        model = model.to("cuda", torch.bfloat16 if recipe.training.precision == "bfloat16" else torch.float32)
    return model.eval(), task.processing_class


def _score(
    recipe: Recipe, task: Task, name: str, model: Any, tokenizer: Any, folder: Path, progress: Progress
) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return load_evaluation("run").evaluate(
        name,
        model,
        tokenizer,
        task.benchmark_rows[name],
        samples_file=folder / f"samples-{name}.jsonl",
        batch_size=recipe.task.eval_batch_size,
        max_new_tokens=recipe.task.max_new_tokens or None,
        allow_code_execution=name in RUNS_CODE,
        model_name=recipe.model.name or "Llama from random weights",
        progress=progress,
    )


def benchmark_comparison(recipe: Recipe, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by benchmark, the scores of base, AdamW and Muon beside the published ones, and the paired test.

    Each optimizer stands with the learning rate that the validation loss chose; several seeds are averaged, and the
    paired test is of the first seed.
    """
    table: dict[str, Any] = {}
    for name in recipe.task.benchmarks:
        rows = {}
        if name in document.get("base", {}).get("benchmarks", {}):
            rows[BASE] = _row([document["base"]["benchmarks"][name]])
        for optimizer in ("adamw", "muon"):
            found = [run["eval"].get("benchmarks", {}).get(name) for run in _best(document, optimizer)]
            if found and all(found):
                rows[optimizer] = _row(found)
        published = recipe.published.get(name, {})
        entry: dict[str, Any] = {"measured": rows, "published": published}
        if {"adamw", "muon"} <= set(rows):
            entry["paired"] = _paired(document, name)
        table[name] = entry
    return table


def _best(document: Mapping[str, Any], optimizer: str) -> list[Mapping[str, Any]]:
    rate = document["comparison"]["best"][optimizer]["learning_rate"]
    runs = [r for r in document["runs"] if r["optimizer"] == optimizer and r["config"]["learning_rate"] == rate]
    return sorted(runs, key=lambda run: run["seed"])


def _row(found: list[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "score": statistics.fmean(entry["score"] for entry in found),
        "stderr": statistics.fmean(entry["stderr"] for entry in found),
        "n": found[0]["n"],
        "seeds": len(found),
    }


def _paired(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the paired test of Muon against AdamW over the same rows."""
    read = load_evaluation("samples").correctness
    muon, adamw = (
        read(_best(document, optimizer)[0]["eval"]["benchmarks"][name]["samples_file"])
        for optimizer in ("muon", "adamw")
    )
    return dict(load_evaluation("significance").paired_comparison(list(muon.values()), [adamw[key] for key in muon]))
