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

from .owned import OwnedDTensor, OwnerLayout, own, own_parameter


def standard_placements(layout: OwnerLayout) -> tuple[Placement, ...]:
    """Return FSDP2's own placements on the mesh of `layout`: `(Shard(0),)` or `(Replicate(), Shard(0))`."""
    return (Shard(0),) if layout.grid.mesh.ndim == 1 else (Replicate(), Shard(0))


@torch.no_grad()
def broadcast_from_owner(tensor: OwnedDTensor) -> torch.Tensor:
    """Return the whole matrix on every rank (a fresh tensor). One broadcast per mesh axis."""
    layout, grid = tensor.owner_layout, tensor.owner_layout.grid
    local = tensor.to_local()
    whole = local.clone() if layout.is_local else local.new_empty(layout.shape)
    whole = whole.contiguous()
    replicate, shard = grid.split(layout.position)
    if grid.replicate_index == replicate and grid.shard > 1:
        dist.broadcast(whole, group=grid.shard_group, group_src=shard)
    if grid.replicate_group is not None and grid.replicate > 1:
        dist.broadcast(whole, group=grid.replicate_group, group_src=replicate)
    return whole


@torch.no_grad()
def to_standard(tensor: OwnedDTensor) -> DTensor:
    """Return the values as the DTensor that FSDP2 would hold: even row chunks, replicated over replicas.

    The owner scatters its rows; every other rank receives only its chunk. The result shares no memory with `tensor`
    and keeps its dtype; a Parameter gives a plain DTensor.
    """
    layout, grid = tensor.owner_layout, tensor.owner_layout.grid
    replicate, shard = grid.split(layout.position)
    chunk = _chunk_rows(layout)
    local = tensor.to_local()
    mine = local.new_zeros((chunk, *layout.shape[1:]))
    if grid.replicate_index == replicate:
        parts = _padded_chunks(local, chunk, grid.shard) if layout.is_local else None
        if grid.shard == 1:
            mine.copy_(parts[0])  # type: ignore[index]
        else:
            dist.scatter(mine, parts, group=grid.shard_group, group_src=shard)
    if grid.replicate_group is not None and grid.replicate > 1:
        dist.broadcast(mine, group=grid.replicate_group, group_src=replicate)
    rows = _rows_of(layout, grid.shard_index)
    return DTensor.from_local(
        mine[:rows].clone() if rows < chunk else mine,
        grid.mesh,
        standard_placements(layout),
        run_check=False,
        shape=layout.shape,
        stride=torch.empty(layout.shape, device="meta").stride(),
    )


@torch.no_grad()
def from_standard(tensor: OwnedDTensor, value: torch.Tensor) -> None:
    """Bring `value` to the owner of `tensor`, in place, cast to its dtype.

    Args:
        tensor: an owned parameter, gradient or state.
        value: an ordinary DTensor on the same mesh (even chunks: gathered to the owner alone; any other placement:
            gathered everywhere first), or a whole plain tensor. A plain tensor is read on the owner only and needs
            no communication; other ranks may pass anything.

    Raises:
        ValueError: another global shape.
    """
    layout = tensor.owner_layout
    if isinstance(value, OwnedDTensor):
        if value.owner_layout.position != layout.position:
            raise ValueError(f"{layout.name} must be loaded from its own owner; got a tensor of rank {value.owner}.")
        whole: torch.Tensor | None = value.to_local()
    elif isinstance(value, DTensor):
        _check_shape(layout, value)
        even = value.device_mesh == layout.grid.mesh and tuple(value.placements) == standard_placements(layout)
        whole = _gather_to_owner(layout, value.to_local()) if even else value.full_tensor()
    else:
        whole = value
    if layout.is_local:
        if whole is None or whole.shape != layout.shape:
            _check_shape(layout, whole)
        tensor.to_local().copy_(whole)  # type: ignore[arg-type]
    layout.version += 1


@torch.no_grad()
def from_rank_zero(tensor: OwnedDTensor, value: torch.Tensor | None) -> None:
    """Bring a whole tensor that only grid position 0 has to the owner of `tensor` (point to point)."""
    layout, grid = tensor.owner_layout, tensor.owner_layout.grid
    source, target = grid.global_rank(0), grid.global_rank(layout.position)
    if source == target:
        if layout.is_local:
            tensor.to_local().copy_(value)  # type: ignore[arg-type]
    elif grid.position == 0:
        dtype = tensor.dtype
        dist.send(value.detach().to(device=tensor.to_local().device, dtype=dtype).contiguous(), target)  # type: ignore[union-attr]
    elif layout.is_local:
        whole = torch.empty(layout.shape, dtype=tensor.dtype, device=tensor.to_local().device)
        dist.recv(whole, source)
        tensor.to_local().copy_(whole)
    layout.version += 1


def owned_like(parameter: OwnedDTensor, local: torch.Tensor | None = None) -> OwnedDTensor:
    """Return zeros (or `local`, if given) with the owner of `parameter`, in its dtype. No communication."""
    if local is None:
        local = torch.zeros_like(parameter.to_local().detach())
    return own(local, parameter.owner_layout)


def _chunk_rows(layout: OwnerLayout) -> int:
    return -(-layout.shape[0] // layout.grid.shard)


def _rows_of(layout: OwnerLayout, shard_index: int) -> int:
    chunk = _chunk_rows(layout)
    return max(0, min(chunk, layout.shape[0] - shard_index * chunk))


def _padded_chunks(whole: torch.Tensor, chunk: int, count: int) -> list[torch.Tensor]:
    padded = whole.new_zeros((chunk * count, *whole.shape[1:]))
    padded[: whole.shape[0]] = whole
    return list(padded.chunk(count)) if chunk else [padded.clone() for _ in range(count)]


def _gather_to_owner(layout: OwnerLayout, local: torch.Tensor) -> torch.Tensor | None:
    grid = layout.grid
    replicate, shard = grid.split(layout.position)
    if grid.replicate_index != replicate:
        return None
    chunk = _chunk_rows(layout)
    mine = local.new_zeros((chunk, *layout.shape[1:]))
    mine[: local.shape[0]] = local
    parts = [torch.empty_like(mine) for _ in range(grid.shard)] if layout.is_local else None
    if grid.shard == 1:
        parts = [mine]
    else:
        dist.gather(mine, parts, group=grid.shard_group, group_dst=shard)
    return torch.cat(parts)[: layout.shape[0]] if parts is not None else None


def _check_shape(layout: OwnerLayout, value: Any) -> None:
    shape = None if value is None else tuple(value.shape)
    if shape != tuple(layout.shape):
        raise ValueError(
            f"{layout.name} must have the shape {tuple(layout.shape)}; got {shape}. "
            "The checkpoint belongs to another model."
        )


__all__ = [
    "broadcast_from_owner",
    "from_rank_zero",
    "from_standard",
    "own_parameter",
    "owned_like",
    "standard_placements",
    "to_standard",
]
