# SPDX-License-Identifier: Apache-2.0
"""Elements that a step moves for the Muon matrices. N shard ranks, R replicas, P_M elements of all Muon matrices."""

from __future__ import annotations

from fractions import Fraction

PASSES = {"z2": 2, "z3": 3}  # times that every matrix is on the wire: one reduce, and one or two broadcasts


def payload_elements(muon_elements: int, mode: str, micro_batches: int = 1) -> int:
    """Return the elements handed to the shard group's collectives per step.

    Broadcasts are repeated for every micro-batch (two each under Z3, one under Z2); the reduction is not, as long as
    the earlier micro-batches run without gradient synchronisation.
    """
    return (micro_batches * (PASSES[mode] - 1) + 1) * muon_elements


def wire_elements(muon_elements: int, mode: str, shard: int, replicate: int = 1) -> dict[str, int | float]:
    """Return the elements on the wire per rank and step, in the shard group and in the replicate group.

    `shard` is 2(N-1)/N P_M under Z2 and 3(N-1)/N P_M under Z3; `replicate` is 2(R-1)/R P_M, the gradients up to their
    owner and the weights down, counted over the N replicate groups of one replica.
    """
    return {
        "shard": _number(Fraction(PASSES[mode] * (shard - 1) * muon_elements, shard)),
        "replicate": _number(Fraction(2 * (replicate - 1) * muon_elements, replicate)),
    }


def naive_wire_elements(muon_elements: int, mode: str, shard: int) -> int | float:
    """Return the same for Muon that gathers every gradient on every rank: one pass more than with owners."""
    return _number(Fraction((PASSES[mode] + 1) * (shard - 1) * muon_elements, shard))


def _number(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)
