# SPDX-License-Identifier: Apache-2.0
"""Which mode to start with, and why. Starting points: a measured peak overrides them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LARGE, SMALL = 10e9, 3e9  # parameters
MANY_RANKS = 8
GIB = 2**30


@dataclass(frozen=True)
class Recommendation:
    """A mode (`z2`, `z3`, or `off` for one process) and the reason in one or two sentences."""

    mode: str
    why: str


def recommend(
    elements: int, world_size: int, peaks: Mapping[str, int | None] | None = None, device_bytes: int | None = None
) -> Recommendation:
    """Recommend a mode.

    Args:
        elements: trainable parameters.
        world_size: ranks.
        peaks: predicted peak per rank of `z2` and `z3` in bytes, where a batch was given.
        device_bytes: memory of one device, where known.
    """
    if world_size == 1:
        return Recommendation("off", "One process holds every matrix anyway: there is nothing to share out.")
    by_size = _by_size(elements, world_size)
    if device_bytes is None or not peaks or peaks.get("z3") is None or peaks.get("z2") is None:
        return by_size
    z2, z3 = peaks["z2"] or 0, peaks["z3"] or 0
    have = f"{device_bytes / GIB:.1f} GiB"
    if z3 > device_bytes:
        return Recommendation(
            "z3",
            f"Even Z3 needs about {z3 / GIB:.1f} GiB of {have}. Look at activations and accumulation buffers first: "
            "checkpointing, a smaller micro-batch, a shorter sequence, or more shard ranks.",
        )
    if by_size.mode == "z2" and z2 > device_bytes:
        return Recommendation("z3", f"Z2 would need about {z2 / GIB:.1f} GiB of {have}; Z3 needs {z3 / GIB:.1f} GiB.")
    return Recommendation(by_size.mode, f"{by_size.why} It fits: {peaks[by_size.mode] or 0:,} bytes of {have}.")


def _by_size(elements: int, world_size: int) -> Recommendation:
    size = f"{elements / 1e9:.2f} billion parameters"
    if elements > LARGE:
        return Recommendation("z3", f"{size}, above 10: keeping all gathered matrices until backward costs too much.")
    if elements < SMALL and world_size >= MANY_RANKS:
        return Recommendation(
            "z2",
            f"{size}, below 3, on {world_size} ranks: the step is bound by communication, and Z2 sends a third less.",
        )
    reason = "on few ranks" if elements < SMALL else "between 3 and 10"
    return Recommendation(
        "z3", f"{size}, {reason}: match FSDP2's default (reshard_after_forward=True); try Z2 if memory is left."
    )
