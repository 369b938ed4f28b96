# SPDX-License-Identifier: Apache-2.0
"""`hf-muon eval`: GSM8K, MMLU, MBPP and MBPP+ with the published settings, on a model or on given completions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ..console import notes, print_json, quick_imports, results, say
from ..errors import RunError, UsageError
from ..resources import load_evaluation
from .options import Debug, Json

HARNESSES = ("builtin", "lm-eval")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def evaluate(
    task: Annotated[str, typer.Argument(metavar="TASK", help="gsm8k, mmlu, mbpp or mbpp_plus.")],
    model: Annotated[str | None, typer.Option(help="A local folder or a hub id.")] = None,
    data: Annotated[Path | None, typer.Option(help="File of the rows [default: the hub data set].")] = None,
    predictions: Annotated[
        Path | None, typer.Option(help='Score completions made elsewhere: lines {"id", "completion"}; no model.')
    ] = None,
    limit: Annotated[int, typer.Option(help="Keep this many rows; 0 keeps all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Draw the kept rows at random [default: the first].")] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts decoded together.")] = 16,
    samples: Annotated[
        Path | None, typer.Option(help="File of the completions; the same command continues it [default: runs/eval/].")
    ] = None,
    mode: Annotated[str, typer.Option(help="published, or for mmlu loglikelihood alone.")] = "published",
    max_new_tokens: Annotated[int | None, typer.Option(help="Fewer than published, for a quick look.")] = None,
    dtype: Annotated[str, typer.Option(help="auto (as saved on a GPU, float32 on a CPU), or a dtype.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    harness: Annotated[str, typer.Option(help="builtin, or lm-eval as a second opinion.")] = "builtin",
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="Run generated programs, contained (mbpp, mbpp_plus).")
    ] = False,
    accept_weak_sandbox: Annotated[
        bool, typer.Option("--accept-weak-sandbox", help="Run them even where this system cannot contain them.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Score MODEL, or given completions, on TASK: zero-shot, greedy, with the published prompt and extraction."""
    _check_words(model, predictions, harness, dtype, limit, batch_size, max_new_tokens)
    published = mode == "published"
    if predictions is not None:
        _refuse("--predictions", mode=None if published else mode, max_new_tokens=max_new_tokens)
    if harness == "lm-eval":
        given = {"data": data, "seed": seed, "samples": samples, "predictions": predictions}
        _refuse("--harness lm-eval", **given, mode=None if published else mode, max_new_tokens=max_new_tokens)
        document = _second_opinion(task, str(model), limit, batch_size, dtype, device, allow_code_execution)
    else:
        tasks = load_evaluation("tasks")
        everything = tasks.load_rows(task, data)
        rows = tasks.load_rows(task, data, limit=limit, seed=seed) if limit else everything
        tasks.require_permission(task, allow_code_execution, accept_weak_sandbox)
        if accept_weak_sandbox and tasks.task_settings(task).runs_code and (missing := tasks.uncontained()):
            say(f"warning: generated programs are not kept from {', '.join(missing)}.")
        shared = {"allow_code_execution": allow_code_execution, "accept_weak_sandbox": accept_weak_sandbox}
        if predictions is not None:
            known = [row.id for row in everything]
            with _progress(task) as progress:
                document = load_evaluation("run").evaluate_predictions(
                    task, rows, predictions, samples_file=samples, progress=progress, known=known, **shared
                )
        else:
            options = {"batch_size": batch_size, "mode": mode, "max_new_tokens": max_new_tokens, **shared}
            document = _evaluate_model(task, str(model), rows, samples, _placement(dtype, device), options)
    if json:
        print_json(document)
    else:
        _print_table(document)


def _check_words(
    model: str | None,
    predictions: Path | None,
    harness: str,
    dtype: str,
    limit: int,
    batch_size: int,
    max_new_tokens: int | None,
) -> None:
    if harness not in HARNESSES:
        raise UsageError(f"--harness must be one of {', '.join(HARNESSES)}; got {harness!r}.")
    if dtype not in DTYPES:
        raise UsageError(f"--dtype must be one of {', '.join(DTYPES)}; got {dtype!r}.")
    if model is None and predictions is None:
        raise UsageError("eval must have --model M, or --predictions FILE to score completions made elsewhere.")
    if model is not None and predictions is not None:
        raise UsageError("eval must have either --model or --predictions; got both.")
    for name, value, least in (
        ("--limit", limit, 0),
        ("--batch-size", batch_size, 1),
        ("--max-new-tokens", max_new_tokens, 1),
    ):
        if value is not None and value < least:
            raise UsageError(f"{name} must be {least} or more; got {value}.")


