# SPDX-License-Identifier: Apache-2.0
"""Private upstream names of the memory prediction; `tests/architecture/test_compat_planning.py` watches them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# The base of every mode that watches operators, documented for extension; it has no public module yet.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "MemoryTimeline",
    "TorchDispatchMode",
    "fake_mode",
    "fake_process_group",
    "tree_leaves",
    "wrapped_classes",
]

# Parts of a prediction, and the kinds of torch's tracker that belong to each.
PARTS = {
    "weights": ("SHARDED_PARAM", "BUFFER"),
    "gathered": ("UNSHARDED_PARAM", "ALL_GATHER"),
    "gradients": ("SHARDED_GRAD", "UNSHARDED_GRAD", "REDUCE_SCATTER"),
    "states": ("OPT",),
    "activations": ("ACT", "INP"),
    "temporaries": ("TEMP",),
}


def fake_mode() -> Any:
    """Return torch's mode in which tensors have shapes and no memory. Public class in a private package."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


@contextmanager
def fake_process_group(world_size: int, rank: int) -> Iterator[None]:
    """Stand in for one rank of a job: collectives return at once and move nothing.

    The back end "fake" is registered by a module that torch keeps among its tests.

    Raises:
        RuntimeError: this process is in a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("The prediction must run outside of a process group; got an initialized one.")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
    try:
        yield
    finally:
        dist.destroy_process_group()


class MemoryTimeline:
    """Torch's FSDP2 memory tracker with what it does not know: owned parameters and an optimizer on local tensors.

    Args:
        model: the root module, after `fully_shard`.
    """

    def __init__(self, model: nn.Module) -> None:
        from torch.distributed._tools import fsdp2_mem_tracker

        self._kinds = fsdp2_mem_tracker._FSDPRefType
        self.tracker = fsdp2_mem_tracker.FSDPMemTracker(model)

    def track(self, part: str, *tensors: torch.Tensor) -> None:
        """Count the storages of `tensors` under a part of `PARTS` from now on."""
        kind = self._kinds[PARTS[part][0]]
        for tensor in tensors:
            self.tracker._update_and_maybe_create_winfos(tensor, kind)

    def __enter__(self) -> MemoryTimeline:
        self.tracker.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.tracker.__exit__(*error)

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """Count what is allocated inside as the optimizer's temporaries."""
        self.tracker._in_opt = True
        try:
            yield
        finally:
            self.tracker._in_opt = False

    def restart_peak(self) -> None:
        """Forget the peak so far."""
        self.tracker._peak_mem_snap = self.tracker.get_tracker_snapshot()
        self.tracker._peak_mem = {device: int(row["Total"]) for device, row in self.tracker._peak_mem_snap.items()}

    def peak(self) -> dict[str, int]:
        """Return the bytes of each part at the moment of the largest total since the last restart."""
        return self._by_part("peak")

    def current(self) -> dict[str, int]:
        """Return the bytes of each part now."""
        return self._by_part("current")

    def _by_part(self, which: str) -> dict[str, int]:
        row = self.tracker.get_tracker_snapshot(which)[torch.device("cpu")]
        return {part: sum(int(row[self._kinds[name]]) for name in names) for part, names in PARTS.items()}


def wrapped_classes(model: nn.Module) -> frozenset[str]:
    """Return the class names that Accelerate's transformer wrap policy gives a unit each; empty when unknown."""
    names = getattr(model, "_no_split_modules", None) or ()
    return frozenset(names)
