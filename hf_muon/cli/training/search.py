# SPDX-License-Identifier: Apache-2.0
"""The search of a recipe: the grid on the first seed, then the best rates on the others."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ..errors import UsageError
from ..recipe.schema import OPTIMIZERS, Recipe
from .benchmarks import benchmark_comparison, score_all
from .checkpoints import checkpoints, drop_weights, full_disk_is_an_error_to_continue_from
from .comparison import best_rate, compare
from .launched import check_devices, num_processes, train_launched
from .memory import memory_comparison, predictions
from .output_folder import write_results
from .single_run import RunSpec, train_once
from .tasks import Task, build_model, build_task, meta_model


class Progress(Protocol):
    """What the driver tells while it works."""

    def start_run(self, name: str, index: int, total: int, steps: int) -> None:
        """Say that a run begins."""
        ...

    def step(self, step: int, loss: float) -> None:
        """Say that a step is done."""
        ...

    def end_run(self, run: dict[str, Any]) -> None:
        """Say that a run is finished."""
        ...

    def row(self, done: int, total: int) -> None:
        """Say that a row of a benchmark is done."""
        ...


def grid_specs(recipe: Recipe, seed: int) -> list[RunSpec]:
    """Return the whole grid for one seed, optimizers taking turns so that a slow spell hits both."""
    rates = {name: list(getattr(recipe.search, name)) for name in OPTIMIZERS}
    longest = max(len(values) for values in rates.values())
    return [RunSpec(name, rates[name][k], seed) for k in range(longest) for name in OPTIMIZERS if k < len(rates[name])]


def later_specs(recipe: Recipe, runs: list[dict[str, Any]]) -> list[RunSpec]:
    """Return the runs of the later seeds, once the first seed's grid is known."""
    later = recipe.search.seeds[1:]
    if recipe.search.extra_seeds_for == "all":
        return [spec for seed in later for spec in grid_specs(recipe, seed)]
    first = [run for run in runs if run["seed"] == recipe.search.seeds[0]]
    rates = {name: best_rate(first, name, recipe.search.metric) for name in OPTIMIZERS}
    return [RunSpec(name, rates[name], seed) for seed in later for name in OPTIMIZERS]


def prepare(recipe: Recipe) -> tuple[Task, dict[str, Any]]:
    """Build the data and route the model's parameters: all that can fail on a recipe's values. Writes nothing.

    Raises:
        UsageError: data that is not there, or options that do not fit the model.
    """
    use_threads(recipe.training.threads)
    check_devices(recipe)
    task = build_task(recipe)
    try:
        return task, describe_model(recipe, task)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UsageError(f"the recipe does not fit its model: {error}") from None


def run_search(
    recipe: Recipe,
    prepared: tuple[Task, dict[str, Any]],
    folder: Path,
    finished: list[dict[str, Any]],
    progress: Progress,
    versions: dict[str, Any],
    *,
    allow_code_execution: bool = False,
) -> dict[str, Any]:
    """Run everything a recipe asks for; `results.json` is written again after every run.

    Args:
        recipe: the resolved recipe.
        prepared: what `prepare(recipe)` returned.
        folder: an open output folder.
        finished: runs of an earlier start of the same recipe; they are kept.
        progress: hears of runs and steps.
        versions: goes into the results.
        allow_code_execution: score benchmarks that run generated programs.

    Returns:
        The content of `results.json`.
    """
    started = time.perf_counter()
    task, facts = prepared
    document: dict[str, Any] = {
        "recipe": recipe.name,
        "complete": False,
        "runs": list(finished),
        "comparison": {},
        "task": task.facts,
        "model": facts,
        "versions": versions,
    }
    if recipe.memory.model:
        document["predicted_memory"] = predictions(recipe)
    _warm_up(recipe, task)
    write_results(folder, document)
    _run_all(grid_specs(recipe, recipe.search.seeds[0]), recipe, task, folder, document, progress)
    _run_all(later_specs(recipe, document["runs"]), recipe, task, folder, document, progress)
    document["comparison"] = compare(document["runs"], recipe.search.metric)
    if recipe.task.benchmarks:
        score_all(recipe, task, folder, document, progress.row, allow_code_execution)
        document["comparison"]["benchmarks"] = benchmark_comparison(recipe, document)
    if recipe.memory.model:
        document["comparison"]["memory"] = memory_comparison(
            recipe, document.pop("predicted_memory"), document["runs"]
        )
    document["wall_seconds"] = time.perf_counter() - started
    document["complete"] = True
    _drop_checkpoints(recipe, folder, document)
    write_results(folder, document)
    return document


