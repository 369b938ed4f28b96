# SPDX-License-Identifier: Apache-2.0
"""Bring every split matrix to its owner, orthogonalize it there, and hand the result back to who holds a piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...optim.functional import MuonOptions, adjust_scale
from ...orthogonalize import newton_schulz_many
from .layout import StepPlan, Unit

Read = Callable[[int, int, int], Tensor]  # (tensor, offset, numel) -> 1-D momentum update of this rank
Write = Callable[[int, int, Tensor], None]  # (tensor, offset, 1-D direction): move the weights along it


def run_plan(plan: StepPlan, read: Read, write: Write, options: MuonOptions, device: torch.device) -> None:
    """Orthogonalize every unit of `plan` once in the job and write the results where the pieces are. Collective.

    Args:
        plan: the same on all ranks of its process group but for `rank`.
        read: gives this rank's part of the momentum update, any device, float32.
        write: takes this rank's part of `adjust * NS(update)`, on `device`, float32.
        options: of the group.
        device: where Newton-Schulz and the exchange run.

    Note:
        On the wire: a matrix that lies on one rank costs nothing; one that N ranks share costs 2(N-1)/N of its
        elements per rank. In flight: one round, at most 256 MiB per owner unless one matrix is larger.
    """
    for units in plan.rounds:
        owned = _gather(plan, units, read, device)
        results = _orthogonalize([(unit, owned[i]) for i, unit in enumerate(units) if i in owned], options)
        directions = dict(zip(sorted(owned), results, strict=True))
        _hand_back(plan, units, directions, write, device)


def _gather(plan: StepPlan, units: Sequence[Unit], read: Read, device: torch.device) -> dict[int, Tensor]:
    """Return {place in `units`: whole update, 1-D} of the units that this rank owns."""
    whole = {i: torch.empty(u.numel, device=device) for i, u in enumerate(units) if u.owner == plan.rank}
    sends: list[list[Tensor]] = [[] for _ in range(plan.num_ranks)]
    wanted: list[list[Tensor]] = [[] for _ in range(plan.num_ranks)]
    crossing = False
    for index, unit in enumerate(units):
        for piece in unit.pieces:
            if plan.replicated and piece.rank != unit.owner:
                continue
            crossing = crossing or piece.rank != unit.owner
            target = whole[index].narrow(0, piece.start, piece.numel) if index in whole else None
            if piece.rank == plan.rank:
                part = read(unit.tensor, piece.offset, piece.numel).to(device)
                if target is not None:
                    target.copy_(part)
                else:
                    sends[unit.owner].append(part)
            elif target is not None:
                wanted[piece.rank].append(target)
    if crossing:
        _exchange(plan, sends, wanted, device)
    return whole


def _hand_back(
    plan: StepPlan, units: Sequence[Unit], directions: dict[int, Tensor], write: Write, device: torch.device
) -> None:
    """Write the pieces of this rank, its own and those that the owners send."""
    sends: list[list[Tensor]] = [[] for _ in range(plan.num_ranks)]
    wanted: list[list[Tensor]] = [[] for _ in range(plan.num_ranks)]
    places: list[tuple[int, int, Tensor]] = []
    crossing = False
    for index, unit in enumerate(units):
        for piece in unit.pieces:
            crossing = crossing or piece.rank != unit.owner
            if index in directions:
                part = directions[index].narrow(0, piece.start, piece.numel)
                if piece.rank == plan.rank:
                    write(unit.tensor, piece.offset, part)
                else:
                    sends[piece.rank].append(part)
            elif piece.rank == plan.rank:
                part = torch.empty(piece.numel, device=device)
                wanted[unit.owner].append(part)
                places.append((unit.tensor, piece.offset, part))
    if crossing:
        _exchange(plan, sends, wanted, device)
    for tensor, offset, part in places:
        write(tensor, offset, part)


def _exchange(
    plan: StepPlan, sends: Sequence[Sequence[Tensor]], wanted: Sequence[Sequence[Tensor]], device: torch.device
) -> None:
    """Fill the tensors of `wanted[rank]` with what each rank sends here: one all-to-all with uneven sizes."""
    out_sizes = [sum(part.numel() for part in parts) for parts in sends]
    in_sizes = [sum(part.numel() for part in parts) for parts in wanted]
    outgoing = [part for parts in sends for part in parts]
    buffer = torch.cat(outgoing) if outgoing else torch.empty(0, device=device)
    received = torch.empty(sum(in_sizes), device=device)
    dist.all_to_all_single(received, buffer, in_sizes, out_sizes, group=plan.process_group)
    arriving = [part for parts in wanted for part in parts]
    for target, source in zip(arriving, received.split([part.numel() for part in arriving]), strict=True):
        target.copy_(source)


def _orthogonalize(owned: Sequence[tuple[Unit, Tensor]], options: MuonOptions) -> list[Tensor]:
    """Return `adjust * NS(update)` of each unit as 1-D float32 in storage order."""
    updates = [update.view(unit.shape) for unit, update in owned]
    matrices = [unit.view.matrices(update) for (unit, _), update in zip(owned, updates, strict=True)]
    flat = newton_schulz_many([matrix for group in matrices for matrix in group], **options.newton_schulz)
    results, position = [], 0
    for (unit, _), update, group in zip(owned, updates, matrices, strict=True):
        scaled = [
            matrix * adjust_scale(options.adjust_lr_fn, matrix.shape[-2], matrix.shape[-1])
            for matrix in flat[position : position + len(group)]
        ]
        position += len(group)
        results.append(unit.view.assemble(scaled, like=update).reshape(-1))
    return results
