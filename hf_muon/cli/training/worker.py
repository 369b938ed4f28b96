# SPDX-License-Identifier: Apache-2.0
"""One of the processes of a launched training run: reads `config.yaml`, trains, rank 0 writes the result."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from transformers import TrainerCallback

from ..console import quiet_third_parties
from ..errors import RunError, one_line
from ..recipe import load_recipe
from .checkpoints import RESULT_FILE, full_disk_is_an_error_to_continue_from, write_json
from .launched import STEPS_FILE, driver_is_alive, num_processes
from .output_folder import plain
from .quiet import quiet_loaded_libraries
from .search import use_threads
from .single_run import RunSpec, train_once
from .tasks import build_task


class DriverWatch(TrainerCallback):
    """Ends this process when the driver is gone: nobody else may write where a new start continues."""

    def __init__(self, driver: int) -> None:
        self._driver = driver

    def on_step_begin(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Look for the driver."""
        if not driver_is_alive(self._driver):
            os._exit(1)


def main(words: list[str]) -> None:
    """Train the run that the words name: folder, optimizer, learning rate, seed, steps, driver's process id."""
    folder = Path(words[0])
    spec = RunSpec(words[1], float(words[2]), int(words[3]))
    recipe = load_recipe(folder / "config.yaml")
    recipe = replace(recipe, training=replace(recipe.training, steps=int(words[4])))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != num_processes(
        recipe
    ):  # Accelerate starts one process for distributed_type MULTI_CPU, and says nothing
        raise RunError(
            f"training.launch must start {num_processes(recipe)} processes; {recipe.training.launch} started {world}. "
            "Set distributed_type to MULTI_GPU (also with use_cpu: true), FSDP or DEEPSPEED."
        )
    quiet_third_parties()
    quiet_loaded_libraries()
    use_threads(recipe.training.threads)
    first = int(os.environ.get("RANK", "0")) == 0
    own = folder / spec.name
    steps = own / STEPS_FILE

    def on_step(step: int, loss: float) -> None:
        if first:
            with steps.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(plain({"step": step, "loss": loss})) + "\n")

    with full_disk_is_an_error_to_continue_from(folder):
        result = train_once(recipe, build_task(recipe), spec, own, on_step, [DriverWatch(int(words[5]))])
        if first:
            write_json(own / RESULT_FILE, result)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception as error:
        # The driver looks for this line; the traceback goes into the log after it.
        sys.stderr.write(f"hf-muon worker: {one_line(error)}\n")
        sys.stderr.flush()
        raise
