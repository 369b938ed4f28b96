# SPDX-License-Identifier: Apache-2.0
"""Training runs on several processes: each is an `accelerate launch` of its own, watched from the driver."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from ..errors import RunError, UsageError
from ..launch import shipped_files
from ..recipe.schema import Recipe
from .checkpoints import RESULT_FILE
from .output_folder import with_nan
from .single_run import RunSpec

LOG_FILE = "workers.log"
STEPS_FILE = "steps.jsonl"


def accelerate_file(recipe: Recipe) -> Path:
    """Return the Accelerate file that `training.launch` names.

    Raises:
        UsageError: it is neither a file nor a shipped name.
    """
    given = recipe.training.launch
    shipped = shipped_files()
    path = shipped.get(given, Path(given))
    if not path.is_file():
        known = ", ".join(["none", *sorted(shipped)])
        raise UsageError(f"training.launch must be a file or one of {known}; got {given!r}.")
    return path


def num_processes(recipe: Recipe) -> int:
    """Return the processes of a run, as the recipe or its Accelerate file says."""
    import yaml

    if recipe.training.launch == "none":
        return 1
    return recipe.training.num_processes or int(
        yaml.safe_load(accelerate_file(recipe).read_text(encoding="utf-8")).get("num_processes", 1)
    )


def check_devices(recipe: Recipe) -> None:
    """Refuse a launched run that this machine cannot hold, before anything is written.

    Raises:
        UsageError: fewer GPUs than processes, while the Accelerate file wants GPUs.
    """
    import torch

    if not has_devices(recipe):
        raise UsageError(
            f"training.num_processes must not exceed the GPUs; got {num_processes(recipe)} for "
            f"{torch.cuda.device_count()}. Choose a variant of the "
            "recipe (variant=NAME), training.launch=none, or try it with --tiny."
        )


def has_devices(recipe: Recipe) -> bool:
    """Return whether this machine has a device for each process that the recipe launches."""
    import torch
    import yaml

    if recipe.training.launch == "none":
        return True
    settings = yaml.safe_load(accelerate_file(recipe).read_text(encoding="utf-8"))
    machines = int(settings.get("num_machines", 1))
    return bool(settings.get("use_cpu")) or num_processes(recipe) <= torch.cuda.device_count() * machines


def command(recipe: Recipe, folder: Path, spec: RunSpec) -> list[str]:
    """Return the words that start the workers of one run."""
    with socket.socket() as free:  # accelerate's own default port may be taken by another run
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-c", "from hf_muon.cli.app import main; main()", "launch"]
    return [
        *launch,
        *("--config-file", str(accelerate_file(recipe))),
        *("--num_processes", str(num_processes(recipe))),
        *("--main_process_port", str(port)),
        *("-m", "hf_muon.cli.training.worker"),
        *(str(folder), spec.optimizer, repr(spec.learning_rate), str(spec.seed), str(recipe.training.steps)),
        str(os.getpid()),
    ]


def train_launched(
    recipe: Recipe, folder: Path, spec: RunSpec, on_step: Callable[[int, float], None]
) -> dict[str, Any]:
    """Train once on several processes and return the run's entry of `results.json`.

    Args:
        recipe: the resolved recipe; the workers read it from `config.yaml` in `folder`.
        folder: the output folder of all runs.
        spec: which run.
        on_step: hears of each step.

    Raises:
        RunError: a worker failed or was killed; the last line of its log is quoted.
    """
    own = folder / spec.name
    own.mkdir(exist_ok=True)
    result = own / RESULT_FILE
    if not result.is_file():
        (own / STEPS_FILE).unlink(missing_ok=True)
        with (own / LOG_FILE).open("wb") as log:
            workers = subprocess.Popen(
                command(recipe, folder, spec), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                _watch(workers, own / STEPS_FILE, on_step)
            finally:
                _end(workers)
        if not result.is_file():
            raise RunError(_failure(spec, folder, workers.returncode))
    return with_nan(json.loads(result.read_text(encoding="utf-8")))


def _watch(workers: subprocess.Popen[bytes], steps: Path, on_step: Callable[[int, float], None]) -> None:
    position = 0
    while True:
        running = workers.poll() is None
        if steps.is_file():
            with steps.open(encoding="utf-8") as lines:
                lines.seek(position)
                text = lines.read()
            whole = text[: text.rfind("\n") + 1]
            position += len(whole.encode())
            for line in whole.splitlines():
                entry = json.loads(line)
                on_step(entry["step"], entry["loss"] if entry["loss"] is not None else float("nan"))
        if not running:
            return
        time.sleep(0.2)


def _end(workers: subprocess.Popen[bytes]) -> None:
    """End whatever still runs of the workers' session: nothing may write into the folder after this."""
    try:
        os.killpg(workers.pid, signal.SIGTERM)
        time.sleep(0.5)
        os.killpg(workers.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    workers.wait()


def _failure(spec: RunSpec, folder: Path, code: int) -> str:
    log = folder / spec.name / LOG_FILE
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    marked = [line for line in lines if line.startswith("hf-muon worker: ")]
    said = (marked or lines or ["nothing"])[0 if marked else -1].removeprefix("hf-muon worker: ")
    return (
        f"{spec.name}: the worker processes ended with code {code} and said: {said[:300]} The log is {log}; the same "
        f"command with --output-dir {folder} continues from the last checkpoint."
    )


def driver_is_alive(pid: int) -> bool:
    """Return whether the process that watches the workers is still there."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
