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


def open_folder(folder: Path, recipe: Recipe) -> list[dict[str, Any]]:
    """Create the folder and write `config.yaml`; return the finished runs of an earlier, interrupted start.

    Raises:
        UsageError: the folder cannot be written, or holds something that is not this very run.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output-dir must be a folder; got the file {folder}. Give another path.")
    finished: list[dict[str, Any]] = []
    if folder.is_dir() and any(folder.iterdir()):
        finished = _resume(folder, recipe)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "permission denied")
        write_recipe(recipe, folder / "config.yaml")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"--output-dir must be writable; {folder} is not ({reason}). Give another path.") from None
    return finished


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
    return [_with_nan(run) for run in runs]


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


def _with_nan(run: dict[str, Any]) -> dict[str, Any]:
    """Undo `plain` where a number is expected: null losses mean that the run diverged."""
    nan = math.nan
    run["loss"] = [nan if value is None else value for value in run["loss"]]
    for metrics in (run["eval"], run["eval"]["validation"], *run["eval"]["curve"]):
        for key, value in metrics.items():
            metrics[key] = nan if value is None else value
    return run
