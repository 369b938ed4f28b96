# SPDX-License-Identifier: Apache-2.0
"""Packed buffers: which matrices of a unit travel together, and where each lies. Plain data from plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """Place of one matrix inside a bucket's packed buffer."""

    index: int  # position of the matrix in its unit
    offset: int
    shape: tuple[int, ...]
    numel: int

    @property
    def end(self) -> int:
        """First element after the matrix."""
        return self.offset + self.numel


@dataclass(frozen=True)
class Segment:
    """The contiguous part of a bucket that one replica's owner holds (the whole bucket without HSDP)."""

    replicate_index: int
    start: int
    end: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class BucketLayout:
    """One unit's matrices whose owners sit at one index of the shard axis.

    They share a broadcast in the shard group. Sorted by the owner's replica, so that each one's part is contiguous.
    """

    shard_index: int
    numel: int
    segments: tuple[Segment, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots, in buffer order."""
        return tuple(slot for segment in self.segments for slot in segment.slots)


def build_buckets(shapes: Sequence[tuple[int, ...]], owners: Sequence[tuple[int, int]]) -> tuple[BucketLayout, ...]:
    """Lay the matrices of one unit out in packed buffers, one per shard index that owns any, in ascending order.

    Args:
        shapes: global shapes.
        owners: (replicate index, shard index) of each matrix's owner.
    """
    buckets = []
    for shard_index in sorted({shard for _, shard in owners}):
        segments, offset = [], 0
        for replicate_index in sorted({r for r, s in owners if s == shard_index}):
            start, slots = offset, []
            for index, (shape, owner) in enumerate(zip(shapes, owners, strict=True)):
                if owner == (replicate_index, shard_index):
                    numel = 1
                    for size in shape:
                        numel *= size
                    slots.append(Slot(index, offset, tuple(shape), numel))
                    offset += numel
            segments.append(Segment(replicate_index, start, offset, tuple(slots)))
        buckets.append(BucketLayout(shard_index, offset, tuple(segments)))
    return tuple(buckets)
