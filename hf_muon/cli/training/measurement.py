# SPDX-License-Identifier: Apache-2.0
"""Watch one training run from the outside: seconds, seconds inside the optimizer, memory, loss of each step."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from transformers import TrainerCallback

from .checkpoints import WATCH_FILE, write_json

RECORDED = ("loss", "step_seconds", "curve", "diagnostics", "optimizer_seconds", "peak_memory_bytes")


def inner_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside Accelerate's wrapper."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def optimizer_state_bytes(optimizer: Any) -> int:
    """Return the bytes of every tensor in an optimizer's state."""
    states = inner_optimizer(optimizer).state.values()
    return sum(
        value.numel() * value.element_size()
        for state in states
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def weights_digest(model: torch.nn.Module) -> str:
    """Return a short hash of all weights: equal digests mean equal initial models."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class RunWatch(TrainerCallback):
    """Trainer callback that records one run; the clock stands still while held-out data is scored.

    Args:
        eval_steps: after these steps `evaluate` is called.
        evaluate: takes the model, returns metrics.
        on_step: called with the step number and its loss.
    """

    def __init__(
        self,
        eval_steps: set[int],
        evaluate: Callable[[Any], dict[str, float]],
        on_step: Callable[[int, float], None],
    ) -> None:
        self._eval_steps = eval_steps
        self._evaluate = evaluate
        self._on_step = on_step
        self._process = psutil.Process()
        self._started = self._entered = 0.0
        self._paused = self._before = 0.0
        self.loss: list[float] = []
        self.step_seconds: list[float] = []
        self.curve: list[dict[str, float]] = []
        self.diagnostics: list[dict[str, float]] = []
        self.optimizer_seconds = 0.0
        self.peak_memory_bytes = 0
        self.state_bytes = 0

    @property
    def seconds(self) -> float:
        """Return the training seconds so far, evaluation left out."""
        return self._before + time.perf_counter() - self._started - self._paused

    def restore(self, checkpoint: Path) -> None:
        """Take over what was recorded up to a checkpoint."""
        recorded = json.loads((checkpoint / WATCH_FILE).read_text(encoding="utf-8"))
        for key in RECORDED:
            setattr(self, key, recorded[key])
        self.loss = [math.nan if value is None else value for value in self.loss]
        self._before = self.step_seconds[-1]

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the record beside the checkpoint, which it also marks as whole."""
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            write_json(folder / WATCH_FILE, {key: getattr(self, key) for key in RECORDED})

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock and listen to the optimizer."""
        optimizer = inner_optimizer(kwargs["optimizer"])
        optimizer.register_step_pre_hook(self._enter_step)
        optimizer.register_step_post_hook(self._leave_step)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        _synchronize()
        self._started = time.perf_counter()

    def _enter_step(self, *_: Any) -> None:
        _synchronize()
        self._entered = time.perf_counter()

    def _leave_step(self, *_: Any) -> None:
        _synchronize()
        self.optimizer_seconds += time.perf_counter() - self._entered

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the time of the step, the memory, and the held-out loss where it is due."""
        self.step_seconds.append(self.seconds)
        self._take_memory()
        if state.global_step in self._eval_steps:
            paused = time.perf_counter()
            metrics = self._evaluate(kwargs["model"])
            self.curve.append({"step": state.global_step, "seconds": self.step_seconds[-1], **metrics})
            self._paused += time.perf_counter() - paused

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep the loss of the step, and what the optimizer tells about itself."""
        if found := {key.removeprefix("diag_"): logs[key] for key in logs or {} if key.startswith("diag_")}:
            self.diagnostics.append({"step": state.global_step, **found})
        if logs and "loss" in logs:
            self.loss.append(logs["loss"])
            self._on_step(state.global_step, logs["loss"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the optimizer's state once it is complete."""
        self.state_bytes = optimizer_state_bytes(kwargs["optimizer"])

    def _take_memory(self) -> None:
        # On a CPU the resident size after each step stands for the peak: the system's own mark never goes down
        # again, so it could not tell one run of this process from the next.
        current = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else self._process.memory_info().rss
        self.peak_memory_bytes = max(self.peak_memory_bytes, current)
