# SPDX-License-Identifier: Apache-2.0
"""`OwnedDTensor`: a tensor that lives whole on one rank and looks like any other DTensor to torch.

Its spec says `Shard(0)` on the training mesh, so clipping, foreach and fused optimizers treat it like FSDP2's
parameters; its local tensor is the whole matrix on the owner and has no rows elsewhere. Operations that would be
wrong for such a layout raise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from .collectives import RankGrid

# Layout-preserving besides torch's own "pointwise" tag, by name of the operator.
_LAYOUT_KEEPING = frozenset(
    ("detach", "alias", "clone", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
) | frozenset(("_to_copy", "copy_", "zero_", "fill_", "normal_", "uniform_", "lerp", "lerp_"))
_REDUCTIONS = frozenset(("linalg_vector_norm", "norm", "sum", "any", "all", "_foreach_norm", "is_same_size"))
_ADVICE = "Use it inside the forward of its module, or call full_tensor() for the whole matrix."


@dataclass(eq=False)
class OwnerLayout:
    """Where an owned tensor lives; shared by the parameter, its gradient and its optimizer state.

    Args:
        name: FQN, for messages.
        grid: the ranks.
        position: grid position of the owner.
        shape: global shape.
    """

    name: str
    grid: RankGrid
    position: int
    shape: torch.Size
    version: int = 0  # grows whenever the weight changed: gathered copies compare it
    gradient_flag: bool | torch.Tensor = field(default=True, repr=False)

    @property
    def is_local(self) -> bool:
        """Whether this rank is the owner."""
        return self.position == self.grid.position

    @property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's local tensor: the whole, or no rows."""
        return self.shape if self.is_local else torch.Size((0, *self.shape[1:]))


class OwnedShard(Shard):
    """`Shard(0)` that tells whoever asks for the layout the truth: all rows at one coordinate of the mesh axis.

    The spec keeps plain `Shard(0)`, for operators; checkpointing and state-dict broadcasting ask `placements`.

    Args:
        owner: coordinate of the owner on the mesh axis.
    """

    def __init__(self, owner: int) -> None:
        super().__init__(0)
        self.owner = owner

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnedShard) and other.owner == self.owner

    def __hash__(self) -> int:
        return hash((OwnedShard, self.owner))

    def __repr__(self) -> str:
        return f"OwnedShard(owner={self.owner})"

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, Any]:
        return (curr_local_size, 0) if rank == self.owner else (0, curr_local_size)


