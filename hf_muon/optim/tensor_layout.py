# SPDX-License-Identifier: Apache-2.0
"""The one place that knows how a parameter is stored: plain tensor, sharded DTensor, or owned DTensor.

An owned DTensor (`is_owned` is true on its class) holds whole matrices on its owner rank and no rows elsewhere, or a
range of a stack's experts on each of several owners (`rows`), so its local tensor is all that Muon needs. A sharded
DTensor has to be gathered before orthogonalizing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether `tensor` is a DTensor; imports nothing where torch has no distributed build."""
    if type(tensor) in (Tensor, torch.nn.Parameter) or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def is_owned(tensor: Tensor) -> bool:
    """Return whether every matrix of `tensor` lives whole on one rank."""
    return bool(getattr(tensor, "is_owned", False)) and is_dtensor(tensor)


def needs_gather(tensor: Tensor) -> bool:
    """Return whether `tensor` is a DTensor of which this rank may hold only some rows."""
    return is_dtensor(tensor) and not is_owned(tensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return what this rank stores of `tensor`, sharing its memory; plain tensors come back as they are."""
    return cast("DTensor", tensor).to_local() if is_dtensor(tensor) else tensor


def whole_matrix(local: Tensor, param: Tensor) -> Tensor:
    """Return the whole tensor of which `local` is this rank's part, laid out as `param`.

    Collective over the mesh of `param` when `needs_gather(param)`; free and an alias of `local` otherwise.

    Args:
        local: values in the local layout of `param`, any dtype.
        param: the parameter whose layout decides.
    """
    if not needs_gather(param):
        return local
    from torch.distributed.tensor import DTensor

    sharded = cast(DTensor, param)
    gathered = DTensor.from_local(
        local, sharded.device_mesh, sharded.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    return gathered.full_tensor()


def local_part(whole: Tensor, param: Tensor) -> Tensor:
    """Return the part of `whole` that this rank stores under the layout of `param`; no communication.

    Args:
        whole: the full tensor, equal on all ranks (or, for an owned parameter, meaningful on its owners).
        param: the parameter whose layout decides.
    """
    if not is_dtensor(param):
        return whole
    if is_owned(param):
        return whole[cast(Any, param).rows]
    from torch.distributed.tensor import DTensor, distribute_tensor

    sharded = cast(DTensor, param)
    return distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None).to_local()


def shard_coordinates(param: Tensor) -> tuple[int, ...]:
    """Return which part of `param` this rank holds: its place on the mesh axes that split it, nothing for a whole.

    Ranks with equal coordinates hold equal values.
    """
    if not needs_gather(param):
        return ()
    sharded = cast("DTensor", param)
    places = sharded.device_mesh.get_coordinate() or ()
    return tuple(place for place, how in zip(places, sharded.placements, strict=False) if not how.is_replicate())


def zeros_in_layout(param: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return zeros of `dtype` stored as `param` is: same shape, ranks, and owned where it is owned.

    Args:
        param: decides the layout.
        dtype: of the result.
        device: default that of `param`. Zeros on the CPU of a parameter on CUDA are in pinned memory.
    """
    elsewhere: dict[str, Any] = {}
    if device not in (None, param.device):
        elsewhere = {"device": device, "pin_memory": param.is_cuda}
    result = torch.zeros_like(
        param, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False, **elsewhere
    )
    if is_owned(param) and not is_owned(result):
        result.__class__ = type(param)  # so that a later comparison of layouts is the same on every rank
    return result


def on_mesh_device(tensor: Tensor) -> Tensor:
    """Return a DTensor on the device type of its mesh, where collectives work; offloaded state rests elsewhere."""
    kind = cast("DTensor", tensor).device_mesh.device_type
    return tensor if tensor.device.type == kind else tensor.to(kind)


def same_layout(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have one shape and are stored the same way over the same ranks."""
    if first.shape != second.shape or is_dtensor(first) != is_dtensor(second) or is_owned(first) != is_owned(second):
        return False
    if not is_dtensor(first):
        return True
    left, right = cast("DTensor", first), cast("DTensor", second)
    return (
        left.device_mesh == right.device_mesh
        and left.placements == right.placements
        and left.to_local().shape == right.to_local().shape
    )


def copy_into_layout(value: Tensor, param: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return a new tensor that holds `value` in the layout and shape of `param`.

    Collective when `value` is a DTensor in another layout than `param`.

    Args:
        value: a plain tensor with every element, or a DTensor; any dtype and device.
        param: decides the layout.
        dtype: dtype of the result.
        device: of the result; default that of `param`.
    """
    if is_dtensor(value) and not same_layout(value, param):
        value = cast("DTensor", on_mesh_device(value)).full_tensor()
    result = zeros_in_layout(param, dtype, device)
    destination = local_tensor(result)
    source = local_tensor(value) if is_dtensor(value) else local_part(value.to(destination.device), param)
    if destination.numel():
        destination.copy_(source)
    return result
