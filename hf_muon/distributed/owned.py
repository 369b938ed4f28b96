# SPDX-License-Identifier: Apache-2.0
"""`OwnedDTensor`: a tensor that lives whole on one rank and looks like any other DTensor to torch.

Its spec says `Shard(0)` on the training mesh, so clipping, foreach and fused optimizers treat it like FSDP2's
parameters; its local tensor is the whole matrix on the owner and has no rows elsewhere. A stack of experts may have
several owners, each with a range of whole experts. Operations that would be wrong for such a layout raise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

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


class Part(NamedTuple):
    """Rows [start, stop) along axis 0, and the grid position that holds them."""

    position: int
    start: int
    stop: int


@dataclass(eq=False)
class OwnerLayout:
    """Where an owned tensor lives; shared by the parameter, its gradient and its optimizer state.

    Args:
        name: FQN, for messages.
        grid: the ranks.
        parts: what each owner holds: one part with all rows, or a stack's experts in ascending ranges and positions.
        shape: global shape.
    """

    name: str
    grid: RankGrid
    parts: tuple[Part, ...]
    shape: torch.Size
    version: int = 0  # grows whenever the weight changed: gathered copies compare it
    gradient_flag: bool | torch.Tensor = field(default=True, repr=False)

    @cached_property
    def part(self) -> Part | None:
        """What this rank holds."""
        return next((part for part in self.parts if part.position == self.grid.position), None)

    @property
    def is_local(self) -> bool:
        """Whether this rank is an owner."""
        return self.part is not None

    @property
    def rows(self) -> slice:
        """This rank's rows along axis 0; none on a rank that is no owner."""
        return slice(0, 0) if self.part is None else slice(self.part.start, self.part.stop)

    @property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's local tensor."""
        return torch.Size((self.rows.stop - self.rows.start, *self.shape[1:]))

    @property
    def owners(self) -> tuple[int, ...]:
        """Ranks (in the whole job) that hold rows."""
        return tuple(self.grid.global_rank(part.position) for part in self.parts)

    @property
    def place(self) -> str:
        """Where the tensor is, for messages."""
        return f"whole on rank {self.owners[0]}" if len(self.parts) == 1 else f"in parts on ranks {list(self.owners)}"

    @cached_property
    def placements(self) -> tuple[OwnedShard, ...]:
        """Placements on the mesh that report where the rows really are, as this rank needs them."""
        grid = self.grid
        table = [[0] * grid.shard for _ in range(grid.replicate)]
        for position, start, stop in self.parts:
            replicate, shard = grid.split(position)
            table[replicate][shard] = stop - start
        within = OwnedShard(tuple(table[grid.replicate_index]))
        return (within,) if grid.mesh.ndim == 1 else (OwnedShard(tuple(map(sum, table))), within)


class OwnedShard(Shard):
    """`Shard(0)` that tells whoever asks for the layout the truth: how many rows each coordinate of the axis has.

    The spec keeps plain `Shard(0)`, for operators; checkpointing and state-dict broadcasting ask `placements`.

    Args:
        rows: rows at every coordinate of the mesh axis, in order.
    """

    def __init__(self, rows: tuple[int, ...]) -> None:
        super().__init__(0)
        self.rows = rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnedShard) and other.rows == self.rows

    def __hash__(self) -> int:
        return hash((OwnedShard, self.rows))

    def __repr__(self) -> str:
        return f"OwnedShard(rows={self.rows})"

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, Any]:
        # Checkpointing tells pieces apart by offset: an empty one must not begin where another does.
        return (self.rows[rank], sum(self.rows[:rank])) if self.rows[rank] else (0, curr_local_size)


class OwnedDTensor(DTensor):
    """A DTensor that is whole on its owner and empty elsewhere, or whose owners each hold some experts of a stack.

    Made by `own`, never constructed.

    Attributes:
        is_owned: always True; what optimizers ask.
        owner_layout: the shared `OwnerLayout`.
    """

    is_owned = True
    owner_layout: OwnerLayout

    @property
    def owners(self) -> tuple[int, ...]:
        """Ranks (in the whole job) that hold the matrix: one, or several with a range of experts each."""
        return self.owner_layout.owners

    @property
    def is_local(self) -> bool:
        """Whether this rank is an owner."""
        return self.owner_layout.is_local

    @property
    def rows(self) -> slice:
        """Rows along axis 0 that this rank holds."""
        return self.owner_layout.rows

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placements that report where the rows really are (see `OwnedShard`)."""
        return self.owner_layout.placements

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
        """Return the whole matrix on every rank, without autograd. Collective over the mesh: a broadcast per owner.

        Raises:
            NotImplementedError: `grad_placements` was given.
        """
        if grad_placements is not None:
            raise NotImplementedError(f"{self.owner_layout.name} has no differentiable full_tensor. {_ADVICE}")
        from .standard import broadcast_from_owners  # a module level import would be circular

        with torch.no_grad():
            return broadcast_from_owners(self)

    def redistribute(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the spec promises even chunks that are not there."""
        raise RuntimeError(
            f"{self.owner_layout.name} must not be redistributed: it lives {self.owner_layout.place}. "
            "Call hf_muon.distributed.to_standard(parameter) for an ordinary sharded DTensor."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnedDTensor:
        """Copy values; the copy has the same owners."""
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
            f"{self.owner_layout.name} must not be pickled: it lives {self.owner_layout.place}. "
            "Save model.state_dict() or optimizer.state_dict(), or call full_tensor() on every rank first."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show where the matrix lives."""
        layout = self.owner_layout
        return f"OwnedDTensor({layout.name}, shape={tuple(layout.shape)}, {layout.place})"

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
    """Return `local` (this rank's rows: all, a range of experts, or none) as an owned tensor; shares its memory.

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
        layouts = {item.owner_layout.parts if isinstance(item, OwnedDTensor) else None for item in tensors}
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
