# SPDX-License-Identifier: Apache-2.0
"""One training step of each design, issued on a `Timeline` in the order of the real runtime.

Every rank computes the same passes and joins the same collectives; ranks differ in what they own alone. The first
all-gather of the next forward waits for the slowest owner, so the rank with most work in the optimizer step sets the
pace, and that one rank is simulated: exact where nothing else sets ranks apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..distributed.buckets import BucketLayout
from ..distributed.ownership import OwnershipPlan
from ..distributed.runtime import MAX_REDUCTIONS_IN_FLIGHT
from .devices import SimulatedDevice
from .network import Group, Network
from .timeline import Timeline
from .workload import UnitLoad, Workload, unit_buckets

MASTER = 4  # bytes of an element of weights, gradients and states at rest
# Bytes that an elementwise step moves per element, in float32. AdamW: weight, gradient and both moments read, weight
# and moments written. Muon: on the local part momentum 12, its look-ahead 12, decay 8, update 12; on whole matrices
# the norm 4, the scaled copy 6, the result and its scale 14.
ADAMW_BYTES, MUON_LOCAL_BYTES, MUON_WHOLE_BYTES = 28, 44, 24
SHARD, REPLICATE = "shard", "replicate"


@dataclass(frozen=True)
class Setting:
    """What all designs share.

    Args:
        workload: model and batch.
        device: rates.
        network: seconds of collectives.
        compute_bytes: of an element of gathered weights.
        reduce_bytes: of an element of gradients on the wire.
        checkpointing: layers are computed again in backward.
        grouped: the broadcasts (or reductions) of a unit are one launch and share one latency.
    """

    workload: Workload
    device: SimulatedDevice
    network: Network
    compute_bytes: int = 2
    reduce_bytes: int = 2
    checkpointing: bool = True
    grouped: bool = False


class Step:
    """AdamW under FSDP2 with `reshard_after_forward`; subclasses change what Muon changes.

    Args:
        setting: what all designs share.
        owners: the plan of the design's grid; without owners only its axes count.
    """

    keeps_gathered = False  # from forward to backward (Z2)
    has_owners = False

    def __init__(self, setting: Setting, owners: OwnershipPlan) -> None:
        self.setting, self.owners = setting, owners
        self.load, self.device = setting.workload, setting.device
        per_node = self.device.ranks_per_node
        self.shard = Group.neighbours(owners.shard, per_node)
        self.replicate = Group.spread(owners.replicate, owners.shard, per_node)
        self.time = Timeline(overlaps=self.device.overlaps)
        self.wire: dict[str, float] = defaultdict(float)
        self._last_scatter = 0.0
        self._scattered: list[float] = []
        self._gathered: dict[str, float] = {}
        self._packed: set[str] = set()

    def run(self) -> None:
        """Issue forward, backward and optimizer step."""
        self.forward()
        self.backward()
        self.optimizer()

    # ------------------------------------------------------------------ passes

    def forward(self) -> None:
        """Gather one unit ahead of computation."""
        root, layers = self.load.root, self.load.layers
        self._fetch(root)
        self._take(root)
        for unit, following in zip((root, *layers), (*layers, None), strict=True):
            if unit is not root:
                self._fetch(unit)
                self._take(unit)
            if following is not None:
                self._fetch(following)
            if unit is not root:
                self._passes(unit.forward_flops)
                if not self.keeps_gathered:
                    del self._gathered[unit.name]
        self._passes(root.forward_flops)

    def backward(self) -> None:
        """Gather one unit ahead, reduce behind."""
        layers = self.load.layers[::-1]
        for unit, following in zip((self.load.root, *layers), (*layers, None), strict=True):
            self._take(unit)
            if following is not None:
                self._fetch(following)
            recomputed = self.setting.checkpointing and unit is not self.load.root
            self._passes(unit.forward_flops * (3 if recomputed else 2))
            if unit is not self.load.root:
                self.reduce(unit)
        self.reduce(self.load.root)
        self.finish_reductions()
        self._gathered.clear()

    def optimizer(self) -> None:
        """Run AdamW on this rank's shard."""
        self._elementwise(ADAMW_BYTES * (self.load.muon + self.load.rest) / self.shard.ranks)

    def _fetch(self, unit: UnitLoad) -> None:
        if unit.name not in self._gathered:
            self._gathered[unit.name] = self.gather(unit)
            self._packed.add(unit.name)

    def _take(self, unit: UnitLoad) -> None:
        self.time.wait(self._gathered[unit.name])
        if unit.name in self._packed:
            self._packed.remove(unit.name)
            self._copies(2 * self.setting.compute_bytes * self.all_gathered(unit))

    # ------------------------------------------------------------------ collectives of a unit

    def gather(self, unit: UnitLoad) -> float:
        """Start to gather a unit; return when it is there."""
        return self._all_gather(unit.muon, unit.rest)

    def all_gathered(self, unit: UnitLoad) -> int:
        """Return the elements that are copied from a buffer into parameters; owned matrices stay where they are."""
        return unit.muon + unit.rest

    def reduce(self, unit: UnitLoad) -> None:
        """Start to reduce a unit's gradients."""
        self._reduce_scatter(unit.muon, unit.rest)

    def finish_reductions(self) -> None:
        """Wait for all of them."""
        for end in self._scattered:
            self.time.wait(end)
        self._scattered.clear()

    def _all_gather(self, muon: int, rest: int) -> float:
        elements, width = muon + rest, self.setting.compute_bytes
        if not elements:
            return self.time.now
        self._side_copies((MASTER + width) * elements / self.shard.ranks)
        end = self._send("all_gather", SHARD, self.shard, width * elements)
        self._count(SHARD, muon)
        return end

    def _reduce_scatter(self, muon: int, rest: int) -> None:
        elements, width = muon + rest, self.setting.reduce_bytes
        if not elements:
            return
        self.time.wait(self._last_scatter)  # FSDP2 lets one reduction at a time hold memory
        self._copies((self.setting.compute_bytes + width) * elements)
        end = self._send("reduce_scatter", SHARD, self.shard, width * elements)
        self._last_scatter = end
        self._count(SHARD, muon)
        if self.replicate.ranks > 1:
            end = self._all_reduce(width * elements / self.shard.ranks, end)
            self._count(REPLICATE, 2 * muon)
        self._scattered.append(end)

    def _all_reduce(self, num_bytes: float, after: float) -> float:
        """Sum one rank's shard over the replicas: all replicate groups do the same at once, one stands for all."""
        return self._send("all_reduce", REPLICATE, self.replicate, num_bytes, (after,))

    def _send(
        self,
        kind: str,
        lane: str,
        group: Group,
        num_bytes: float,
        after: Sequence[float] = (),
        *,
        share: float = 1.0,
        joins: bool = False,
    ) -> float:
        latency, transfer = self.setting.network.seconds(kind, num_bytes, group)
        if group.ranks == 1:
            return max(self.time.now, *after, 0.0)
        return self.time.send(lane, 0.0 if joins else latency, transfer, after, share=share)

    def _count(self, axis: str, elements: float) -> None:
        ranks = (self.shard if axis == SHARD else self.replicate).ranks
        self.wire[axis] += (ranks - 1) / ranks * elements

    # ------------------------------------------------------------------ computation

    def _passes(self, flops: float) -> None:
        self.time.compute("passes", flops / (self.device.pass_share * self.device.product_flops))

    def _elementwise(self, num_bytes: float) -> None:
        self.time.compute("elementwise", num_bytes / self.device.memory_bytes)

    def _copies(self, num_bytes: float) -> None:
        self.time.compute("copies", num_bytes / self.device.memory_bytes)

    def _side_copies(self, num_bytes: float) -> None:
        """Copies on the communication stream: on the compute lane only where that does both."""
        if not self.device.overlaps:
            self._copies(num_bytes)

    @cached_property
    def seconds_of(self) -> dict[str, float]:
        """Seconds to orthogonalize each parameter whole, by name."""
        return {name: self.device.orthogonalize_seconds(parts) for name, parts in self.load.parts.items()}

    @cached_property
    def owned_seconds(self) -> list[float]:
        """Newton-Schulz seconds of every rank under the owner plan."""
        experts: dict[str, int] = defaultdict(int)
        for matrix in self.owners.matrices:
            experts[matrix.name] += matrix.experts
        totals = [0.0] * self.owners.num_ranks
        for matrix, owner in zip(self.owners.matrices, self.owners.owners, strict=True):
            totals[owner] += self.seconds_of[matrix.name] * matrix.experts / experts[matrix.name]
        return totals

    @cached_property
    def slowest(self) -> int:
        """The rank whose optimizer step takes longest."""
        whole = (MUON_LOCAL_BYTES + MUON_WHOLE_BYTES) / self.device.memory_bytes
        totals = [a + whole * b for a, b in zip(self.owned_seconds, self.owners.elements_per_rank(), strict=True)]
        return totals.index(max(totals))


