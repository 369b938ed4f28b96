# SPDX-License-Identifier: Apache-2.0
"""Records how far the last step moved each half, for logs; costs one norm per Muon parameter, and only when on."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .auxiliary_adam import applied_square_sum
from .tensor_layout import local_tensor


class UpdateSize:
    """Sums of squares of the last step; lives for one step."""

    def __init__(self) -> None:
        self.muon_squares: list[Tensor] = []
        self._num_muon_elements = 0
        self._adam: list[tuple[Tensor, dict[str, Any], dict[str, Any], float]] = []

    def expect_muon(self, param: Tensor) -> None:
        """Count the elements of a Muon parameter that takes part in this step."""
        self._num_muon_elements += local_tensor(param).numel()

    def add_adam(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Note an AdamW parameter that took part; its step is computed from its state only when asked for."""
        self._adam.append((param, state, group, float(group["lr"])))

    def by_half(self, halves: set[bool], skipped: bool) -> dict[str, float]:
        """Return the RMS of each half that the optimizer has; zeros after a skipped step."""
        sizes = {"muon": (True, self.muon_rms), "adamw": (False, self.adam_rms)}
        return {name: 0.0 if skipped else size() for name, (half, size) in sizes.items() if half in halves}

    def muon_rms(self) -> float:
        """Return the RMS per element of this rank's part of the Muon step, weight decay aside."""
        total = sum(float(square) for square in self.muon_squares)
        return float((total / max(1, self._num_muon_elements)) ** 0.5)

    def adam_rms(self) -> float:
        """Return the RMS per element of this rank's part of the AdamW step, weight decay aside."""
        count = sum(local_tensor(param).numel() for param, *_ in self._adam)
        squares = [applied_square_sum(state, group, lr) for _, state, group, lr in self._adam]
        total = sum(float(square) for square in squares if square is not None)
        return float((total / max(1, count)) ** 0.5)