def _refuse(beside: str, **given: Any) -> None:
    """Say which option has no meaning beside another one, instead of leaving it out silently."""
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"--{name.replace('_', '-')} must be left out with {beside}; got {value}.")


def _second_opinion(
    task: str, model: str, limit: int, batch_size: int, dtype: str, device: str, allowed: bool
) -> dict[str, Any]:
    tasks = load_evaluation("tasks")
    tasks.require_permission(task, allowed, accept_weak=True)
    return load_evaluation("harness").evaluate_with_lm_eval(
        *(task, model), limit=limit, batch_size=batch_size, dtype=dtype, device="" if device == "auto" else device
    )


def _placement(dtype: str, device: str) -> tuple[str, Any]:
    import torch

    place = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UsageError(f"--device must be one that torch has here; got {device!r}.") from None
    kind = ("float32" if place == "cpu" else "auto") if dtype == "auto" else dtype
    return place, kind if kind == "auto" else getattr(torch, kind)


def _load_model(name: str, placement: tuple[str, Any]) -> tuple[Any, Any]:
    with quick_imports():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from ..training.quiet import quiet_loaded_libraries

        quiet_loaded_libraries()
    device, dtype = placement
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except Exception as error:  # what a broken folder raises differs with the file that is broken
        reason = str(error).strip().split("\n")[0][:160]
        raise UsageError(
            f"--model must be a folder with a saved causal language model and its tokenizer, or a hub id that can be "
            f"reached; got {name!r}: {reason}"
        ) from None
    return model.to(device).eval(), tokenizer


def _evaluate_model(
    task: str, name: str, rows: list[Any], samples: Path | None, placement: tuple[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    if notes.is_terminal:
        say("Loading the model ...")
    model, tokenizer = _load_model(name, placement)
    samples = samples or _default_samples(task, name, rows, model, options)
    say(f"{task}: {len(rows)} rows. Completions in {samples}")
    try:
        with _progress(task) as progress:
            return load_evaluation("run").evaluate(
                task, model, tokenizer, rows, samples_file=samples, progress=progress, model_name=name, **options
            )
    except KeyboardInterrupt:
        raise RunError(f"stopped; finished rows are kept in {samples}. The same command continues.") from None


def _default_samples(task: str, name: str, rows: list[Any], model: Any, options: dict[str, Any]) -> Path:
    """Name a file after everything that decides its content: the same command continues, another begins anew."""
    import hashlib

    kept = load_evaluation("samples")
    parts = [kept.digest_of_rows(rows), kept.digest_of_model(model), options["mode"], options["max_new_tokens"]]
    digest = hashlib.sha256(repr((name, str(model.dtype), parts)).encode()).hexdigest()[:8]
    stem = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(name).name or "model")
    return Path("runs") / "eval" / f"{task}-{stem}-{digest}.jsonl"


@contextmanager
def _progress(task: str) -> Iterator[Callable[[int, int], None]]:
    """Show finished rows: a bar in a terminal, a line at each tenth elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        console=notes,
        transient=True,
        disable=not notes.is_terminal,
    )
    shown = bar.add_task(task, total=None)
    tenths = -1

    def update(finished: int, total: int) -> None:
        nonlocal tenths
        bar.update(shown, completed=finished, total=total)
        if not notes.is_terminal and finished * 10 // total > tenths:
            tenths = finished * 10 // total
            say(f"{task}: {finished} of {total} rows")

    with bar:
        yield update


def _print_table(document: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(document["task"])
    for column in ("rows", "score", "standard error"):
        table.add_column(column, justify="right")

    def add(label: str, rows: int, part: dict[str, Any]) -> None:
        error = "" if part["stderr"] is None else f"{part['stderr']:.1%}"
        table.add_row(label, f"{rows:,}", f"{part['score']:.1%}", error)

    measured = document["model"] or "given completions"
    add(measured, document["n"], document)
    if "loglikelihood" in document:
        add("  by log-likelihood of the letters", document["n"], document["loglikelihood"])
    for key, label in (("adamw", "AdamW"), ("muon", "Muon")):
        if "published" in document:
            published = document["published"]
            add(f"published: {published['model']}, {label}", published["rows"], published[key])
    results.print(table)
    if "note" in document:
        results.print(document["note"], markup=False)
