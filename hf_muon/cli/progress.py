# SPDX-License-Identifier: Apache-2.0
"""Progress of a search on stderr: bars in a terminal, one line per finished run elsewhere."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .console import notes, say


class SearchProgress:
    """Shows runs and steps; use as a context manager around the search."""

    def __init__(self, total_runs: int, steps: int, finished: int = 0) -> None:
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}", markup=False),
            console=notes,
            transient=True,
        )
        self._live = notes.is_terminal
        self._all = self._bars.add_task("all steps", total=total_runs * steps, completed=finished * steps, note="")
        self._run = self._bars.add_task("this run", total=steps, note="")
        self._begun = time.perf_counter()
        self._label = ""

    def __enter__(self) -> SearchProgress:
        if self._live:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bars.stop()

    def start_run(self, name: str, index: int, total: int, steps: int) -> None:
        """Reset the bar of the run."""
        self._label = f"[{index}/{total}]"
        self._bars.reset(self._run, total=steps, description=f"{self._label} {name}", note="")

    def step(self, step: int, loss: float) -> None:
        """Move both bars."""
        self._bars.update(self._run, completed=step, note=f"loss {loss:.3f}")
        self._bars.advance(self._all)

    def row(self, done: int, total: int) -> None:
        """Move the bar of a benchmark."""
        self._bars.update(self._run, total=total, completed=done, description="benchmark rows", note="")

    def end_run(self, run: dict[str, Any]) -> None:
        """Print the line that stays."""
        scores = run["eval"]
        loss = f"{scores['loss']:.4f}" if math.isfinite(scores["loss"]) else "diverged"
        match = f", exact match {scores['exact_match']:.1%}" if "exact_match" in scores else ""
        say(f"{self._label} {run['name']}: held-out loss {loss}{match}, {run['seconds']:.1f} s")
