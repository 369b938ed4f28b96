# SPDX-License-Identifier: Apache-2.0
"""Rows of instruction data: read strictly from files, or through `datasets` from the hub, as prompt and answer."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..resources import load_evaluation, recipes_dir

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
Row = Mapping[str, Any]


def _instruction(row: Row) -> tuple[str, str]:
    # Public instruction sets hold a few rows with an empty output: they train nothing and are dropped later.
    return _prompt(row["instruction"], row.get("input") or ""), row["output"] or ""


def _metamath(row: Row) -> tuple[str, str]:
    return _prompt(row["query"]), _text(row, "response")


def _gsm8k(row: Row) -> tuple[str, str]:
    return _prompt(row["question"]), _text(row, "answer")


def _mbpp(row: Row) -> tuple[str, str]:
    tests = row.get("test_list") or [""]
    question = load_evaluation("prompts").programming_question(row["text" if "text" in row else "prompt"], tests[0])
    return _prompt(question), _text(row, "code")


def _mmlu(row: Row) -> tuple[str, str]:
    choices = row["choices"] if "choices" in row else [row[f"choice{k}"] for k in range(4)]
    if len(choices) != 4:
        raise ValueError(f"four choices; got {len(choices)}")
    letter = "ABCD"[_index(row["answer"])]
    prompts = load_evaluation("prompts")
    return _prompt(prompts.multiple_choice_question(row["question"], [str(choice) for choice in choices])), letter


def _index(answer: Any) -> int:
    text = str(answer).strip()
    if text.isdigit() and int(text) < 4:
        return int(text)
    raise ValueError(f"answer as an index from 0 to 3; got {answer!r}")


def _text(row: Row, key: str) -> str:
    value = row[key]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"text in {key!r}; got {value!r}")
    return value


def _prompt(instruction: Any, context: str = "") -> str:
    if not isinstance(instruction, str) or not instruction.strip() or not isinstance(context, str):
        raise ValueError(f"text as the question; got {instruction!r}")
    return load_evaluation("prompts").instruction_prompt(instruction, context)


# The first layout whose columns are all there is the one: the more special ones stand first.
LAYOUTS: tuple[tuple[tuple[str, ...], Callable[[Row], tuple[str, str]]], ...] = (
    (("instruction", "output"), _instruction),
    (("query", "response"), _metamath),
    (("question", "choices", "answer"), _mmlu),
    (("question", "choice0", "choice1", "choice2", "choice3", "answer"), _mmlu),
    (("question", "answer"), _gsm8k),
    (("text", "code"), _mbpp),
    (("prompt", "code"), _mbpp),
)


def layout_of(columns: Any, where: str) -> Callable[[Row], tuple[str, str]]:
    """Return the function that turns a row with these columns into prompt and answer.

    Raises:
        UsageError: no known layout has these columns.
    """
    for needed, convert in LAYOUTS:
        if set(needed) <= set(columns):
            return convert
    known = "; ".join(", ".join(needed) for needed, _ in LAYOUTS)
    raise UsageError(
        f"{where} must have the columns of one known layout ({known}); got {', '.join(map(str, columns)) or 'none'}."
    )


def read_pairs(path: Path, limit: int = 0) -> list[dict[str, str]]:
    """Return the rows of a local file as `{"prompt", "answer"}`.

    Args:
        path: .jsonl, .json (an array or one object a line), .csv with a header row, or .parquet.
        limit: read at most this many rows; 0 = all.

    Raises:
        UsageError: no such file, an unknown layout, no rows, or a row that does not parse: its line is named.
    """
    pairs: list[dict[str, str]] = []
    convert = columns = None
    for number, row in _numbered(path):
        where = f"{path}:{number}"
        if not isinstance(row, dict):
            raise UsageError(f"{where} must be an object with named columns; got {str(row)[:60]!r}.")
        if convert is None or set(row) != columns:
            convert, columns = layout_of(row, where), set(row)
        try:
            prompt, answer = convert(row)
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{where} must hold {error}.") from None
        pairs.append({"prompt": prompt, "answer": answer})
        if limit and len(pairs) == limit:
            break
    if not pairs:
        raise UsageError(f"{path} must hold at least one row; got none.")
    return pairs


def _numbered(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield each row with its line, or with its place where a format has no lines."""
    try:
        if path.suffix == ".parquet":
            from datasets import Dataset

            yield from enumerate(Dataset.from_parquet(str(path)), start=1)
        elif path.suffix == ".csv":
            yield from _csv_rows(path)
        else:
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".json" and text.lstrip()[:1] == "[":
                yield from enumerate(json.loads(text), start=1)
            else:
                yield from _json_lines(path, text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno} must be JSON; got an error: {error.msg}.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} must be a readable {path.suffix or 'text'} file; got: {error}.") from None


def _json_lines(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would cut at U+2028 inside a string
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError:
                raise UsageError(f"{path}:{number} must be a JSON object; got {line.strip()[:60]!r}.") from None


def _csv_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        for row in reader:
            if None in row or None in row.values():
                count = len(reader.fieldnames or ())
                raise UsageError(f"{path}:{reader.line_num} must have {count} columns, as the header says.")
            yield reader.line_num, row


def shipped_data() -> dict[str, Path]:
    """Return the data folders that come with hf-muon, by name."""
    return {path.name: path for path in sorted((recipes_dir() / "data").iterdir()) if path.is_dir()}


def split_files(folder: Path) -> dict[str, Path]:
    """Return the files of a folder that are named after a split: train, validation, test."""
    found = {}
    for name in ("train", "validation", "test"):
        for suffix in SUFFIXES:
            if (folder / f"{name}{suffix}").is_file():
                found[name] = folder / f"{name}{suffix}"
                break
    return found
