# SPDX-License-Identifier: Apache-2.0
"""The grid of ranks and the few collectives that the runtime uses, each counted."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..tracing import Span, begin_flight, trace
from .streams import CommunicationStream, Pending

KINDS = ("broadcast", "reduce", "all_reduce", "replicate_broadcast", "replicate_reduce", "control")


class RankGrid:
    """A 1-D (shard) or 2-D (replicate, shard) mesh as rows of replicas, with this rank's place in it.

    Args:
        mesh: the mesh given to `fully_shard`.

    Raises:
        ValueError: the mesh has another number of dimensions.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"mesh must have one dimension (shard) or two (replicate, shard); got {mesh.ndim}. "
                "Pass the data-parallel sub-mesh that fully_shard gets."
            )
        self.mesh = mesh
        ranks = mesh.mesh.tolist()
        self._ranks: list[list[int]] = [ranks] if mesh.ndim == 1 else ranks
        self.replicate, self.shard = len(self._ranks), len(self._ranks[0])
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"mesh must contain every rank that trains; rank {dist.get_rank()} is not in it.")
        self.replicate_index, self.shard_index = (0, coordinate[0]) if mesh.ndim == 1 else tuple(coordinate)
        self.shard_group: dist.ProcessGroup = mesh.get_group(mesh.ndim - 1)
        self.replicate_group: dist.ProcessGroup | None = mesh.get_group(0) if mesh.ndim == 2 else None

    @property
    def size(self) -> int:
        """Number of ranks of the grid."""
        return self.replicate * self.shard

    @property
    def position(self) -> int:
        """This rank's position, `replicate_index * shard + shard_index`."""
        return self.replicate_index * self.shard + self.shard_index

    def split(self, position: int) -> tuple[int, int]:
        """Return (replicate index, shard index) of a grid position."""
        return divmod(position, self.shard)

    def global_rank(self, position: int) -> int:
        """Return the rank in the whole job of a grid position."""
        replicate, shard = self.split(position)
        return self._ranks[replicate][shard]


class Communicator:
    """Issues and counts collectives on a grid. Every method is a collective of the named group.

    Args:
        grid: the ranks.
        device: where the buffers live.
        timeout: see `Pending`.
    """

    def __init__(self, grid: RankGrid, device: torch.device, timeout: timedelta | None = None) -> None:
        self.grid, self.device, self.timeout = grid, device, timeout
        self.stream = CommunicationStream(device)
        self._bytes: Counter[str] = Counter()

    def stats(self, reset: bool = False) -> dict[str, int]:
        """Return bytes handed to collectives by this rank since the last reset, by kind."""
        result = {kind: self._bytes[kind] for kind in KINDS}
        if reset:
            self._bytes.clear()
        return result

    def broadcast(self, what: str, sends: list[tuple[torch.Tensor, int]]) -> Pending:
        """Send each (buffer, shard index of the source) within the shard group, all at once, in list order."""
        if self.grid.shard == 1:
            return Pending(what, [self.stream.mark()])  # the buffers were filled on the side stream
        group = self.grid.shard_group
        return self._start(
            "broadcast", what, sends, lambda b, i: dist.broadcast(b, group=group, group_src=i, async_op=True)
        )

    def reduce(self, what: str, sends: list[tuple[torch.Tensor, int]]) -> Pending:
        """Sum each (buffer, shard index of the destination) within the shard group, in list order.

        Only the destination's buffer holds the sum; the others' contents are undefined afterwards.
        """
        if self.grid.shard == 1:
            return Pending(what, [])
        group = self.grid.shard_group
        return self._start("reduce", what, sends, lambda b, i: dist.reduce(b, group=group, group_dst=i, async_op=True))

    def all_reduce(self, what: str, buffer: torch.Tensor, kind: str = "all_reduce") -> Pending:
        """Sum `buffer` over the shard group; every rank gets the sum."""
        if self.grid.shard == 1:
            return Pending(what, [])
        group = self.grid.shard_group
        return self._start(kind, what, [(buffer, -1)], lambda b, _: dist.all_reduce(b, group=group, async_op=True))

    def replicate_broadcast(self, what: str, sends: list[tuple[torch.Tensor, int]]) -> Pending:
        """Send each (buffer, replicate index of the source) within the replicate group, in list order."""
        group = self.grid.replicate_group
        if group is None or self.grid.replicate == 1:
            return Pending(what, [])
        return self._start(
            "replicate_broadcast", what, sends, lambda b, i: dist.broadcast(b, group=group, group_src=i, async_op=True)
        )

    def replicate_reduce(self, what: str, sends: list[tuple[torch.Tensor, int]]) -> Pending:
        """Sum each (buffer, replicate index of the destination) within the replicate group, in list order."""
        group = self.grid.replicate_group
        if group is None or self.grid.replicate == 1:
            return Pending(what, [])
        return self._start(
            "replicate_reduce", what, sends, lambda b, i: dist.reduce(b, group=group, group_dst=i, async_op=True)
        )

    def gather_bytes(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """Return the equally long uint8 `payload` of every position of the grid (control traffic)."""
        rows = self._all_gather(payload.to(self.device), self.grid.shard_group, self.grid.shard)
        if self.grid.replicate_group is not None and self.grid.replicate > 1:
            stacked = self._all_gather(torch.stack(rows), self.grid.replicate_group, self.grid.replicate)
            rows = [row for block in stacked for row in block]
        return rows

    def _all_gather(self, tensor: torch.Tensor, group: dist.ProcessGroup, size: int) -> list[torch.Tensor]:
        if size == 1:
            return [tensor]
        out = [torch.empty_like(tensor) for _ in range(size)]
        self._count("control", tensor)
        work = dist.all_gather(out, tensor, group=group, async_op=True)
        self._pending("comparison of the ownership plans", [work], [tensor, *out]).wait()
        return out

    def _start(
        self,
        kind: str,
        what: str,
        sends: list[tuple[torch.Tensor, int]],
        issue: Callable[[torch.Tensor, int], dist.Work],
    ) -> Pending:
        """Count, issue one collective per buffer, and return their handles."""
        self._count(kind, *(buffer for buffer, _ in sends))
        flights = []
        with trace("issue", what), self.stream.issue():
            for buffer, peer in sends:
                flights.append(begin_flight(kind, what, peer, functools.partial(issue, buffer, peer)))
        works, spans = [work for work, _ in flights], [span for _, span in flights]
        return self._pending(what, works, [buffer for buffer, _ in sends], spans)

    def _pending(
        self, what: str, works: list[dist.Work], keep: list[torch.Tensor], spans: Sequence[Span | None] = ()
    ) -> Pending:
        # NCCL enforces its group's limit itself; a host-side limit would block the host.
        timeout = self.timeout if self.device.type == "cpu" else None
        return Pending(what, works, tuple(keep), timeout, spans)

    def _count(self, kind: str, *buffers: torch.Tensor) -> None:
        self._bytes[kind] += sum(buffer.numel() * buffer.element_size() for buffer in buffers)
