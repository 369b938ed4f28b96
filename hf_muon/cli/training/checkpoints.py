# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: which one a killed run continues from, and what stays when all is done."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import RunError
from .output_folder import plain

# Written last into each checkpoint folder: a folder without it was cut short and is not continued from.
WATCH_FILE = "watch.json"
MODEL_FOLDER = "model"
RESULT_FILE = "trained.json"


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint folders of a run, oldest first."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.rsplit("-", 1)[1].isdigit()]
    return sorted(found, key=lambda path: int(path.name.rsplit("-", 1)[1]))


def last_whole_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint that was written to its end."""
    return next((path for path in reversed(checkpoints(folder)) if (path / WATCH_FILE).is_file()), None)


def drop_cut_checkpoints(folder: Path) -> None:
    """Remove checkpoints that a kill or a full disk cut short."""
    for path in checkpoints(folder):
        if not (path / WATCH_FILE).is_file():
            shutil.rmtree(path)


def drop_weights(folder: Path) -> None:
    """Remove checkpoints and final weights of a run; samples and small files stay."""
    for path in (*checkpoints(folder), folder / MODEL_FOLDER):
        shutil.rmtree(path, ignore_errors=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def write_json(path: Path, data: Any) -> None:
    """Write JSON in one move; numbers that are not finite become null."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(plain(data), allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


@contextmanager
def full_disk_is_an_error_to_continue_from(folder: Path) -> Iterator[None]:
    """Turn a full disk, however a library words it, into one sentence.

    Raises:
        RunError: the disk is full.
    """
    try:
        yield
    except Exception as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if not full and not any(text in str(error) for text in ("No space left", "os error 28", "file write failed")):
            raise
        raise RunError(
            f"the disk of {folder} is full; nothing finished is lost. Make room, then start the same command again "
            f"with --output-dir {folder}."
        ) from error
