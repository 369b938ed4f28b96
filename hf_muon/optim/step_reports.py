# SPDX-License-Identifier: Apache-2.0
"""What the optimizer tells about its steps: sizes of groups, skipped steps, update sizes, diagnostics."""

from __future__ import annotations

from typing import Any

from .diagnostics import StepDiagnostics
from .finite_guard import StepGuard
from .qk_clip import QKClip
from .update_size import UpdateSize


class StepReports:
    """Mixed into `MuonWithAuxAdam`; reads what its steps have recorded."""

    param_groups: Any
    qk_clip: QKClip | None = None
    track_update_rms: bool = False
    _guard: StepGuard
    _sizes: UpdateSize
    _diagnostics: StepDiagnostics

    def group_sizes(self) -> list[tuple[int, int]]:
        """Return (tensors, elements) of each group, whole tensors counted, for reports."""
        return [(len(g["params"]), sum(param.numel() for param in g["params"])) for g in self.param_groups]

    @property
    def num_skipped_steps(self) -> int:
        """Return how many steps were skipped for inf or NaN; waits for steps still on their way on a device."""
        return self._guard.settle().total

    @property
    def last_step_skipped(self) -> bool:
        """Return whether the last step was skipped for inf or NaN."""
        return self._guard.settle().last

    def update_rms(self) -> dict[str, float]:
        """Return the RMS per element of the last step of each half, weight decay aside; this rank's part.

        Empty unless `track_update_rms` was set before the step; zeros after a skipped step. Reads the device.
        """
        if not self.track_update_rms:
            return {}
        return self._sizes.by_half({group["use_muon"] for group in self.param_groups}, self.last_step_skipped)

    def diagnostics(self) -> dict[str, float]:
        """Return what `diagnostics=N` collected since the last call (see `StepDiagnostics.take`); reads the device.

        With `qk_clip` also `max_attention_logit`: the largest of all heads and ranks, before the step. Empty where no
        step was due.
        """
        found = self._diagnostics.take()
        if found and self.qk_clip is not None and self.qk_clip.largest is not None:
            found["max_attention_logit"] = float(self.qk_clip.largest)
        return found
