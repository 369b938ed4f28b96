# SPDX-License-Identifier: Apache-2.0
"""Seconds of collectives: from link rates for any number of ranks, or from a measurement at one number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Group:
    """Ranks that run a collective together.

    Args:
        ranks: how many.
        nodes: on how many machines.
        sharing: how many such groups use a machine's network at once.
    """

    ranks: int
    nodes: int = 1
    sharing: int = 1

    @classmethod
    def neighbours(cls, ranks: int, per_node: int) -> Group:
        """Return the group of `ranks` consecutive ranks: a shard group."""
        return cls(ranks, -(-ranks // per_node), max(1, per_node // ranks))

    @classmethod
    def spread(cls, ranks: int, stride: int, per_node: int) -> Group:
        """Return the group of every `stride`-th rank: a replicate group."""
        together = max(1, per_node // stride)
        return cls(ranks, -(-ranks // together), min(stride, per_node))


class Network(Protocol):
    """Anything that knows how long collectives take."""

    def seconds(self, kind: str, num_bytes: float, group: Group) -> tuple[float, float]:
        """Return (latency, transfer) of one collective.

        Args:
            kind: `all_gather`, `reduce_scatter`, `broadcast`, `reduce`, `all_reduce` or `all_to_all`.
            num_bytes: of the whole buffer; for `all_to_all` what the busiest rank sends or receives.
            group: who takes part.
        """


@dataclass(frozen=True)
class LinkNetwork:
    """Ring algorithms on two kinds of links, as NCCL runs all-gather, reduce-scatter, broadcast and reduce.

    A ring of N ranks on K machines moves B bytes in (N-1)/N B over the slowest link's rate, twice for an all-reduce,
    after N-1 hops: `launch + (N-K) intra_latency + (K-1) inter_latency`. Rings use all network cards of a machine
    together; an all-to-all only the rank's own share of them.

    Args:
        intra_bytes: bytes/s of one rank to others of its machine, in one direction.
        inter_bytes: bytes/s out of one machine, all network cards together.
        intra_latency: seconds of a hop inside a machine.
        inter_latency: seconds of a hop between machines.
        launch: seconds to start one collective.
        ranks_per_node: ranks of a machine.
    """

    intra_bytes: float
    inter_bytes: float
    intra_latency: float
    inter_latency: float
    launch: float
    ranks_per_node: int

    def seconds(self, kind: str, num_bytes: float, group: Group) -> tuple[float, float]:
        """Return (latency, transfer) of one collective."""
        ranks, nodes = group.ranks, group.nodes
        if ranks == 1:
            return 0.0, 0.0
        rate = self.intra_bytes
        if nodes > 1:
            sharing = self.ranks_per_node if kind == "all_to_all" else group.sharing
            rate = min(rate, self.inter_bytes / sharing)
        passes = 2 if kind == "all_reduce" else 1
        latency = (ranks - nodes) * self.intra_latency + (nodes - 1) * self.inter_latency
        return self.launch + passes * latency, passes * (ranks - 1) / ranks * num_bytes / rate


@dataclass(frozen=True)
class MeasuredNetwork:
    """A straight line through measured seconds per kind: right for the group it was measured on, and no other.

    Args:
        lines: (latency in seconds, seconds per byte of the buffer) by kind.
    """

    lines: Mapping[str, tuple[float, float]]

    def seconds(self, kind: str, num_bytes: float, group: Group) -> tuple[float, float]:
        """Return (latency, transfer) of one collective."""
        if group.ranks == 1:
            return 0.0, 0.0
        latency, per_byte = self.lines[kind]
        return latency, per_byte * num_bytes