def predict_only(recipe: Recipe, folder: Path, versions: dict[str, Any]) -> dict[str, Any]:
    """Return and write the results of a memory recipe whose training needs devices that are not here."""
    started = time.perf_counter()
    document: dict[str, Any] = {"recipe": recipe.name, "complete": True, "runs": [], "versions": versions}
    document["comparison"] = {"memory": memory_comparison(recipe, predictions(recipe), [])}
    document["wall_seconds"] = time.perf_counter() - started
    write_results(folder, document)
    return document


def _run_all(
    specs: list[RunSpec], recipe: Recipe, task: Task, folder: Path, document: dict[str, Any], progress: Progress
) -> None:
    done = {run["name"] for run in document["runs"]}
    for spec in specs:
        if spec.name in done:
            continue
        progress.start_run(spec.name, len(document["runs"]) + 1, recipe.num_runs, recipe.training.steps)
        with full_disk_is_an_error_to_continue_from(folder):
            if recipe.training.launch == "none":
                result = train_once(recipe, task, spec, folder / spec.name, progress.step)
            else:
                result = train_launched(recipe, folder, spec, progress.step)
            document["runs"].append(result)
            write_results(folder, document)
        _drop_optimizer_states(recipe, folder / spec.name)
        progress.end_run(result)


def describe_model(recipe: Recipe, task: Task) -> dict[str, Any]:
    """Return sizes of the model and how its parameters are routed under the recipe's options."""
    from ...param_groups import check_coverage, explain_parameters

    model = meta_model(recipe, task)
    options: dict[str, Any] = {key: _patterns(recipe.optimizer.get(key)) for key in ("include", "exclude")}
    options |= {key: recipe.optimizer[key] for key in ("matrix_split", "conv") if key in recipe.optimizer}
    rows = explain_parameters(model, **options)
    check_coverage(rows)
    routed = {
        name: {
            "tensors": sum(row.algorithm == name for row in rows),
            "elements": sum(row.count for row in rows if row.algorithm == name),
        }
        for name in OPTIMIZERS
    }
    return {"parameters": sum(row.count for row in rows), "routing": routed}


def _patterns(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    return tuple(piece for piece in (value.split(";") if isinstance(value, str) else value) if piece)


def with_steps(recipe: Recipe, task: Task) -> Recipe:
    """Return the recipe with the steps that `training.epochs` passes over the data make."""
    training = recipe.training
    if not training.epochs:
        return recipe
    per_step = training.batch_size * training.gradient_accumulation * num_processes(recipe)
    steps = max(1, training.epochs * (len(task.train) // per_step))
    return replace(recipe, training=replace(training, steps=steps))


def use_threads(threads: int) -> None:
    """Set the threads of torch; 0 leaves its own choice."""
    import torch

    if threads:
        torch.set_num_threads(threads)


def _warm_up(recipe: Recipe, task: Task) -> None:
    """One forward and backward pass that nothing counts, so that the first run does not pay for start-up."""
    if task.model_source or recipe.training.launch != "none":
        return  # seconds against minutes of training, or in other processes
    model = build_model(recipe, task, recipe.search.seeds[0])
    count = min(recipe.training.batch_size, len(task.train))
    model(**task.collate([task.train[k] for k in range(count)])).loss.backward()


def _drop_optimizer_states(recipe: Recipe, folder: Path) -> None:
    """Keep the last checkpoint of a finished run at most; none where its weights are saved for the benchmarks."""
    if recipe.training.keep_checkpoints == "all":
        return
    found = checkpoints(folder)
    keeps = recipe.training.keep_checkpoints == "best" and not recipe.task.benchmarks
    for path in found[:-1] if keeps else found:
        shutil.rmtree(path, ignore_errors=True)


def _drop_checkpoints(recipe: Recipe, folder: Path, document: dict[str, Any]) -> None:
    """Keep the weights of the chosen learning rates only, unless the recipe wants all or none."""
    keep = recipe.training.keep_checkpoints
    best = document["comparison"]["best"]
    for run in document["runs"]:
        chosen = run["config"]["learning_rate"] == best[run["optimizer"]]["learning_rate"]
        if keep == "none" or (keep == "best" and not chosen):
            drop_weights(folder / run["name"])
