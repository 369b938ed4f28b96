# SPDX-License-Identifier: Apache-2.0
"""The four tasks: published settings, rows, and what makes a completion right."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hf_muon.config import nearest

from .extraction import gsm8k_answer, gsm8k_is_decided, mmlu_letter, normalise_number, program_text
from .mbpp import mbpp_row
from .prompts import LETTERS, instruction_prompt, multiple_choice_question
from .rows import DataError, EvalRow, csv_rows, hub_rows, jsonl_rows, require_columns, text_field
from .sandbox.launcher import Limits, Outcome, run_program, uncontained
from .sandbox.launcher import SandboxError as SandboxError

FORMAT_NOTE = "Zero-shot scores partly measure whether a model answers in the expected format."
_MBPP_STOPS = ("\nclass ", "\ndef ", "\n#", "\nif __name__", "\nprint(")
_CHOICES = ("choice0", "choice1", "choice2", "choice3")


@dataclasses.dataclass(frozen=True)
class TaskSettings:
    """How a task was run in the published experiment, and what came out.

    Attributes:
        max_new_tokens: tokens generated at most.
        stops: texts that end a completion; the completion is cut before the first.
        published: score of each optimizer on Moonlight-16B-A3B.
        num_rows: rows of the published test set.
        runs_code: whether scoring executes what the model wrote.
        hub: name, configuration and split on the hub.
        note: what the score means.
        decided: tells when more text cannot change the answer, so that generation may end.
    """

    max_new_tokens: int
    stops: tuple[str, ...]
    published: dict[str, float]
    num_rows: int
    runs_code: bool
    hub: tuple[str, str | None, str]
    note: str
    decided: Callable[[str], bool] | None = None


SETTINGS: dict[str, TaskSettings] = {
    "mbpp": TaskSettings(
        512, _MBPP_STOPS, {"adamw": 0.661, "muon": 0.646}, 378, True, ("evalplus/mbppplus", None, "test"), FORMAT_NOTE
    ),
    "mbpp_plus": TaskSettings(
        512, _MBPP_STOPS, {"adamw": 0.534, "muon": 0.548}, 378, True, ("evalplus/mbppplus", None, "test"), FORMAT_NOTE
    ),
    "mmlu": TaskSettings(
        10,
        (),
        {"adamw": 0.660, "muon": 0.678},
        14_042,
        False,
        ("cais/mmlu", "all", "test"),
        f"{FORMAT_NOTE} The log-likelihood of the four letters does not.",
        lambda text: mmlu_letter(text) is not None,
    ),
    "gsm8k": TaskSettings(
        1024,
        (),
        {"adamw": 0.805, "muon": 0.810},
        1_319,
        False,
        ("openai/gsm8k", "main", "test"),
        FORMAT_NOTE,
        gsm8k_is_decided,
    ),
}


def task_settings(task: str) -> TaskSettings:
    """Return the settings of a task.

    Raises:
        DataError: no such task; the nearest is named.
    """
    if task not in SETTINGS:
        raise DataError(f"TASK must be one of {', '.join(SETTINGS)}; got {task!r}.{nearest(task, list(SETTINGS))}")
    return SETTINGS[task]


def load_rows(task: str, data: str | Path | None, *, limit: int = 0, seed: int | None = None) -> list[EvalRow]:
    """Read the rows of a task.

    Args:
        task: mbpp, mbpp_plus, mmlu or gsm8k.
        data: a file (for MMLU a folder of CSV files as well); None takes `MBPP_OVERRIDE_PATH` for the two MBPP
            tasks where it is set, else the hub data set.
        limit: keep this many rows; 0 keeps all.
        seed: draw the kept rows at random, the same for the same seed; None keeps the first.

    Raises:
        DataError: the file is missing, empty or has a row that does not fit; nothing is read half.
    """
    settings = task_settings(task)
    if limit < 0:
        raise DataError(f"--limit must be 0 (all rows) or more; got {limit}.")
    try:
        path = Path(data).expanduser() if data is not None else _override(task)
    except RuntimeError:
        raise DataError(f"--data must be a file; the user of {data} does not exist.") from None
    rows = []
    for number, (place, row) in enumerate(_raw_rows(task, settings, path)):
        rows.append(_READERS[task](place, row, number))
    seen: set[str] = set()
    for entry in rows:
        if str(entry.id) in seen:
            raise DataError(f"{path or settings.hub[0]} must hold each task_id once; got {entry.id!r} twice.")
        seen.add(str(entry.id))
    if not 0 < limit < len(rows):
        return rows
    chosen = range(limit) if seed is None else sorted(random.Random(seed).sample(range(len(rows)), limit))
    return [rows[index] for index in chosen]


def _override(task: str) -> Path | None:
    given = os.environ.get("MBPP_OVERRIDE_PATH") if task.startswith("mbpp") else None
    return Path(given) if given else None


def _raw_rows(task: str, settings: TaskSettings, path: Path | None) -> Iterator[tuple[str, dict[str, Any]]]:
    if path is None:
        yield from hub_rows(task, *settings.hub)
    elif task == "mmlu" and path.is_dir():
        files = sorted(path.glob("*.csv"))
        if not files:
            raise DataError(f"{path} must hold CSV files; got none.")
        for file in files:
            yield from csv_rows(file, ("question", *_CHOICES, "answer"))
    elif task == "mmlu" and path.suffix != ".jsonl":
        yield from csv_rows(path, ("question", *_CHOICES, "answer"))
    else:
        yield from jsonl_rows(path)


def _gsm8k_row(place: str, row: dict[str, Any], number: int) -> EvalRow:
    require_columns(place, list(row), ["question", "answer"])
    answer = text_field(place, row, "answer")
    if "####" not in answer or (gold := gsm8k_answer(answer[answer.rindex("####") :])) is None:
        raise DataError(f"{place} must end its answer with '#### number'; got {answer[-60:]!r}.")
    return EvalRow(number, instruction_prompt(text_field(place, row, "question")), gold)


def _mmlu_row(place: str, row: dict[str, Any], number: int) -> EvalRow:
    question = text_field(place, row, "question")
    if "choices" in row:
        choices = row["choices"]
        if not isinstance(choices, list) or len(choices) != len(LETTERS):
            raise DataError(f"{place} must hold four choices; got {choices!r:.60}.")
    else:
        require_columns(place, list(row), _CHOICES)
        choices = [row[name] for name in _CHOICES]
    require_columns(place, list(row), ["answer"])
    answer = str(row["answer"]).strip()
    if answer not in ("0", "1", "2", "3"):
        raise DataError(f"{place} must hold an index from 0 to 3 in 'answer'; got {row['answer']!r:.60}.")
    prompt = instruction_prompt(multiple_choice_question(question, list(map(str, choices))))
    return EvalRow(number, prompt, LETTERS[int(answer)])


_READERS: dict[str, Callable[[str, dict[str, Any], int], EvalRow]] = {
    "gsm8k": _gsm8k_row,
    "mmlu": _mmlu_row,
    "mbpp": lambda place, row, number: mbpp_row(place, row, plus=False),
    "mbpp_plus": lambda place, row, number: mbpp_row(place, row, plus=True),
}


def score(task: str, row: EvalRow, completion: str, *, allow_code_execution: bool = False) -> bool:
    """Return whether a completion answers its row.

    Raises:
        DataError: the task runs code and that is not allowed, here or by `HF_ALLOW_CODE_EVAL=1`.
        SandboxError: this system cannot contain a program.
    """
    settings = task_settings(task)
    if settings.runs_code:
        require_permission(task, allow_code_execution)
        return run_tests(row, completion).passed
    if task == "mmlu":
        return mmlu_letter(completion) == row.reference
    answer = gsm8k_answer(completion)
    return answer is not None and answer == normalise_number(str(row.reference))


def run_tests(row: EvalRow, completion: str, *, limits: Limits | None = None, require: bool = True) -> Outcome:
    """Run the tests of an MBPP row against a completion, contained."""
    return run_program(dataclasses.replace(row.reference, source=program_text(completion)), limits, require=require)


def require_permission(task: str, allowed: bool, accept_weak: bool = False) -> None:
    """Raise where the task runs generated code and that was not allowed, or cannot be contained.

    Raises:
        DataError: neither `allowed` nor `HF_ALLOW_CODE_EVAL=1`.
        SandboxError: something stays uncontained and `accept_weak` does not hold.
    """
    if not task_settings(task).runs_code:
        return
    if not allowed and os.environ.get("HF_ALLOW_CODE_EVAL") != "1":
        raise DataError(
            f"{task} runs the programs that the model writes, which needs --allow-code-execution "
            "(or HF_ALLOW_CODE_EVAL=1); nothing was run."
        )
    if not accept_weak and (missing := uncontained()):
        raise SandboxError(
            f"this system cannot keep a generated program from {', '.join(missing)}; nothing was run. "
            "Use a container or machine of its own there, and --accept-weak-sandbox."
        )
