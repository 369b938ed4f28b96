# SPDX-License-Identifier: Apache-2.0
"""Where every Muon matrix lies in DeepSpeed's partitions, who orthogonalizes it, and in which round: plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from ...orthogonalize.cost import ns_flops
from ...param_groups import MatrixView
from ...param_groups.sites import true_shape

MAX_ROUND_ELEMENTS = 64 * 2**20  # per owner and round: 256 MiB of float32 updates in flight


@dataclass(frozen=True)
class Piece:
    """A run of elements of one matrix on one rank.

    Attributes:
        rank: rank within the group of ranks that share the tensor.
        offset: first element in that rank's flat tensor.
        start: first element within the matrix, in storage order.
        numel: number of elements.
    """

    rank: int
    offset: int
    start: int
    numel: int


@dataclass(frozen=True)
class Unit:
    """What reaches its owner whole: a parameter with all its parts and heads, or one expert of a stacked parameter.

    Attributes:
        tensor: which of the tensors of the step holds it (partitions have one, whole parameters one each).
        shape: of the unit.
        view: the matrices in it.
        pieces: all its elements, over all ranks.
        owner: rank that orthogonalizes it.
    """

    tensor: int
    shape: tuple[int, ...]
    view: MatrixView
    pieces: tuple[Piece, ...]
    owner: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def is_expert(self) -> bool:
        """Whether it is one expert of several, which may have had no token in a step."""
        return self.view.routed and len(self.shape) == 2 and self.view.alternating == 1

    @property
    def num_matrices(self) -> int:
        """Number of matrices that Newton-Schulz sees."""
        return sum(batch for batch, _, _ in self.view.matrix_shapes(self.shape))


@dataclass(frozen=True)
class StepPlan:
    """What one group of ranks does for the Muon matrices of one step (or of one sub-group of it).

    Attributes:
        rounds: units in the order in which they are exchanged; every rank runs the same rounds.
        num_ranks: ranks that share the tensors.
        rank: this rank among them.
        process_group: of these ranks, None for all of the job.
        replicated: every rank holds every element (ZeRO 0), so results go to all.
    """

    rounds: tuple[tuple[Unit, ...], ...]
    num_ranks: int
    rank: int
    process_group: Any = None
    replicated: bool = False


def partition_pieces(numel: int, partition_numel: int, offset: int, num_ranks: int) -> tuple[Piece, ...]:
    """Return the pieces of a ZeRO-3 parameter: equal shares in rank order, the last ones short or empty.

    Args:
        numel: elements of the whole parameter.
        partition_numel: elements of each share, padding counted.
        offset: where the share starts in the flat tensor, the same on every rank.
        num_ranks: ranks that share it.
    """
    pieces = []
    for rank in range(num_ranks):
        count = min(partition_numel, numel - rank * partition_numel)
        if count > 0:
            pieces.append(Piece(rank, offset, rank * partition_numel, count))
    return tuple(pieces)


def split_units(tensor: int, shape: tuple[int, ...], view: MatrixView, pieces: Iterable[Piece]) -> list[Unit]:
    """Return one unit per expert for experts stacked on the first axis, else one: parts and heads stay together."""
    pieces = tuple(pieces)
    if len(shape) == 2 and view.stack > 1 and view.routed:
        shape, view = (view.stack, shape[0] // view.stack, shape[1]), replace(view, stack=1)
    if len(shape) != 3 or view.flatten or view.stack > 1:
        return [Unit(tensor, shape, view, pieces)]
    size = shape[1] * shape[2]
    units = []
    for expert in range(shape[0]):
        begin, inside = expert * size, []
        for piece in pieces:
            first, last = max(begin, piece.start), min(begin + size, piece.start + piece.numel)
            if first < last:
                inside.append(Piece(piece.rank, piece.offset + first - piece.start, first - begin, last - first))
        units.append(Unit(tensor, shape[1:], view, tuple(inside)))
    return units


def assign_owners(units: Sequence[Unit], num_ranks: int, *, steps: int, method: str) -> list[Unit]:
    """Return the units with owners: the only holder where there is one, else the holder with the least work so far.

    Deterministic and pure: the same on every rank. Matrices that no exchange can move cheaper count first, then the
    split ones go, longest first, to whoever of their holders has least to do.
    """
    work = [
        sum(ns_flops(m, n, steps=steps, method=method, batch=b) for b, m, n in u.view.matrix_shapes(u.shape))
        for u in units
    ]
    load, owners = [0.0] * num_ranks, [0] * len(units)
    holders = [sorted({piece.rank for piece in unit.pieces}) for unit in units]
    order = sorted(range(len(units)), key=lambda i: (len(holders[i]) > 1, -work[i], i))
    for index in order:
        owner = min(holders[index], key=lambda rank: (load[rank], rank))
        owners[index] = owner
        load[owner] += work[index]
    return [replace(unit, owner=owner) for unit, owner in zip(units, owners, strict=True)]


def split_rounds(units: Sequence[Unit], limit: int = MAX_ROUND_ELEMENTS) -> tuple[tuple[Unit, ...], ...]:
    """Return the units in rounds in which no owner holds more than `limit` elements (one larger unit goes alone)."""
    rounds: list[list[Unit]] = []
    place: dict[int, tuple[int, int]] = {}  # owner -> (its current round, elements it holds there)
    for unit in units:
        index, held = place.get(unit.owner, (0, 0))
        if held and held + unit.numel > limit:
            index, held = index + 1, 0
        place[unit.owner] = (index, held + unit.numel)
        while len(rounds) <= index:
            rounds.append([])
        rounds[index].append(unit)
    return tuple(tuple(entry) for entry in rounds)


def make_plan(
    units: Sequence[Unit], process_group: Any, group: dict[str, Any], *, replicated: bool = False, alone: bool = False
) -> StepPlan:
    """Return the plan for `units` in `process_group`, with the options of the parameter group; no communication."""
    num_ranks = 1 if alone else dist.get_world_size(process_group)
    rank = 0 if alone else dist.get_rank(process_group)
    owned = assign_owners(units, num_ranks, steps=group["ns_steps"], method=group["ns_method"])
    return StepPlan(split_rounds(owned), num_ranks, rank, process_group, replicated)


# ---------------------------------------------------------------- reading DeepSpeed's partitions
# Only names without a leading underscore are read; tests/architecture/test_compat_deepspeed.py watches them.


def stage12_pieces(zero: Any, index: int) -> list[tuple[Any, tuple[Piece, ...]]]:
    """Return (parameter, pieces) for group `index` of a ZeRO-1 or ZeRO-2 optimizer, all ranks' pieces."""
    result = []
    size = int(zero.partition_size[index])
    for param in zero.round_robin_bit16_groups[index]:
        key = zero.get_param_id(param)
        pieces = []
        for rank in zero.param_to_partition_ids[index][key]:
            offset = int(zero.grad_partition_insertion_offset[index][rank][key])
            start = int(zero.grad_start_offset[index][rank][key])
            pieces.append(Piece(int(rank), offset, start, min(param.numel() - start, size - offset)))
        result.append((param, tuple(pieces)))
    return result


def stage3_pieces(zero: Any, index: int) -> list[tuple[Any, tuple[Piece, ...]]]:
    """Return (parameter, pieces) for sub-group `index` of a ZeRO-3 optimizer, all ranks' pieces."""
    result, offset = [], 0
    num_ranks = int(zero.sub_group_partition_counts[index])
    for param in zero.fp16_groups[index]:
        size = int(param.partition_numel())
        numel = 1
        for length in true_shape(param):
            numel *= length
        result.append((param, partition_pieces(numel, size, offset, num_ranks)))
        offset += size
    return result
