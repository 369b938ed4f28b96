# SPDX-License-Identifier: Apache-2.0
"""Send what each owner has to all other ranks: packed by owner, a bounded number of bytes on the way at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .collectives import Communicator
from .streams import Pending

MAX_PARCEL_BYTES = 32 * 2**20  # one larger tensor is a parcel of its own
MAX_PARCELS_IN_FLIGHT = 4


@dataclass(frozen=True)
class Parcel:
    """Tensors of one owner and dtype that travel in one buffer, by their index in the plan."""

    owner: int
    dtype: torch.dtype
    indices: tuple[int, ...]


def pack_parcels(owners: Sequence[int], numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Parcel]:
    """Pack tensors in plan order; owners take turns, so that several send at once. Pure, the same on every rank."""
    queues: dict[int, list[Parcel]] = {}
    open_parcels: dict[tuple[int, torch.dtype], tuple[list[int], int]] = {}

    def close(key: tuple[int, torch.dtype]) -> None:
        indices, _ = open_parcels.pop(key)
        queues.setdefault(key[0], []).append(Parcel(*key, tuple(indices)))

    for index, (owner, numel, dtype) in enumerate(zip(owners, numels, dtypes, strict=True)):
        key, size = (owner, dtype), numel * dtype.itemsize
        if key in open_parcels and open_parcels[key][1] + size > MAX_PARCEL_BYTES:
            close(key)
        indices, filled = open_parcels.get(key, ([], 0))
        open_parcels[key] = ([*indices, index], filled + size)
    for key in list(open_parcels):
        close(key)
    longest = max((len(queue) for queue in queues.values()), default=0)
    return [queues[o][turn] for turn in range(longest) for o in sorted(queues) if turn < len(queues[o])]


class Exchange:
    """One round of broadcasts, one per parcel. Collective: every rank makes, starts and finishes it.

    Args:
        comm: the communicator.
        what: for messages, for example "broadcast of updated weights".
        parcels: the same list on every rank.
        shapes: of the tensors, by index.
        get: returns the tensor of an index; called on its owner.
        put: takes a tensor that arrived, a view of a buffer; called on all other ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        what: str,
        parcels: Sequence[Parcel],
        shapes: Sequence[torch.Size],
        get: Callable[[int], Tensor],
        put: Callable[[int, Tensor], object],
    ) -> None:
        self._comm, self._what, self._shapes, self._get, self._put = comm, what, shapes, get, put
        self._waiting = deque(parcels)
        self._on_the_way: deque[tuple[Parcel, Tensor, Pending]] = deque()

    @torch.no_grad()
    def start(self) -> Exchange:
        """Send the first parcels; returns at once."""
        while self._waiting and len(self._on_the_way) < MAX_PARCELS_IN_FLIGHT:
            parcel = self._waiting.popleft()
            if parcel.owner == self._comm.grid.position:
                buffer = torch.cat([self._get(index).reshape(-1) for index in parcel.indices])
            else:
                size = sum(self._shapes[index].numel() for index in parcel.indices)
                buffer = torch.empty(size, dtype=parcel.dtype, device=self._comm.device)
            pending = self._comm.broadcast(self._what, [(buffer, parcel.owner)])
            self._on_the_way.append((parcel, buffer, pending))
        return self

    @torch.no_grad()
    def finish(self) -> None:
        """Send the rest; return when everything has arrived (on CUDA: when the current stream waits for it)."""
        while self._on_the_way:
            parcel, buffer, pending = self._on_the_way.popleft()
            pending.wait()
            if parcel.owner != self._comm.grid.position:
                shapes = [self._shapes[index] for index in parcel.indices]
                parts = buffer.split([shape.numel() for shape in shapes])
                for index, part, shape in zip(parcel.indices, parts, shapes, strict=True):
                    self._put(index, part.view(shape))
            self.start()