class GatheredMuon(Step):
    """Muon without owners (`dmuon=off`): every rank gathers every gradient and orthogonalizes every matrix."""

    def optimizer(self) -> None:
        """Gather and orthogonalize one matrix after the other."""
        ranks = self.shard.ranks
        self._elementwise((ADAMW_BYTES * self.load.rest + MUON_LOCAL_BYTES * self.load.muon) / ranks)
        elements: dict[str, int] = defaultdict(int)
        for matrix in self.owners.matrices:
            elements[matrix.name] += matrix.numel
        for name, count in elements.items():
            self.time.wait(self._send("all_gather", SHARD, self.shard, MASTER * count))
            self._count(SHARD, count)
            self._elementwise(MUON_WHOLE_BYTES * count)
            self.time.compute("newton_schulz", self.seconds_of[name])


class AllToAllMuon(Step):
    """Muon on even shards: in the step each matrix goes to one rank and back, one round ahead of Newton-Schulz.

    A round takes one matrix of each rank, of the same plan as with owners, in the compute dtype.
    """

    def optimizer(self) -> None:
        """Send, orthogonalize, send back."""
        ranks, mine = self.shard.ranks, self.owners.matrices_of(self.slowest)
        self._elementwise((ADAMW_BYTES * self.load.rest + MUON_LOCAL_BYTES * self.load.muon) / ranks)
        self._count(SHARD, 2 * self.load.muon / ranks)
        arrives = self._exchange(mine[0].numel) if mine else 0.0
        for index, matrix in enumerate(mine):
            self.time.wait(arrives)
            if index + 1 < len(mine):
                arrives = self._exchange(mine[index + 1].numel)
            self._elementwise(MUON_WHOLE_BYTES * matrix.numel)
            # Its share of the rank's seconds: exact for whole matrices, by elements for parts of a stack.
            whole = sum(m.numel for m in self.owners.matrices if m.name == matrix.name)
            self.time.compute("newton_schulz", self.seconds_of[matrix.name] * matrix.numel / whole)
            returned = self._exchange(matrix.numel)
            if index + 1 == len(mine):
                self.time.wait(returned)

    def _exchange(self, elements: int) -> float:
        return self._send("all_to_all", SHARD, self.shard, self.setting.compute_bytes * elements)


