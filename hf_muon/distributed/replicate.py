# SPDX-License-Identifier: Apache-2.0
"""HSDP: replica peers of an owner hold a compute-dtype copy of its matrices, published once per optimizer step.

A matrix (or an expert of a stack) has one owner in the whole (replicate, shard) grid. Within each other replica, the
rank at the owner's shard index serves the shard-group broadcasts from its copy. The copy is sent along the replicate
group after a step, lazily (at the next forward) and for all units at once, so that it hides behind the first layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .buckets import BucketLayout, Slot
from .collectives import Communicator
from .streams import Pending


class ReplicaCopies:
    """Copies of the segments of one bucket that other replicas own, for a bucket of this rank's shard index.

    Args:
        what: unit name, for messages.
        bucket: layout of the bucket.
        dtype: compute dtype.
        comm: the communicator.
    """

    def __init__(self, what: str, bucket: BucketLayout, dtype: torch.dtype, comm: Communicator) -> None:
        self._what, self._bucket, self._comm, self._dtype = what, bucket, comm, dtype
        self._mine = comm.grid.replicate_index
        self._copies = {
            segment.replicate_index: torch.empty(segment.end - segment.start, dtype=dtype, device=comm.device)
            for segment in bucket.segments
            if segment.replicate_index != self._mine
        }
        self._version: int | None = None
        self._sent: list[torch.Tensor] = []  # until the next publication: only the side stream waits for their sending
        self._pending: Pending | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes held at rest."""
        return sum(copy.numel() * copy.element_size() for copy in self._copies.values())

    def publish(self, version: int, fill: Callable[[torch.Tensor, Slot], None]) -> None:
        """Start sending this version along the replicate group, unless it was sent already. Collective.

        Args:
            version: the weights' version, equal on all ranks.
            fill: copies this rank's own weight of a slot into a tensor of that many elements.
        """
        if self._version == version:
            return
        self.wait()
        sends = []
        for segment in self._bucket.segments:
            buffer = self._copies.get(segment.replicate_index)
            if buffer is None:
                buffer = torch.empty(segment.end - segment.start, dtype=self._dtype, device=self._comm.device)
                with self._comm.stream.issue():
                    for slot in segment.slots:
                        fill(buffer[slot.offset - segment.start : slot.end - segment.start], slot)
            sends.append((buffer, segment.replicate_index))
        self._sent = [buffer for buffer, _ in sends]
        self._pending = self._comm.replicate_broadcast(f"publication of {self._what}", sends)
        self._version = version

    def wait(self) -> None:
        """Finish a publication under way."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def copy_into(self, flat: torch.Tensor) -> None:
        """Copy the peers' segments into the packed buffer of the bucket."""
        self.wait()
        for segment in self._bucket.segments:
            if segment.replicate_index != self._mine:
                flat[segment.start : segment.end].copy_(self._copies[segment.replicate_index])


def reduce_to_owners(what: str, comm: Communicator, bucket: BucketLayout, packed: torch.Tensor) -> Pending:
    """Sum a bucket's shard-reduced gradients over replicas, each segment to the replica that owns it. Collective."""
    sends = []
    for segment in bucket.segments:
        sends.append((packed[segment.start : segment.end], segment.replicate_index))
        first = bucket.slots.index(segment.slots[0])
        flags = packed[bucket.numel + first : bucket.numel + first + len(segment.slots)]
        sends.append((flags, segment.replicate_index))
    return comm.replicate_reduce(f"replica reduction of {what}", sends)
