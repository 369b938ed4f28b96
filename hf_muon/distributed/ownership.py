# SPDX-License-Identifier: Apache-2.0
"""Who owns which matrix: a frozen plan computed from plain numbers, the same on every rank."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..orthogonalize import ns_flops

# Spreading a layer over different owners may cost this much balance before pure balance is preferred.
SPREAD_TOLERANCE = 1.05
# The local search looks for a partner of the busiest rank among this many of the least busy ones.
SEARCH_WIDTH = 16
# Stacks of experts are split where the busiest rank would otherwise have this much more than the best possible: no
# part then has more than the mean work of a rank over a grain (0: whole stacks). Twenty grains leave 5 % by the bound
# of longest processing time, whatever the model, as long as one expert is less than that.
SPLIT_TOLERANCE = 1.02
SPLIT_GRAINS = (0, 1, 2, 3, 4, 6, 8, 12, 20)


@dataclass(frozen=True)
class Matrix:
    """One owned parameter as the plan sees it, or one owner's part of a stack of experts.

    Args:
        name: FQN of the parameter.
        shape: shape of the parameter or part; leading axes beyond the last two are a batch.
        unit: FQN of the module whose forward gathers it ("" is the root).
        cost: work of one orthogonalization, in any unit that all matrices share (FLOPs).
        element_size: bytes per element of the owner's copy.
        experts: equal matrices along the first axis, each of which may have its own owner; 1 is indivisible.
        start: where along the parameter's first axis a part begins.
    """

    name: str
    shape: tuple[int, ...]
    unit: str
    cost: float
    element_size: int = 4
    experts: int = 1
    start: int = 0

    @classmethod
    def of_parameter(
        cls,
        name: str,
        shape: Sequence[int],
        unit: str,
        *,
        view: Any = None,
        element_size: int = 4,
        work: Callable[..., float] = ns_flops,
    ) -> Matrix:
        """Describe a parameter, its cost that of orthogonalizing all matrices that its view says it holds.

        Args:
            name: FQN.
            shape: global shape.
            unit: FQN of the module that gathers it.
            view: the parameter's `muon_view`; None: the last two axes are one matrix, a leading one is a batch.
            element_size: bytes per element of the owner's copy.
            work: cost of `batch` matrices (m, n): `work_on` of a device, or the FLOPs of a CPU.
        """
        shape = tuple(shape)
        batch = shape[0] if len(shape) == 3 else 1
        parts = view.matrix_shapes(shape) if view is not None else [(batch, *shape[-2:])]
        cost = sum(work(m, n, batch=count) for count, m, n in parts)
        # A flattened convolution has three axes as well, but is one matrix.
        experts = batch if parts[0][0] == batch else 1
        return cls(name, shape, unit, cost, element_size, experts)

    def part(self, start: int, stop: int) -> Matrix:
        """Return the experts [start, stop), counted from this entry's first."""
        count = stop - start
        if count == self.experts:
            return self
        shape, cost = (count, *self.shape[1:]), self.cost * count / self.experts
        return replace(self, shape=shape, cost=cost, experts=count, start=self.start + start)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class OwnershipPlan:
    """Owner of every matrix on a (replicate, shard) grid of ranks. Plain data: hashable, comparable, no tensors.

    Args:
        matrices: in the model's parameter order; a stack with several owners as one entry per owner, whose ranges of
            experts ascend with the owners' grid positions.
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

    def owner_of(self, name: str, expert: int = 0) -> int:
        """Return the grid position that owns the matrix `name`, or the given expert of a stack.

        Raises:
            KeyError: no such matrix in the plan.
        """
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            if matrix.name == name and matrix.start <= expert < matrix.start + matrix.experts:
                return owner
        raise KeyError(f"{name} must be a matrix of the ownership plan. `plan.matrices` lists them.")

    @property
    def split_stacks(self) -> int:
        """Number of stacks of experts with more than one owner."""
        return sum(count > 1 for count in Counter(matrix.name for matrix in self.matrices).values())

    def matrices_of(self, rank: int) -> list[Matrix]:
        """Return the matrices owned by grid position `rank`, in model order."""
        return [m for m, owner in zip(self.matrices, self.owners, strict=True) if owner == rank]

    def ns_cost_per_rank(self) -> list[float]:
        """Return the orthogonalization work of each grid position, in the unit of `Matrix.cost`."""
        return _loads(self.matrices, self.owners, self.num_ranks)

    def elements_per_rank(self) -> list[int]:
        """Return the number of owned elements of each grid position."""
        return self._sums(lambda matrix: matrix.numel)

    def bytes_per_rank(self) -> list[int]:
        """Return the bytes of owned weights of each grid position (momentum costs the same once more in float32)."""
        return self._sums(lambda matrix: matrix.numel * matrix.element_size)

    def _sums(self, size: Callable[[Matrix], int]) -> list[int]:
        totals = [0] * self.num_ranks
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            totals[owner] += size(matrix)
        return totals

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean (1.0 is perfect; also 1.0 for an empty plan)."""
        return self._over_mean(max(self.ns_cost_per_rank()))

    @property
    def imbalance_bound(self) -> float:
        """Proven lower bound of `imbalance` for any choice of owners, as long as every expert stays whole.

        The busiest rank has at least the mean; and among the k * ranks + 1 costliest matrices some rank has k + 1, so
        at least the k + 1 cheapest of those (k = 0: the costliest matrix).
        """
        costs = sorted((m.cost / m.experts for m in self.matrices for _ in range(m.experts)), reverse=True)
        crowded = (
            sum(costs[last - last // self.num_ranks : last + 1]) for last in range(0, len(costs), self.num_ranks)
        )
        return max(1.0, self._over_mean(max(crowded, default=0.0)))

    def _over_mean(self, cost: float) -> float:
        total = sum(matrix.cost for matrix in self.matrices)
        return cost * self.num_ranks / total if total else 1.0

    @property
    def idle_ranks(self) -> list[int]:
        """Grid positions that own nothing."""
        busy = set(self.owners)
        return [rank for rank in range(self.num_ranks) if rank not in busy]

    def digest(self) -> bytes:
        """Return 32 bytes that differ whenever anything of the plan differs."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).digest()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-serialisable data."""
        rows = [
            {"name": m.name, "shape": list(m.shape), "unit": m.unit, "cost": m.cost, "bytes": m.numel * m.element_size}
            | {"experts": m.experts, "start": m.start, "owner": owner}
            for m, owner in zip(self.matrices, self.owners, strict=True)
        ]
        return {"replicate": self.replicate, "shard": self.shard, "settings": self.settings, "matrices": rows}


def build_plan(
    matrices: Sequence[Matrix],
    *,
    replicate: int = 1,
    shard: int = 1,
    settings: str = "",
    split_stacks: bool = False,
) -> OwnershipPlan:
    """Assign an owner to every matrix: the longest work first, each unit spread over different owners first.

    Deterministic and pure: the same list gives the same plan on every rank, without communication. Spreading a unit
    lets its broadcasts come from different ranks at once; where it would leave the busiest rank more than 5 % above
    what plain longest-processing-time reaches, balance wins. A local search then relieves the busiest rank by moves
    and exchanges, which never make a unit more crowded on a rank than it was.

    Args:
        matrices: in model order; names must differ.
        replicate: replicas of the sharded model (HSDP); owners are spread over the whole grid.
        shard: ranks that share one copy of the model.
        settings: text that ranks must agree on beside the plan.
        split_stacks: divide stacks of experts, into no more parts than it takes, where whole ones would leave the
            busiest rank more than 2 % above the best possible.

    Raises:
        ValueError: a grid without ranks, a negative cost, or a name that stands twice.

    Note:
        Both starts take O(n log n + n u log ranks) for n matrices, u of them in the largest unit. 252 matrices on 8
        ranks take 20 ms, 5,000 on 4,096 ranks under a second.
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
    best, tried = None, 0
    for grain in SPLIT_GRAINS if split_stacks else SPLIT_GRAINS[:1]:
        parts = _cut(matrices, ranks, grain)
        if best is not None and len(parts) == tried:
            continue
        rows, owners = _in_rank_order(matrices, parts, _choose_owners(parts, ranks))
        plan, tried = OwnershipPlan(rows, owners, replicate, shard, settings), len(parts)
        if best is None or plan.imbalance < best.imbalance:
            best = plan
        if best.imbalance <= SPLIT_TOLERANCE * best.imbalance_bound:
            break
    assert best is not None
    return best


def _cut(matrices: Sequence[Matrix], ranks: int, grain: int) -> list[Matrix]:
    """Cut stacks into equal parts of at most the mean work of a rank over `grain` each."""
    allowed = sum(matrix.cost for matrix in matrices) / ranks
    parts = []
    for matrix in matrices:
        wanted = math.ceil(grain * matrix.cost / allowed) if allowed else 1
        count = max(1, min(wanted, matrix.experts, ranks))
        borders = [k * matrix.experts // count for k in range(count + 1)]
        parts += [matrix.part(*pair) for pair in itertools.pairwise(borders)]
    return parts


def _in_rank_order(
    matrices: Sequence[Matrix], parts: Sequence[Matrix], owners: Sequence[int]
) -> tuple[tuple[Matrix, ...], tuple[int, ...]]:
    """Give every owner of a stack one range of experts, ascending with the owners.

    Experts of a stack cost the same, so only how many of them an owner got matters.
    """
    held: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for part, owner in zip(parts, owners, strict=True):
        held[part.name][owner] += part.experts
    rows = []
    for matrix in matrices:
        start = 0
        for owner, count in sorted(held[matrix.name].items()):
            rows.append((matrix.part(start, start + count), owner))
            start += count
    return tuple(matrix for matrix, _ in rows), tuple(owner for _, owner in rows)


def _choose_owners(matrices: Sequence[Matrix], ranks: int) -> list[int]:
    spread = _relieve(matrices, _assign(matrices, ranks, spread=True), ranks, keep_spread=True)
    packed = _relieve(matrices, _assign(matrices, ranks, spread=False), ranks, keep_spread=False)
    worst_spread = max(_loads(matrices, spread, ranks))
    worst_packed = max(_loads(matrices, packed, ranks))
    return spread if worst_spread <= SPREAD_TOLERANCE * worst_packed else packed


def _assign(matrices: Sequence[Matrix], ranks: int, *, spread: bool) -> list[int]:
    """Longest processing time first. Ranks wait in a heap by (load, elements, rank).

    `spread` takes the least loaded of the ranks that hold fewest of the unit's matrices, otherwise that number only
    decides between equal loads (common: equal layers).
    """
    order = sorted(range(len(matrices)), key=lambda i: (-matrices[i].cost, -matrices[i].numel, i))
    heap = [(0.0, 0, rank) for rank in range(ranks)]
    in_unit: Counter[tuple[str, int]] = Counter()
    unit_size: Counter[str] = Counter()
    owners = [0] * len(matrices)
    for index in order:
        matrix = matrices[index]
        fewest = unit_size[matrix.unit] // ranks if spread else 0
        passed: list[tuple[float, int, int]] = []
        chosen: tuple[float, int, int] | None = None
        while heap and chosen is None:
            entry = heapq.heappop(heap)
            if not spread and passed and entry[0] > passed[0][0]:
                heapq.heappush(heap, entry)
                break
            if in_unit[matrix.unit, entry[2]] <= fewest:
                chosen = entry
            else:
                passed.append(entry)
        if chosen is None:
            chosen = min(passed, key=lambda entry: (in_unit[matrix.unit, entry[2]], entry))
            passed.remove(chosen)
        for entry in passed:
            heapq.heappush(heap, entry)
        load, elements, owner = chosen
        owners[index] = owner
        in_unit[matrix.unit, owner] += 1
        unit_size[matrix.unit] += 1
        heapq.heappush(heap, (load + matrix.cost, elements + matrix.numel, owner))
    return owners


def _relieve(matrices: Sequence[Matrix], owners: list[int], ranks: int, *, keep_spread: bool) -> list[int]:
    """Lower the busiest rank's load by moving a matrix away or exchanging it for a cheaper one, while it can."""
    load = _loads(matrices, owners, ranks)
    held: list[list[tuple[float, int]]] = [[] for _ in range(ranks)]  # (cost, index), cheapest first
    in_unit: Counter[tuple[str, int]] = Counter()
    for index, owner in enumerate(owners):
        held[owner].append((matrices[index].cost, index))
        in_unit[matrices[index].unit, owner] += 1
    for row in held:
        row.sort()

    def fits(index: int, out: int | None, rank: int) -> bool:
        """Whether matrix `index` may join `rank`, which gives up `out`, without crowding its unit."""
        unit = matrices[index].unit
        here = in_unit[unit, rank] - (out is not None and matrices[out].unit == unit)
        return not keep_spread or here < max(1, in_unit[unit, owners[index]])

    for _ in range(len(matrices) + 4 * ranks):
        busiest = max(range(ranks), key=lambda rank: (load[rank], -rank))
        lightest = heapq.nsmallest(SEARCH_WIDTH, range(ranks), key=lambda rank: (load[rank], rank))
        step = _best_step(held, load, busiest, lightest, fits)
        if step is None:
            break
        target, given, taken = step
        moves: list[tuple[int | None, int, int]] = [(given, busiest, target), (taken, target, busiest)]
        for moved, source, goal in moves:
            if moved is None:
                continue
            cost, unit = matrices[moved].cost, matrices[moved].unit
            held[source].remove((cost, moved))
            held[goal].insert(bisect_left(held[goal], (cost, moved)), (cost, moved))
            load[source], load[goal] = load[source] - cost, load[goal] + cost
            in_unit[unit, source] -= 1
            in_unit[unit, goal] += 1
            owners[moved] = goal
    return owners


def _best_step(
    held: list[list[tuple[float, int]]],
    load: list[float],
    busiest: int,
    lightest: Sequence[int],
    fits: Callable[[int, int | None, int], bool],
) -> tuple[int, int, int | None] | None:
    """Return (rank, matrix given, matrix taken or None) that leaves the lower maximum of both ranks, if any helps."""
    best, found = load[busiest], None
    for rank in lightest:
        gap = load[busiest] - load[rank]
        if gap <= 0:
            break
        for cost, index in held[busiest]:
            # The exchange that evens the two out takes a matrix of this cost; look at its neighbours, and at none.
            middle = bisect_left(held[rank], (cost - gap / 2, -1))
            choices = [(0.0, None), *held[rank][max(0, middle - 2) : middle + 2]]
            for back, other in choices:
                worse = max(load[busiest] - cost + back, load[rank] + cost - back)
                improves = worse < best * (1 - 1e-9)
                if improves and fits(index, other, rank) and (other is None or fits(other, index, busiest)):
                    best, found = worse, (rank, index, other)
    return found


def _loads(matrices: Sequence[Matrix], owners: Sequence[int], ranks: int) -> list[float]:
    load = [0.0] * ranks
    for matrix, owner in zip(matrices, owners, strict=True):
        load[owner] += matrix.cost
    return load