class OwnedMuon(Step):
    """DMuon-Z3: units are broadcast from owners and reduced to them, and nothing is sent in the optimizer step."""

    has_owners = True

    def __init__(self, setting: Setting, owners: OwnershipPlan) -> None:
        super().__init__(setting, owners)
        self._buckets = unit_buckets(owners)
        self._published: dict[str, float] = {}
        self._in_flight: list[tuple[UnitLoad, list[float]]] = []

    def forward(self) -> None:
        """Publish to replicas, all units at once; the broadcasts of a unit wait for its publication alone."""
        self._published = {unit: self._replicate("broadcast", unit) for unit in self._buckets}
        super().forward()

    def gather(self, unit: UnitLoad) -> float:
        """All-gather the rest; broadcast bucket by bucket."""
        end = self._all_gather(0, unit.rest)
        width, buckets = self.setting.compute_bytes, self._buckets.get(unit.name, ())
        if not buckets:
            return end
        self._side_copies((MASTER + width) * unit.muon / self.shard.ranks)
        published = (self._published[unit.name],)
        for index, bucket in enumerate(buckets):
            joins = self.setting.grouped and index > 0
            size = width * bucket.numel
            end = max(end, self._send("broadcast", SHARD, self.shard, size, published, joins=joins))
            self._count(SHARD, bucket.numel)
        return end

    def all_gathered(self, unit: UnitLoad) -> int:
        """Return the elements of the rest."""
        return unit.rest

    def reduce(self, unit: UnitLoad) -> None:
        """Reduce-scatter the rest; reduce each bucket to its owner, a few units at a time."""
        self._reduce_scatter(0, unit.rest)
        buckets, width = self._buckets.get(unit.name, ()), self.setting.reduce_bytes
        if not buckets:
            return
        self._copies((self.setting.compute_bytes + width) * unit.muon)
        ends = []
        for index, bucket in enumerate(buckets):
            joins = self.setting.grouped and index > 0
            ends.append(self._send("reduce", SHARD, self.shard, width * bucket.numel, joins=joins))
            self._count(SHARD, bucket.numel)
        self._in_flight.append((unit, ends))
        while len(self._in_flight) > MAX_REDUCTIONS_IN_FLIGHT:
            self._finish_oldest()

    def finish_reductions(self) -> None:
        """Wait for the owned and the other gradients."""
        while self._in_flight:
            self._finish_oldest()
        super().finish_reductions()

    def optimizer(self) -> None:
        """Run the work of the busiest owner and this rank's shard of the rest."""
        owned = self.owners.elements_per_rank()[self.slowest]
        self._elementwise(
            ADAMW_BYTES * self.load.rest / self.shard.ranks + (MUON_LOCAL_BYTES + MUON_WHOLE_BYTES) * owned
        )
        self.time.compute("newton_schulz", self.owned_seconds[self.slowest])

    def _finish_oldest(self) -> None:
        unit, ends = self._in_flight.pop(0)
        for end in ends:
            self.time.wait(end)
        self.time.wait(self._replicate("reduce", unit.name))

    def _replicate(self, kind: str, unit: str) -> float:
        """Send a unit's buckets along the replicate groups; return when the last group is done.

        Each shard index has a group of its own and they work at once. Under `reduce` every segment is followed by a
        few flags, a collective of their own.
        """
        end = self.time.now
        if self.replicate.ranks == 1:
            return end
        width = self.setting.compute_bytes if kind == "broadcast" else self.setting.reduce_bytes
        share, used = 1 / self.shard.ranks, set()
        for bucket in self._buckets[unit]:
            lane = f"{REPLICATE} {bucket.shard_index}"
            for elements in _segment_sizes(bucket):
                joins = self.setting.grouped and lane in used
                used.add(lane)
                end = max(end, self._send(kind, lane, self.replicate, width * elements, share=share, joins=joins))
                if kind == "reduce" and not self.setting.grouped:
                    end = max(end, self._send(kind, lane, self.replicate, 0, share=share))
                self._count(REPLICATE, elements)
        return end

    def _all_reduce(self, num_bytes: float, after: float) -> float:
        share, group = 1 / self.shard.ranks, self.replicate
        lanes = [f"{REPLICATE} {index}" for index in range(self.shard.ranks)]
        return max(self._send("all_reduce", lane, group, num_bytes, (after,), share=share) for lane in lanes)


class KeptMuon(OwnedMuon):
    """DMuon-Z2: gathered copies stay from forward to backward."""

    keeps_gathered = True


def _segment_sizes(bucket: BucketLayout) -> list[int]:
    return [segment.end - segment.start for segment in bucket.segments]
