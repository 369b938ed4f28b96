# SPDX-License-Identifier: Apache-2.0
"""One comparison at attach: ranks that would run different collectives raise together instead of hanging later."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from .collectives import Communicator
from .ownership import OwnershipPlan

_FORMAT = "<32sqq??"


@dataclass(frozen=True)
class RankReport:
    """What one rank says at attach."""

    digest: bytes
    num_matrices: int
    num_elements: int
    has_values: bool  # the matrices are not on the meta device
    has_failed: bool  # it raised while planning


def compare_ranks(comm: Communicator, plan: OwnershipPlan | None, has_values: bool) -> list[RankReport]:
    """Exchange plan digests; return every rank's report, in grid order. Collective.

    Args:
        comm: the communicator.
        plan: this rank's plan; None when making it failed (the other ranks then raise too).
        has_values: whether this rank has the weights.

    Raises:
        RuntimeError: on every rank, when any plan differs or any rank failed. Names the ranks.
    """
    elements = 0 if plan is None else sum(m.numel for m in plan.matrices)
    digest = bytes(32) if plan is None else plan.digest()
    count = 0 if plan is None else len(plan.matrices)
    packed = struct.pack(_FORMAT, digest, count, elements, has_values, plan is None)
    payload = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    rows = comm.gather_bytes(payload)
    reports = [RankReport(*struct.unpack(_FORMAT, bytes(row.cpu().tolist()))) for row in rows]
    failed = [comm.grid.global_rank(i) for i, report in enumerate(reports) if report.has_failed]
    if failed:
        raise RuntimeError(f"ranks must all be able to dedicate parameters; ranks {failed} failed. See their errors.")
    groups: dict[bytes, list[int]] = {}
    for index, report in enumerate(reports):
        groups.setdefault(report.digest, []).append(index)
    if len(groups) > 1:
        parts = []
        for members in groups.values():
            report = reports[members[0]]
            ranks = [comm.grid.global_rank(i) for i in members]
            parts.append(f"ranks {ranks}: {report.num_matrices} matrices of {report.num_elements} elements")
        raise RuntimeError(
            f"ownership plan must be the same on every rank; got {len(groups)} plans ({'; '.join(parts)}). "
            "Check that model, predicate, parameter order, dtypes and rates agree."
        )
    return reports
