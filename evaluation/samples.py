# SPDX-License-Identifier: Apache-2.0
"""The samples file: one JSON line per row as it is finished, so that a killed run continues where it was.

`<file>.settings.json` beside it says what produced the lines; a run with other settings is refused, not mixed in.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from .rows import DataError, EvalRow, jsonl_rows


def settings_file(samples: Path) -> Path:
    """Return where the settings of a samples file are kept."""
    return samples.with_name(samples.name + ".settings.json")


def digest_of_rows(rows: Sequence[EvalRow]) -> str:
    """Return a short hash of ids, prompts and references."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr((row.id, row.prompt, row.reference)).encode())
    return digest.hexdigest()[:16]


def digest_of_model(model: Any) -> str:
    """Return a short hash of a sample of every weight: trained on, a model is another one.

    Note:
        At most 64 values of each tensor are read.
    """
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if not hasattr(value, "flatten") or type(value).__name__ == "DTensor":
            continue
        flat = value.detach().flatten()
        some = flat[:: max(1, flat.numel() // 64)][:64]
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(some.cpu().double().numpy().tobytes())
    return digest.hexdigest()[:16]


def open_samples(samples: Path, settings: dict[str, Any], rows: Sequence[EvalRow]) -> dict[str, dict[str, Any]]:
    """Return the finished lines of an earlier run by id, or begin a new file.

    A last line that was cut off by a kill is removed.

    Raises:
        DataError: the file belongs to other settings, has no settings beside it, or holds a line that does not fit.
    """
    beside = settings_file(samples)
    try:
        if not samples.exists():
            samples.parent.mkdir(parents=True, exist_ok=True)
            _replace(beside, json.dumps(settings, indent=2, sort_keys=True) + "\n")
            samples.touch()
            return {}
        if not beside.is_file():
            raise DataError(f"{samples} must have {beside.name} beside it; it has none. Give another --samples FILE.")
        _check_settings(samples, beside, settings)
        _drop_cut_line(samples)
    except OSError as error:
        raise DataError(f"--samples must be a file that can be written; got {samples}: {error.strerror}.") from None
    if not samples.stat().st_size:
        return {}
    known = {str(row.id) for row in rows}
    done: dict[str, dict[str, Any]] = {}
    for place, row in jsonl_rows(samples):
        if str(row.get("id")) not in known or not isinstance(row.get("correct"), bool):
            raise DataError(f"{place} must hold a row of this run; got id {row.get('id')!r:.40}.")
        done[str(row["id"])] = row
    return done


def _check_settings(samples: Path, beside: Path, settings: dict[str, Any]) -> None:
    try:
        earlier = json.loads(beside.read_text(encoding="utf-8"))
    except ValueError:
        earlier = None
    if not isinstance(earlier, dict):
        raise DataError(f"{beside} must be a JSON object. Give another --samples FILE.")
    current = json.loads(json.dumps(settings))
    for key in sorted(earlier | current):
        if earlier.get(key) != current.get(key):
            raise DataError(
                f"{samples} holds a run with {key} {earlier.get(key)!r:.80}, not {current.get(key)!r:.80}. "
                "Give another --samples FILE, or remove it."
            )


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(path.name + ".part")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _drop_cut_line(samples: Path) -> None:
    content = samples.read_bytes()
    if content and not content.endswith(b"\n"):
        with samples.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


def append_samples(samples: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Append finished rows; they are on disk when this returns."""
    with samples.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())


def check_target(samples: Path, inputs: Iterable[str | Path | None] = ()) -> None:
    """Check before any work that `samples` can be written.

    Raises:
        DataError: it is a folder, one of `inputs`, or in a place where no file can be.
    """
    if samples.is_dir():
        raise DataError(f"--samples must be a file that can be written; got the folder {samples}.")
    for given in inputs:
        if given is not None and samples.exists() and Path(given).exists() and samples.samefile(given):
            raise DataError(f"--samples must not be a file that is read; got {samples}. Give another one.")
    try:
        samples.parent.mkdir(parents=True, exist_ok=True)
        probe = samples.with_name(samples.name + ".part")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DataError(f"--samples must be a file that can be written; got {samples}: {error.strerror}.") from None


def write_samples(samples: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write all rows at once, or nothing."""
    _replace(samples, "".join(json.dumps(line) + "\n" for line in lines))


def correctness(samples: str | Path) -> dict[str, bool]:
    """Return whether each row of a samples file was right, by id as text: what a paired comparison takes."""
    return {str(row["id"]): bool(row["correct"]) for _, row in jsonl_rows(Path(samples))}


def read_predictions(path: Path, rows: Sequence[EvalRow], known: Collection[str | int] = ()) -> dict[str, str]:
    """Return the completion of each row by id as text.

    Args:
        path: JSON lines with `id` and `completion`.
        rows: the rows to score; each must have a completion.
        known: further ids that may occur and are left out.

    Raises:
        DataError: a line does not parse, an id is unknown, double or missing.
    """
    wanted = {str(row.id) for row in rows}
    allowed = wanted | {str(identity) for identity in known}
    found: dict[str, str] = {}
    for place, row in jsonl_rows(path):
        identity, completion = row.get("id"), row.get("completion")
        if isinstance(identity, bool) or not isinstance(identity, (int, str)) or not isinstance(completion, str):
            raise DataError(f"{place} must hold 'id' and a text 'completion'; got {json.dumps(row)[:60]}.")
        if str(identity) not in allowed:
            raise DataError(f"{place} must hold an id of the data; got {identity!r:.60}.")
        if str(identity) in found:
            raise DataError(f"{place} must hold each id once; got {identity!r:.60} again.")
        found[str(identity)] = completion
    missing = [row.id for row in rows if str(row.id) not in found]
    if missing:
        raise DataError(
            f"{path} must hold every row; {len(missing)} of {len(rows)} are missing, first {missing[0]!r}."
        )
    return found