class OwnedDTensor(DTensor):
    """A DTensor whose local tensor is whole on its owner and empty elsewhere. Made by `own`, never constructed.

    Attributes:
        is_owned: always True; what optimizers ask.
        owner_layout: the shared `OwnerLayout`.
    """

    is_owned = True
    owner_layout: OwnerLayout

    @property
    def owner(self) -> int:
        """Rank (in the whole job) that holds the matrix."""
        return self.owner_layout.grid.global_rank(self.owner_layout.position)

    @property
    def is_local(self) -> bool:
        """Whether this rank is the owner."""
        return self.owner_layout.is_local

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placements that report where the rows really are (see `OwnedShard`)."""
        layout = self.owner_layout
        replicate, shard = layout.grid.split(layout.position)
        return (OwnedShard(shard),) if layout.grid.mesh.ndim == 1 else (OwnedShard(replicate), OwnedShard(shard))

    @property
    def has_gradient(self) -> bool:
        """Whether any rank produced a gradient since the gradient was last cleared (asked on the owner).

        A matrix that no rank used has a zero `.grad` so that all ranks take the same path; an optimizer must then
        leave it alone: no update, no decay. Reads a device value only where this rank itself had no gradient.
        """
        if self.grad is None:
            return False
        flag = self.owner_layout.gradient_flag
        return bool(flag.item() > 0) if isinstance(flag, torch.Tensor) else flag

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return the whole matrix on every rank, without autograd. Collective over the mesh: one broadcast.

        Raises:
            NotImplementedError: `grad_placements` was given.
        """
        if grad_placements is not None:
            raise NotImplementedError(f"{self.owner_layout.name} has no differentiable full_tensor. {_ADVICE}")
        from .standard import broadcast_from_owner  # a module level import would be circular

        with torch.no_grad():
            return broadcast_from_owner(self)

    def redistribute(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the spec promises even chunks that are not there."""
        raise RuntimeError(
            f"{self.owner_layout.name} must not be redistributed: it lives whole on rank {self.owner}. "
            "Call hf_muon.distributed.to_standard(parameter) for an ordinary sharded DTensor."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnedDTensor:
        """Copy values; the copy has the same owner."""
        if id(self) not in memo:
            with torch.no_grad():
                copy = own(self.to_local().clone(), self.owner_layout)
            if isinstance(self, nn.Parameter):
                copy = own_parameter(copy, self.requires_grad)
            memo[id(self)] = copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: a pickle on one rank would not hold the matrix."""
        raise RuntimeError(
            f"{self.owner_layout.name} must not be pickled: only rank {self.owner} holds it. "
            "Save model.state_dict() or optimizer.state_dict(), or call full_tensor() on every rank first."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show where the matrix lives."""
        return (
            f"OwnedDTensor({self.owner_layout.name}, shape={tuple(self.owner_layout.shape)}, owner=rank {self.owner})"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run operators that are right for this layout, and wrap their results; refuse the others."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        owned = _first_owned((*args, *kwargs.values()))
        if owned is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        keeps = (
            name in _LAYOUT_KEEPING or torch.Tag.pointwise in func.tags or name.startswith(("_foreach_", "_fused_"))
        )
        reduces = name in _REDUCTIONS
        if reduces and name != "_foreach_norm" and _has_dims(args, kwargs, name):
            keeps = reduces = False
        if not (keeps or reduces):
            raise RuntimeError(f"{owned.owner_layout.name} must not be used in {name} outside its forward. {_ADVICE}")
        if keeps and not reduces:
            _check_partners(name, args, owned)
        if reduces and math.inf in args[1:2]:
            args = (_with_a_zero_row(args[0]), *args[1:])
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if reduces:
            return out
        if func._schema.is_mutable:
            _bump(args)
            return args[0] if isinstance(args[0], DTensor) and out is not None else out
        return _wrap(out, args, owned)


def own(local: torch.Tensor, layout: OwnerLayout) -> OwnedDTensor:
    """Return `local` (whole on the owner, no rows elsewhere) as an owned tensor; shares its memory.

    Raises:
        ValueError: `local` has another shape than this rank must hold.
    """
    if local.shape != layout.local_shape:
        raise ValueError(
            f"{layout.name} must have the local shape {tuple(layout.local_shape)} on this rank; "
            f"got {tuple(local.shape)}."
        )
    stride, step = [], 1
    for size in reversed(layout.shape):
        stride.append(step)
        step *= size
    placements = [Shard(0)] * layout.grid.mesh.ndim
    with torch.no_grad():
        tensor = DTensor.from_local(
            local.detach(),
            layout.grid.mesh,
            placements,
            run_check=False,
            shape=layout.shape,
            stride=tuple(reversed(stride)),
        )
    return _adopt(tensor, layout)


def own_parameter(tensor: OwnedDTensor, requires_grad: bool = True) -> OwnedDTensor:
    """Return an owned tensor as a Parameter of the same class."""
    parameter: Any = nn.Parameter(tensor, requires_grad=requires_grad)
    if not isinstance(parameter, OwnedDTensor):
        parameter.__class__ = OwnedDTensor
    parameter.owner_layout = tensor.owner_layout
    return parameter


def is_owned(tensor: object) -> bool:
    """Tell whether `tensor` is an owned parameter, gradient or state."""
    return isinstance(tensor, OwnedDTensor)


def _adopt(tensor: DTensor, layout: OwnerLayout) -> OwnedDTensor:
    tensor.__class__ = OwnedDTensor
    tensor.owner_layout = layout  # type: ignore[attr-defined]
    return tensor  # type: ignore[return-value]


def _with_a_zero_row(tensors: Any) -> Any:
    """Return `tensors` for a maximum norm, which has no value on no rows: ranks without rows hold one of zeros."""
    if isinstance(tensors, (list, tuple)):
        return [_with_a_zero_row(tensor) for tensor in tensors]
    if not isinstance(tensors, OwnedDTensor) or tensors.to_local().numel():
        return tensors
    layout = tensors.owner_layout
    zeros = tensors.to_local().new_zeros((1, *layout.shape[1:]))
    placements = [Shard(0)] * layout.grid.mesh.ndim
    return DTensor.from_local(
        zeros, layout.grid.mesh, placements, run_check=False, shape=layout.shape, stride=tensors.stride()
    )


def _first_owned(args: Sequence[Any]) -> OwnedDTensor | None:
    for arg in args:
        if isinstance(arg, OwnedDTensor):
            return arg
        if isinstance(arg, (list, tuple)):
            found = next((item for item in arg if isinstance(item, OwnedDTensor)), None)
            if found is not None:
                return found
    return None


def _has_dims(args: Sequence[Any], kwargs: dict[str, Any], name: str) -> bool:
    dims = kwargs.get("dim")
    if dims is None:
        position = {"linalg_vector_norm": 2, "norm": 2, "sum": 1, "any": 1, "all": 1}.get(name, len(args))
        dims = args[position] if len(args) > position else None
    return dims is not None and dims != []


def _check_partners(name: str, args: Sequence[Any], owned: OwnedDTensor) -> None:
    """Refuse to combine an owned tensor with one that is laid out otherwise (single numbers are fine)."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], torch.Tensor)]
    rows = zip(*lists, strict=False) if lists else [args]
    for row in rows:
        tensors = [item for item in row if isinstance(item, torch.Tensor) and item.numel() > 1]
        layouts = {item.owner_layout.position if isinstance(item, OwnedDTensor) else -1 for item in tensors}
        if len(layouts) > 1:
            raise RuntimeError(
                f"{owned.owner_layout.name} must not be combined in {name} with a tensor that has another owner or "
                f"none. {_ADVICE}"
            )


def _bump(args: Sequence[Any]) -> None:
    targets = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
    for target in targets:
        if isinstance(target, OwnedDTensor) and isinstance(target, nn.Parameter):
            target.owner_layout.version += 1


def _wrap(out: Any, args: Sequence[Any], owned: OwnedDTensor) -> Any:
    if isinstance(out, (list, tuple)):
        sources = next((arg for arg in args if isinstance(arg, (list, tuple)) and len(arg) == len(out)), [owned])
        return type(out)(
            _adopt(item, source.owner_layout)
            if isinstance(source, OwnedDTensor)
            and isinstance(item, DTensor)
            and item.shape == source.owner_layout.shape
            else item
            for item, source in zip(out, sources, strict=False)
        )
    if isinstance(out, DTensor) and out.shape == owned.owner_layout.shape:
        return _adopt(out, owned.owner_layout)
    return out
