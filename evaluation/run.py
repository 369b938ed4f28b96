# SPDX-License-Identifier: Apache-2.0
"""Evaluate a model, or completions made elsewhere, and return the document of `hf-muon eval --json`."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .extraction import gsm8k_answer, mmlu_letter
from .rows import DataError, EvalRow
from .samples import (
    append_samples,
    check_target,
    digest_of_model,
    digest_of_rows,
    open_samples,
    read_predictions,
    write_samples,
)
from .significance import standard_error
from .tasks import require_permission, run_tests, score, task_settings

MODES = ("published", "loglikelihood")
Progress = Callable[[int, int], None]  # rows finished, rows in all


def evaluate(
    task: str,
    model: Any,
    tokenizer: Any,
    rows: Sequence[EvalRow],
    *,
    samples_file: str | Path,
    batch_size: int = 16,
    allow_code_execution: bool = False,
    mode: str = "published",
    progress: Progress | None = None,
    model_name: str | None = None,
    accept_weak_sandbox: bool = False,
    max_new_tokens: int | None = None,
) -> dict[str, Any]:
    """Generate, score and append one line per row to `samples_file`; a second call continues it.

    Args:
        task: mbpp, mbpp_plus, mmlu or gsm8k.
        model: a causal language model on its device.
        tokenizer: its tokenizer.
        rows: from `load_rows`.
        samples_file: JSON lines; new, or from an interrupted call with the same settings.
        batch_size: prompts decoded together; may differ when continuing.
        allow_code_execution: let the programs of MBPP run, contained.
        mode: `published`, or for MMLU `loglikelihood` of the letters alone.
        progress: called with the finished and all rows.
        model_name: name in the document; the configuration's own by default.
        accept_weak_sandbox: run programs even where the system cannot contain them.
        max_new_tokens: fewer tokens than published, for quick looks; recorded in the settings.

    Returns:
        `task`, `model`, `n`, `correct`, `score`, `stderr`, `settings`, `samples_file`, and for MMLU
        `loglikelihood`; `published` and `note` stand beside them.

    Raises:
        DataError: unknown task or mode, no rows, or a samples file of other settings.
        SandboxError: programs cannot be contained here.
    """
    settings = _settings(task, rows, mode, max_new_tokens)
    if batch_size < 1:
        raise DataError(f"--batch-size must be 1 or more; got {batch_size}.")
    require_permission(task, allow_code_execution, accept_weak_sandbox)
    name = model_name or getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    settings |= {"model": name, "weights": digest_of_model(model), "dtype": dtype}
    samples_file = Path(samples_file)
    done = open_samples(samples_file, settings, rows)
    pending = [row for row in rows if str(row.id) not in done]
    pending.sort(key=lambda row: -len(row.prompt))  # neighbours of about equal length, the most memory first
    if progress is not None:
        progress(len(rows) - len(pending), len(rows))
    for start in range(0, len(pending), batch_size):
        batch = pending[start : start + batch_size]
        lines = _finish_batch(task, model, tokenizer, batch, settings, not accept_weak_sandbox)
        append_samples(samples_file, lines)
        done |= {str(line["id"]): line for line in lines}
        if progress is not None:
            progress(len(done), len(rows))
    return _document(task, name, [done[str(row.id)] for row in rows], settings, str(samples_file))


def evaluate_predictions(
    task: str,
    rows: Sequence[EvalRow],
    predictions_file: str | Path,
    *,
    samples_file: str | Path | None = None,
    allow_code_execution: bool = False,
    progress: Progress | None = None,
    accept_weak_sandbox: bool = False,
    known: Collection[str | int] = (),
) -> dict[str, Any]:
    """Score completions made elsewhere; stops do not cut them.

    Args:
        task: mbpp, mbpp_plus, mmlu or gsm8k.
        rows: from `load_rows`.
        predictions_file: JSON lines `{"id", "completion"}`.
        samples_file: where the scored lines go, all at the end; None writes nothing, and the document then names
            the predictions.
        allow_code_execution: let the programs of MBPP run, contained.
        progress: called with the finished and all rows.
        accept_weak_sandbox: run programs even where the system cannot contain them.
        known: ids of the data that are not among `rows` and may occur.

    Raises:
        DataError: a line does not parse, or an id is missing, unknown or double.
        SandboxError: programs cannot be contained here.
    """
    settings = _settings(task, rows, "published", None)
    completions = read_predictions(Path(predictions_file), rows, known)
    require_permission(task, allow_code_execution, accept_weak_sandbox)
    if samples_file is not None:
        check_target(Path(samples_file), [predictions_file])
    lines: list[dict[str, Any]] = []
    chunk = 4 * _workers()
    for start in range(0, len(rows), chunk):
        batch = rows[start : start + chunk]
        lines += _scored(task, batch, [completions[str(row.id)] for row in batch], not accept_weak_sandbox)
        if progress is not None:
            progress(len(lines), len(rows))
    if samples_file is not None:
        write_samples(Path(samples_file), lines)
    shown = str(predictions_file if samples_file is None else samples_file)  # where the completions are
    settings["predictions"] = str(predictions_file)
    return _document(task, None, lines, settings, shown)


def _settings(task: str, rows: Sequence[EvalRow], mode: str, max_new_tokens: int | None) -> dict[str, Any]:
    published = task_settings(task)
    if mode not in MODES or (mode == "loglikelihood" and task != "mmlu"):
        raise DataError(f"mode must be published, or loglikelihood for mmlu; got {mode!r} for {task}.")
    if not rows:
        raise DataError(f"{task} must have at least one row; got none.")
    return {
        "task": task,
        "mode": mode,
        "few_shot": 0,
        "decoding": "greedy",
        "max_new_tokens": max_new_tokens or published.max_new_tokens,
        "stops": list(published.stops),
        "rows": len(rows),
        "rows_digest": digest_of_rows(rows),
    }


def _finish_batch(
    task: str, model: Any, tokenizer: Any, batch: Sequence[EvalRow], settings: dict[str, Any], require: bool
) -> list[dict[str, Any]]:
    from .generation import generate
    from .likelihood import letter_log_likelihoods

    prompts = [row.prompt for row in batch]
    likelihoods = letter_log_likelihoods(model, tokenizer, prompts) if task == "mmlu" else []
    if settings["mode"] == "loglikelihood":
        completions = [max(scores, key=lambda letter: scores[letter]) for scores in likelihoods]
    else:
        texts = generate(
            model,
            tokenizer,
            prompts,
            max_new_tokens=settings["max_new_tokens"],
            stops=settings["stops"],
            batch_size=len(batch),
            decided=task_settings(task).decided,
        )
        completions = [text for group in texts for text in group]
    lines = _scored(task, batch, completions, require)
    for line, row, scores in zip(lines, batch, likelihoods, strict=False):
        line["loglikelihood"] = scores
        line["loglikelihood_correct"] = max(scores, key=lambda letter: scores[letter]) == row.reference
    return lines


def _workers() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _scored(task: str, rows: Sequence[EvalRow], completions: Sequence[str], require: bool) -> list[dict[str, Any]]:
    if task_settings(task).runs_code:
        with ThreadPoolExecutor(_workers()) as pool:
            outcomes = list(
                pool.map(lambda pair: run_tests(*pair, require=require), zip(rows, completions, strict=True))
            )
        return [
            {"id": row.id, "completion": text, "correct": outcome.passed, "reason": outcome.reason}
            for row, text, outcome in zip(rows, completions, outcomes, strict=True)
        ]
    extract = mmlu_letter if task == "mmlu" else gsm8k_answer
    return [
        {"id": row.id, "completion": text, "answer": extract(text), "correct": score(task, row, text)}
        for row, text in zip(rows, completions, strict=True)
    ]


def _share(correct: int, count: int) -> dict[str, Any]:
    share = correct / count
    return {"correct": correct, "score": share, "stderr": standard_error(share, count)}


def _document(
    task: str, name: str | None, lines: list[dict[str, Any]], settings: dict[str, Any], samples: str
) -> dict[str, Any]:
    published = task_settings(task)
    count = len(lines)
    document = {
        "task": task,
        "model": name,
        "n": count,
        **_share(sum(line["correct"] for line in lines), count),
        "settings": settings,
        "samples_file": samples,
        "published": {
            "model": "Moonlight-16B-A3B",
            "rows": published.num_rows,
            **{
                key: {"score": share, "stderr": standard_error(share, published.num_rows)}
                for key, share in published.published.items()
            },
        },
        "note": published.note,
    }
    if all("loglikelihood_correct" in line for line in lines):
        document["loglikelihood"] = _share(sum(line["loglikelihood_correct"] for line in lines), count)
    return document
