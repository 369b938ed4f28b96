# SPDX-License-Identifier: Apache-2.0
"""Live diagnostics: every so many steps, a few numbers about the update, kept on the device until somebody asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .auxiliary_adam import applied_square_sum
from .functional import MuonEntry
from .tensor_layout import local_tensor

POWER_STEPS = 32  # of the spectral norm; what is left of the error is far below what a log line is read for


class StepDiagnostics:
    """Collects on every n-th step of this process; does nothing on the others.

    Args:
        every: n; 0 is never.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._steps = 0
        self._sample: MuonEntry | None = None
        self._squares: dict[int, tuple[list[Tensor], int]] = {}
        self._values: dict[str, Tensor] = {}
        self._sums: Tensor | None = None  # (groups, 2): squares and elements over all ranks
        self.due = False

    def begin_step(self) -> None:
        """Decide whether this step is one to look at."""
        self._steps += 1
        self.due = self._every > 0 and self._steps % self._every == 0
        self._sample = None
        if self.due:
            self._squares, self._values, self._sums = {}, {}, None

    def choose(self, entries: Sequence[MuonEntry]) -> None:
        """Pick the matrix to look at: another one each time, of those that this rank holds."""
        here = [entry for entry in entries if local_tensor(entry.param).numel()]
        if self.due and here and self._sample is None:
            self._sample = here[self._steps // self._every % len(here)]

    def observe(self, entry: MuonEntry, update: Tensor, orthogonal: Sequence[Tensor]) -> None:
        """Look at the sampled matrix between orthogonalization and step."""
        if entry is not self._sample:
            return
        before = entry.view.matrices(update)
        self._values["orthogonality_error"] = orthogonality_error(_one_of(orthogonal, self._steps))
        self._values["stable_rank"] = stable_rank(_one_of(before, self._steps))

    def add_muon(self, group: int, squares: list[Tensor], entries: Sequence[MuonEntry]) -> None:
        """Note the sums of squares of the steps that a Muon group made."""
        if self.due:
            self._squares[group] = squares, sum(local_tensor(entry.param).numel() for entry in entries)

    def add_adam(self, group: int, param: Tensor, state: dict[str, Any], options: dict[str, Any]) -> None:
        """Note the step that an AdamW parameter made."""
        if self.due and (square := applied_square_sum(state, options, float(options["lr"]))) is not None:
            squares, count = self._squares.get(group, ([], 0))
            self._squares[group] = [*squares, square], count + local_tensor(param).numel()

    def add_ranks(self, num_groups: int, total: Callable[[Tensor], Tensor]) -> None:
        """Add up the steps of all ranks; `total` sums over them. Collective where the ranks share a model."""
        if not self.due:
            return
        found = [square for squares, _ in self._squares.values() for square in squares]
        sums = torch.zeros(num_groups, 2, dtype=torch.float32, device=found[0].device if found else None)
        for group, (squares, count) in self._squares.items():
            sums[group, 1] = count
            for square in squares:
                sums[group, 0] += square.to(sums.device)
        self._sums = total(sums)

    def take(self) -> dict[str, float]:
        """Return what was collected since the last call, as numbers; waits for the device.

        Returns:
            `update_rms_group<i>` per parameter group, weight decay aside, over all ranks; `orthogonality_error` and
            `stable_rank` of one sampled matrix of this rank. Empty where no step was due.
        """
        result = {name: float(value) for name, value in self._values.items()}
        for group, (square, count) in enumerate([] if self._sums is None else self._sums.tolist()):
            if count:
                result[f"update_rms_group{group}"] = math.sqrt(square / count)
        self._squares, self._values, self._sums = {}, {}, None
        return result


def orthogonality_error(matrix: Tensor) -> Tensor:
    """Return the RMS distance of the squared singular values of a (M, N) matrix from one: 0 for an orthogonal one."""
    wide = matrix.float()
    wide = wide if wide.shape[0] <= wide.shape[1] else wide.mT
    gram = wide @ wide.mT
    gram.diagonal().sub_(1.0)
    return torch.linalg.matrix_norm(gram) / math.sqrt(max(1, gram.shape[0]))


def stable_rank(matrix: Tensor) -> Tensor:
    """Return ||A||_F^2 / ||A||_2^2 of a (M, N) matrix: 1 for rank one, min(M, N) for an orthogonal one.

    The spectral norm comes from power iteration, which is a lower bound, so the result is a slight upper bound.
    """
    wide = matrix.float()
    vector = torch.randn(
        wide.shape[1], generator=torch.Generator("cpu").manual_seed(0), dtype=wide.dtype, device="cpu"
    ).to(wide.device)
    for _ in range(POWER_STEPS):
        vector = wide.mT @ (wide @ vector)
        vector = vector / torch.linalg.vector_norm(vector).clamp(min=torch.finfo(torch.float32).tiny)
    return wide.square().sum() / (wide @ vector).square().sum()


def _one_of(matrices: Sequence[Tensor], turn: int) -> Tensor:
    """Return one (M, N) matrix of the (..., M, N) ones of a parameter, another at each turn."""
    matrix = matrices[turn % len(matrices)]
    flat = matrix.reshape(-1, *matrix.shape[-2:])
    return flat[turn % len(flat)]
