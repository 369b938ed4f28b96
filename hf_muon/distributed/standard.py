# SPDX-License-Identifier: Apache-2.0
"""The door: owned tensors become ordinary sharded DTensors on the way out, and come back from them.

Every function here is a collective over the mesh unless it says otherwise: call it on all ranks, for the same tensors
in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .owned import OwnedDTensor, OwnerLayout, Part, own, own_parameter


def standard_placements(layout: OwnerLayout) -> tuple[Placement, ...]:
    """Return FSDP2's own placements on the mesh of `layout`: `(Shard(0),)` or `(Replicate(), Shard(0))`."""
    return (Shard(0),) if layout.grid.mesh.ndim == 1 else (Replicate(), Shard(0))


@torch.no_grad()
def broadcast_from_owners(tensor: OwnedDTensor) -> torch.Tensor:
    """Return the whole matrix on every rank (a fresh tensor). One broadcast per owner and mesh axis."""
    layout, grid = tensor.owner_layout, tensor.owner_layout.grid
    local = tensor.to_local()
    whole = local.new_empty(layout.shape)
    whole[layout.rows] = local
    for position, start, stop in layout.parts:
        replicate, shard = grid.split(position)
        if grid.replicate_index == replicate and grid.shard > 1:
            dist.broadcast(whole[start:stop], group=grid.shard_group, group_src=shard)
        if grid.replicate_group is not None and grid.replicate > 1:
            dist.broadcast(whole[start:stop], group=grid.replicate_group, group_src=replicate)
    return whole


@torch.no_grad()
def to_standard(tensor: OwnedDTensor) -> DTensor:
    """Return the values as the DTensor that FSDP2 would hold: even row chunks, replicated over replicas.

    Each owner scatters its rows; every other rank receives only what lies in its chunk. The result shares no memory
    with `tensor` and keeps its dtype; a Parameter gives a plain DTensor.
    """
    layout, grid = tensor.owner_layout, tensor.owner_layout.grid
    local = tensor.to_local()
    begin, end = _even_chunk(layout, grid.shard_index)
    mine = local.new_zeros((end - begin, *layout.shape[1:]))
    for part in layout.parts:
        replicate, shard = grid.split(part.position)
        spans, width = _spans(layout, part)
        received = local.new_zeros((width, *layout.shape[1:]))
        if grid.replicate_index == replicate:
            rows = None
            if part == layout.part:
                rows = [_padded(local[first - part.start : last - part.start], width) for first, last in spans]
            if grid.shard == 1:
                received.copy_(rows[0])  # type: ignore[index]
            else:
                dist.scatter(received, rows, group=grid.shard_group, group_src=shard)
        if grid.replicate_group is not None and grid.replicate > 1:
            dist.broadcast(received, group=grid.replicate_group, group_src=replicate)
        first, last = spans[grid.shard_index]
        if last > first:
            mine[first - begin : last - begin] = received[: last - first]
    return DTensor.from_local(
        mine,
        grid.mesh,
        standard_placements(layout),
        run_check=False,
        shape=layout.shape,
        stride=torch.empty(layout.shape, device="meta").stride(),
    )


@torch.no_grad()
def from_standard(tensor: OwnedDTensor, value: torch.Tensor) -> None:
    """Bring `value` to the owners of `tensor`, in place, cast to its dtype.

    Args:
        tensor: an owned parameter, gradient or state.
        value: an ordinary DTensor on the same mesh (even chunks: gathered to the owners alone; any other placement:
            gathered everywhere first), or a whole plain tensor. A plain tensor is read on the owners only and needs
            no communication; other ranks may pass anything.

    Raises:
        ValueError: another global shape.
    """
    layout = tensor.owner_layout
    mine: torch.Tensor | None = None  # this rank's rows
    if isinstance(value, OwnedDTensor):
        if value.owner_layout.parts != layout.parts:
            raise ValueError(
                f"{layout.name} must be loaded from its own owner; got a tensor that lives {value.owner_layout.place}."
            )
        mine = value.to_local()
    elif isinstance(value, DTensor):
        _check_shape(layout, value)
        even = value.device_mesh == layout.grid.mesh and tuple(value.placements) == standard_placements(layout)
        mine = _gather_to_owners(layout, value.to_local()) if even else value.full_tensor()[layout.rows]
    elif layout.is_local:
        _check_shape(layout, value)
        mine = value[layout.rows]
    if layout.is_local:
        tensor.to_local().copy_(mine)  # type: ignore[arg-type]
    layout.version += 1


