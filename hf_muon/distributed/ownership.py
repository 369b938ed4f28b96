# SPDX-License-Identifier: Apache-2.0
"""Who owns which matrix: a frozen plan computed from plain numbers, the same on every rank."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..orthogonalize import ns_flops

# Spreading a layer over different owners may cost this much balance before pure balance is preferred.
SPREAD_TOLERANCE = 1.05


@dataclass(frozen=True)
class Matrix:
    """One owned parameter as the plan sees it.

    Args:
        name: FQN.
        shape: global shape; leading axes beyond the last two are a batch.
        unit: FQN of the module whose forward gathers it ("" is the root).
        cost: work of one orthogonalization, in any unit that all matrices share (FLOPs).
        element_size: bytes per element of the owner's copy.
    """

    name: str
    shape: tuple[int, ...]
    unit: str
    cost: float
    element_size: int = 4

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class OwnershipPlan:
    """Owner of every matrix on a (replicate, shard) grid of ranks. Plain data: hashable, comparable, no tensors.

    Args:
        matrices: in the model's parameter order.
        owners: grid position of each matrix's owner, `replicate_index * shard + shard_index`.
        replicate: size of the replicate axis (1 without HSDP).
        shard: size of the shard axis.
        settings: what else the ranks must agree on (dtypes, mode), as text; part of the digest.
    """

    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    replicate: int
    shard: int
    settings: str = ""

    @property
    def num_ranks(self) -> int:
        """Number of positions of the grid."""
        return self.replicate * self.shard

    def owner_of(self, name: str) -> int:
        """Return the grid position that owns the matrix `name`.

        Raises:
            KeyError: no such matrix in the plan.
        """
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            if matrix.name == name:
                return owner
        raise KeyError(f"{name} must be a matrix of the ownership plan. `plan.matrices` lists them.")

    def matrices_of(self, rank: int) -> list[Matrix]:
        """Return the matrices owned by grid position `rank`, in model order."""
        return [m for m, owner in zip(self.matrices, self.owners, strict=True) if owner == rank]

    def ns_cost_per_rank(self) -> list[float]:
        """Return the orthogonalization work of each grid position, in the unit of `Matrix.cost`."""
        return _loads(self.matrices, self.owners, self.num_ranks)

    def elements_per_rank(self) -> list[int]:
        """Return the number of owned elements of each grid position."""
        return [sum(m.numel for m in self.matrices_of(rank)) for rank in range(self.num_ranks)]

    def bytes_per_rank(self) -> list[int]:
        """Return the bytes of owned weights of each grid position (momentum costs the same once more in float32)."""
        return [sum(m.numel * m.element_size for m in self.matrices_of(rank)) for rank in range(self.num_ranks)]

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean (1.0 is perfect; also 1.0 for an empty plan)."""
        loads = self.ns_cost_per_rank()
        mean = sum(loads) / len(loads)
        return max(loads) / mean if mean else 1.0

    @property
    def idle_ranks(self) -> list[int]:
        """Grid positions that own nothing."""
        return [rank for rank in range(self.num_ranks) if rank not in set(self.owners)]

    def digest(self) -> bytes:
        """Return 32 bytes that differ whenever anything of the plan differs."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).digest()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-serialisable data."""
        rows = [
            {"name": m.name, "shape": list(m.shape), "unit": m.unit, "cost": m.cost, "bytes": m.numel * m.element_size}
            | {"owner": owner}
            for m, owner in zip(self.matrices, self.owners, strict=True)
        ]
        return {"replicate": self.replicate, "shard": self.shard, "settings": self.settings, "matrices": rows}


def build_plan(matrices: Sequence[Matrix], *, replicate: int = 1, shard: int = 1, settings: str = "") -> OwnershipPlan:
    """Assign an owner to every matrix: the longest work first, each unit spread over different owners first.

    Deterministic and pure: the same list gives the same plan on every rank, without communication. Spreading a unit
    lets its broadcasts come from different ranks at once; where it would leave the busiest rank more than 5 % above
    what plain longest-processing-time reaches, balance wins.

    Args:
        matrices: in model order; names must differ.
        replicate: replicas of the sharded model (HSDP); owners are spread over the whole grid.
        shard: ranks that share one copy of the model.
        settings: text that ranks must agree on beside the plan.

    Raises:
        ValueError: a grid without ranks, a negative cost, or a name that stands twice.

    Note:
        O(n log n + n * ranks) for n matrices.
    """
    if replicate < 1 or shard < 1:
        raise ValueError(f"mesh must have at least one rank on each axis; got ({replicate}, {shard}).")
    names = Counter(m.name for m in matrices)
    for matrix in matrices:
        if names[matrix.name] > 1:
            raise ValueError(f"{matrix.name} must stand once in the plan; got {names[matrix.name]} entries.")
        if not matrix.cost >= 0:
            raise ValueError(f"{matrix.name} must have a cost of at least 0; got {matrix.cost}.")
    ranks = replicate * shard
    spread = _assign(matrices, ranks, spread=True)
    packed = _assign(matrices, ranks, spread=False)
    worst_spread = max(_loads(matrices, spread, ranks))
    worst_packed = max(_loads(matrices, packed, ranks))
    owners = spread if worst_spread <= SPREAD_TOLERANCE * worst_packed else packed
    return OwnershipPlan(tuple(matrices), tuple(owners), replicate, shard, settings)


def ns_cost(parameter: Any) -> int:
    """Return the FLOPs of orthogonalizing one parameter, summed over the matrices that its view says it holds."""
    shape = tuple(parameter.shape)
    view = getattr(parameter, "muon_view", None)
    parts = view.matrix_shapes(shape) if view is not None else [(shape[0] if len(shape) == 3 else 1, *shape[-2:])]
    return sum(ns_flops(m, n, batch=batch) for batch, m, n in parts)


def _assign(matrices: Sequence[Matrix], ranks: int, *, spread: bool) -> list[int]:
    order = sorted(range(len(matrices)), key=lambda i: (-matrices[i].cost, -matrices[i].numel, i))
    load, elements = [0.0] * ranks, [0] * ranks
    in_unit: Counter[tuple[str, int]] = Counter()
    owners = [0] * len(matrices)
    for index in order:
        matrix = matrices[index]

        def rank_key(rank: int, unit: str = matrix.unit) -> tuple[float, ...]:
            crowd = in_unit[unit, rank]
            # Balance ties are common (equal layers), so spreading decides them in both modes.
            return (crowd, load[rank], elements[rank], rank) if spread else (load[rank], crowd, elements[rank], rank)

        owner = min(range(ranks), key=rank_key)
        owners[index] = owner
        load[owner] += matrix.cost
        elements[owner] += matrix.numel
        in_unit[matrix.unit, owner] += 1
    return owners


def _loads(matrices: Sequence[Matrix], owners: Sequence[int], ranks: int) -> list[float]:
    load = [0.0] * ranks
    for matrix, owner in zip(matrices, owners, strict=True):
        load[owner] += matrix.cost
    return load
