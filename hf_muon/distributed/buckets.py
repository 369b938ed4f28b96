# SPDX-License-Identifier: Apache-2.0
"""Packed buffers: which matrices of a unit travel together, and where each lies. Plain data from plain data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Piece:
    """What one owner holds of one matrix of a unit: all of it, or a range of a stack's experts.

    Args:
        index: position of the matrix in its unit.
        start: first row along axis 0.
        shape: of the piece.
        replicate_index: of the owner.
        shard_index: of the owner.
    """

    index: int
    start: int
    shape: tuple[int, ...]
    replicate_index: int
    shard_index: int


@dataclass(frozen=True)
class Slot:
    """Place of one piece inside a bucket's packed buffer."""

    index: int  # position of the matrix in its unit
    start: int  # first row along axis 0
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """First element after the piece."""
        return self.offset + self.numel

    @property
    def rows(self) -> slice:
        """Rows of the matrix, along axis 0."""
        return slice(self.start, self.start + self.shape[0])


@dataclass(frozen=True)
class Segment:
    """The contiguous part of a bucket that one replica's owner holds (the whole bucket without HSDP)."""

    replicate_index: int
    start: int
    end: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class BucketLayout:
    """A contiguous part of a unit's buffer whose owners sit at one index of the shard axis.

    They share a broadcast in the shard group. Sorted by the owner's replica, so that each one's part is contiguous.
    """

    shard_index: int
    offset: int  # in the unit's buffer
    numel: int
    segments: tuple[Segment, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots, in buffer order."""
        return tuple(slot for segment in self.segments for slot in segment.slots)


def build_buckets(pieces: Sequence[Piece]) -> tuple[BucketLayout, ...]:
    """Lay the matrices of one unit out in one buffer, and divide it by owner.

    Whole matrices come first, one bucket per shard index that owns any, in ascending order. Each split stack follows,
    its pieces side by side, so that the stack is one tensor in the buffer, with a bucket per owner.
    """
    parts = Counter(piece.index for piece in pieces)

    def stack(piece: Piece) -> int:
        return piece.index if parts[piece.index] > 1 else -1

    def place(piece: Piece) -> tuple[int, ...]:
        if stack(piece) < 0:
            return (-1, piece.shard_index, piece.replicate_index, piece.index)
        return (piece.index, piece.start)

    buckets, offset = [], 0
    ordered = sorted(pieces, key=place)
    for (_, shard_index), run in groupby(ordered, key=lambda piece: (stack(piece), piece.shard_index)):
        segments, end = [], 0
        for replicate_index, members in groupby(run, key=lambda piece: piece.replicate_index):
            start, slots = end, []
            for piece in members:
                slots.append(Slot(piece.index, piece.start, end, piece.shape))
                end = slots[-1].end
            segments.append(Segment(replicate_index, start, end, tuple(slots)))
        buckets.append(BucketLayout(shard_index, offset, end, tuple(segments)))
        offset += end
    return tuple(buckets)