@torch.no_grad()
def from_rank_zero(tensor: OwnedDTensor, value: torch.Tensor | None) -> None:
    """Bring a whole tensor that only grid position 0 has to the owners of `tensor` (point to point)."""
    layout, grid = tensor.owner_layout, tensor.owner_layout.grid
    local = tensor.to_local()
    for position, start, stop in layout.parts:
        if grid.position == 0:
            rows = value[start:stop].detach().to(device=local.device, dtype=tensor.dtype)  # type: ignore[index]
            if position == 0:
                local.copy_(rows)
            else:
                dist.send(rows.contiguous(), grid.global_rank(position))
        elif grid.position == position:
            rows = torch.empty(layout.local_shape, dtype=tensor.dtype, device=local.device)
            dist.recv(rows, grid.global_rank(0))
            local.copy_(rows)
    layout.version += 1


def owned_like(parameter: OwnedDTensor, local: torch.Tensor | None = None) -> OwnedDTensor:
    """Return zeros (or `local`, if given) with the owner of `parameter`, in its dtype. No communication."""
    if local is None:
        local = torch.zeros_like(parameter.to_local().detach())
    return own(local, parameter.owner_layout)


def _even_chunk(layout: OwnerLayout, shard_index: int) -> tuple[int, int]:
    """Return first row and end of a rank's chunk in FSDP2's layout."""
    count = layout.shape[0]
    chunk = -(-count // layout.grid.shard)
    return min(shard_index * chunk, count), min((shard_index + 1) * chunk, count)


def _spans(layout: OwnerLayout, part: Part) -> tuple[list[tuple[int, int]], int]:
    """Return which rows of `part` lie in each rank's even chunk, and the most of one: collectives need equal sizes."""
    spans = []
    for shard_index in range(layout.grid.shard):
        first, last = (min(max(row, part.start), part.stop) for row in _even_chunk(layout, shard_index))
        spans.append((first, last))
    return spans, max(last - first for first, last in spans)


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    padded = rows.new_zeros((count, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    return padded


def _gather_to_owners(layout: OwnerLayout, local: torch.Tensor) -> torch.Tensor | None:
    """Return the rows that this rank owns (None: none) from everybody's even chunks."""
    grid, found = layout.grid, None
    begin, _ = _even_chunk(layout, grid.shard_index)
    for part in layout.parts:
        replicate, shard = grid.split(part.position)
        if grid.replicate_index != replicate:
            continue
        spans, width = _spans(layout, part)
        first, last = spans[grid.shard_index]
        mine = _padded(local[first - begin : last - begin] if last > first else local[:0], width)
        rows = [torch.empty_like(mine) for _ in spans] if part == layout.part else None
        if grid.shard == 1:
            rows = [mine]
        else:
            dist.gather(mine, rows, group=grid.shard_group, group_dst=shard)
        if rows is not None:
            found = torch.cat([row[: last - first] for row, (first, last) in zip(rows, spans, strict=True)])
    return found


def _check_shape(layout: OwnerLayout, value: Any) -> None:
    shape = None if value is None else tuple(value.shape)
    if shape != tuple(layout.shape):
        raise ValueError(
            f"{layout.name} must have the shape {tuple(layout.shape)}; got {shape}. "
            "The checkpoint belongs to another model."
        )


__all__ = [
    "broadcast_from_owners",
    "from_rank_zero",
    "from_standard",
    "own_parameter",
    "owned_like",
    "standard_placements",
    "to_standard",
]
