# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: chosen, checked and filled so that an interrupted run leaves a clear state."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import yaml

from ..errors import UsageError
from ..recipe.loading import write_recipe
from ..recipe.schema import Recipe


def default_folder(recipe: Recipe) -> Path:
    """Return `runs/<recipe>-<time>`."""
    return Path("runs") / f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def check_folder(folder: Path, recipe: Recipe) -> list[dict[str, Any]]:
    """Return the finished runs of an earlier, interrupted start of `recipe` in `folder`. Writes nothing.

    Raises:
        UsageError: the folder cannot be written, or holds something that is not this very run.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--output-dir must be a folder; got the file {folder}. Give another path.")
        existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            reason = "permission denied" if existing.is_dir() else f"{existing} is a file"
            raise _not_writable(folder, reason)
        return _resume(folder, recipe) if folder.is_dir() and any(folder.iterdir()) else []
    except OSError as error:
        raise _not_writable(folder, error.strerror or str(error)) from None


def open_folder(folder: Path, recipe: Recipe) -> None:
    """Create the folder and write `config.yaml`.

    Raises:
        UsageError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_recipe(recipe, folder / "config.yaml")
    except OSError as error:
        raise _not_writable(folder, error.strerror or str(error)) from None


def _not_writable(folder: Path, reason: str) -> UsageError:
    return UsageError(f"--output-dir must be writable; {folder} is not ({reason.lower()}). Give another path.")


def _resume(folder: Path, recipe: Recipe) -> list[dict[str, Any]]:
    try:
        before = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        before = None
    same = yaml.safe_load(yaml.safe_dump(recipe.to_dict()))
    if before != same:
        what = "holds other files" if before is None else "holds a run with other settings"
        raise UsageError(f"--output-dir must be new or hold this same run; {folder} {what}. Give another path.")
    try:
        runs = json.loads((folder / "results.json").read_text(encoding="utf-8"))["runs"]
    except (OSError, ValueError, KeyError):
        return []
    return [with_nan(run) for run in runs]


def write_results(folder: Path, document: dict[str, Any]) -> None:
    """Write `results.json` in one move, so that a reader never meets half a file."""
    temporary = folder / "results.json.part"
    temporary.write_text(json.dumps(plain(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(folder / "results.json")


def plain(value: Any) -> Any:
    """Return JSON data: a number that is not finite becomes null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def with_nan(run: dict[str, Any]) -> dict[str, Any]:
    """Undo `plain` where a number is expected: null losses mean that the run diverged."""
    nan = math.nan
    run["loss"] = [nan if value is None else value for value in run["loss"]]
    for metrics in (run["eval"], run["eval"]["validation"], *run["eval"]["curve"]):
        for key, value in metrics.items():
            metrics[key] = nan if value is None else value
    return run
