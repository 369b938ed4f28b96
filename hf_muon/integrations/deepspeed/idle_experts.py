# SPDX-License-Identifier: Apache-2.0
"""Experts without a token: no rank need hold the whole gradient of one, so all that hold a piece agree it is zero."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.distributed as dist

from .exchange import Read
from .layout import Piece, StepPlan


def leave_out_idle(plan: StepPlan, gradient: Read, device: torch.device) -> tuple[StepPlan, dict[int, list[Piece]]]:
    """Return the plan without the experts whose gradient is exactly zero, and where those lie on this rank.

    Collective over the plan's ranks where it has experts: one number each. Waits for the device then.

    Args:
        plan: the same on all of its ranks but for `rank`.
        gradient: gives this rank's part of the reduced gradients.
        device: where collectives work.

    Returns:
        The plan, and pieces by tensor: nothing of them may change in this step, decay and momentum included.
    """
    experts = [unit for units in plan.rounds for unit in units if unit.is_expert]
    if not experts:
        return plan, {}
    mine = [[piece for piece in unit.pieces if piece.rank == plan.rank] for unit in experts]
    used = torch.zeros(len(experts), device=device)
    for place, (unit, pieces) in enumerate(zip(experts, mine, strict=True)):
        for piece in pieces:
            used[place] += gradient(unit.tensor, piece.offset, piece.numel).any().to(device)
    if plan.num_ranks > 1 and not plan.replicated:
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=plan.process_group)
    idle: dict[int, list[Piece]] = {}
    gone = set()
    for unit, pieces, count in zip(experts, mine, used.tolist(), strict=True):
        if count == 0:
            gone.add(id(unit))
            idle.setdefault(unit.tensor, []).extend(pieces)
    rounds = tuple(tuple(unit for unit in units if id(unit) not in gone) for units in plan.rounds)
    return (replace(plan, rounds=rounds) if gone else plan), idle


def runs_between(numel: int, idle: Iterable[Piece]) -> list[tuple[int, int]]:
    """Return (start, number) of the runs of a flat tensor of `numel` elements that lie between idle pieces."""
    runs, start = [], 0
    for piece in sorted(idle, key=lambda piece: piece.offset):
        if piece.offset > start:
            runs.append((start, piece.offset - start))
        start = piece.offset + piece.numel
    return [*runs, (start, numel - start)] if start < numel else runs
