# SPDX-License-Identifier: Apache-2.0
"""Read evaluation rows from files and from the hub; every problem is one sentence that names the place."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_muon.config import nearest

csv.field_size_limit(1 << 24)


class DataError(ValueError):
    """The user's file or words cannot be used: exit code 2, nothing written."""

    exit_code = 2


@dataclass(frozen=True)
class EvalRow:
    """One question.

    Attributes:
        id: the row's number from 0, or its `task_id`.
        prompt: the whole text that the model continues.
        reference: what scoring needs: a number, a letter, or a description of the tests.
    """

    id: str | int
    prompt: str
    reference: Any


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        DataError: it is missing, unreadable, or not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} must be UTF-8 text; got byte {error.object[error.start]:#x} at {error.start}."
        ) from None
    except OSError as error:
        raise DataError(f"{path} must be a readable file; got: {error.strerror}.") from None


def jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object of a JSON-lines file with its place, `file:line`; blank lines are skipped.

    Raises:
        DataError: a line is no JSON object, or there is none at all.
    """
    empty = True
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number} must be a JSON object; got {line.strip()[:60]!r}.")
        empty = False
        yield f"{path}:{number}", row
    if empty:
        raise DataError(f"{path} must hold at least one row; got none.")


def csv_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row of a CSV file with its place; the first line names the columns.

    Raises:
        DataError: a column is missing, a row has too few or too many fields, or there is none.
    """
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        if not header:
            raise DataError(f"{path} must hold at least one row; got none.")
        require_columns(str(path), header, columns)
        empty = True
        for fields in reader:
            if not fields:
                continue
            if len(fields) != len(header):
                raise DataError(f"{path}:{reader.line_num} must have {len(header)} fields; got {len(fields)}.")
            empty = False
            yield f"{path}:{reader.line_num}", dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num} must be a row of CSV; got: {error}.") from None
    if empty:
        raise DataError(f"{path} must hold at least one row; got none.")


def require_columns(place: str, present: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise for the first column that is missing and name the nearest one that is there."""
    for name in wanted:
        if name not in present:
            near = nearest(name, list(present)) if present else ""
            hint = near.replace("Did you mean", "Nearest:").replace("?", ".").replace("Valid:", "It has:")
            raise DataError(f"{place} must have the column {name!r} (columns: {', '.join(wanted)}).{hint}")


def text_field(place: str, row: dict[str, Any], name: str) -> str:
    """Return a text column.

    Raises:
        DataError: the column is missing or holds something else.
    """
    require_columns(place, list(row), [name])
    if not isinstance(row[name], str):
        raise DataError(f"{place} must hold text in {name!r}; got {row[name]!r:.60}.")
    return row[name]


def hub_rows(task: str, name: str, config: str | None, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a hub data set.

    Raises:
        DataError: it cannot be loaded, for example without a network.
    """
    from datasets import load_dataset

    try:
        rows = load_dataset(name, config, split=split)
    except Exception as error:
        raise DataError(
            f"{task} must find the hub data set {name}; got {type(error).__name__}. Give a file: --data FILE."
        ) from None
    for number, row in enumerate(rows):
        yield f"{name}:{number}", dict(row)
