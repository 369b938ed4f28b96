# SPDX-License-Identifier: Apache-2.0
"""The Muon update as a function on matrices: momentum, orthogonalization, decay, step.

Shapes: a parameter holds one or more matrices of (..., M, N), M the output dimension; its `MatrixView` says how.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..orthogonalize import newton_schulz_many
from ..param_groups.views import MatrixView
from .tensor_layout import local_part, local_tensor, needs_gather, whole_matrix

MAX_BATCH_BYTES = 256 * 2**20  # of float32 updates alive at once; one larger parameter is a batch of its own


@dataclass(frozen=True)
class MuonOptions:
    """Options of one Muon group for one step; plain numbers, read from the group just before the update."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_method: str
    ns_steps: int
    ns_coefficients: str | tuple[tuple[float, float, float], ...]
    ns_dtype: str
    adjust_lr_fn: str

    @classmethod
    def from_group(cls, group: dict[str, Any]) -> MuonOptions:
        """Read the options out of a parameter group; a one-element tensor `lr` becomes a float."""
        values = {name: group[name] for name in cls.__dataclass_fields__}
        values["lr"], values["weight_decay"] = float(values["lr"]), float(values["weight_decay"])
        return cls(**values)


@dataclass(frozen=True)
class MuonEntry:
    """One parameter of a step: `param`, `grad` and `momentum` in the same layout, and its view."""

    param: Tensor
    grad: Tensor
    momentum: Tensor
    view: MatrixView


def adjust_scale(adjust_lr_fn: str, m: int, n: int) -> float:
    """Return the factor on the learning rate for an (m, n) matrix, m the output dimension.

    `match_rms_adamw`: 0.2 sqrt(max(m, n)), the RMS of AdamW's step; `original`: sqrt(max(1, m/n)); `none`: 1.
    """
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, m / n)) if n else 1.0
    return 1.0


@torch.no_grad()
def muon_update_(
    entries: Sequence[MuonEntry],
    options: MuonOptions,
    *,
    skip: Tensor | None = None,
    max_batch_bytes: int = MAX_BATCH_BYTES,
    squares: list[Tensor] | None = None,
) -> None:
    """Update momenta and parameters in place by one Muon step.

    Per matrix: `B = lerp(B, G, 1-momentum)`; `U = lerp(G, B, momentum)` with `nesterov`, else `B`; `O = NS(U)`;
    `W = W (1 - lr*weight_decay) - lr*adjust(M, N)*O`. Collective for sharded DTensors that are not owned, which
    are gathered whole: every rank must pass the same entries in the same order.

    Args:
        entries: parameters with a gradient; owned parameters whose matrix is on another rank are passed over.
        options: of the group.
        skip: 0-dim bool tensor; where true nothing changes, to the bit. Lets CUDA skip without asking the host.
        max_batch_bytes: bound on the float32 updates held at once.
        squares: when given, the sum of squares of each applied step (decay aside) is appended.

    Note:
        bf16 and fp16 parameters are updated in float32 and rounded once. Beyond the state the peak is one batch of
        updates, its orthogonalized copy, and what Newton-Schulz needs.
    """
    for batch in _batches(entries, max_batch_bytes):
        updates = [_momentum_update_(entry, options, skip) for entry in batch]
        matrices = [entry.view.matrices(update) for entry, update in zip(batch, updates, strict=True)]
        flat = newton_schulz_many(
            [matrix for group in matrices for matrix in group],
            method=options.ns_method,
            steps=options.ns_steps,
            coefficients=options.ns_coefficients,
            dtype=options.ns_dtype,
        )
        position = 0
        for entry, update, group in zip(batch, updates, matrices, strict=True):
            orthogonal = flat[position : position + len(group)]
            flat[position : position + len(group)] = []  # lets each result go as soon as it is applied
            _apply_(entry, orthogonal, update, options, skip, squares)


def _batches(entries: Iterable[MuonEntry], limit: int) -> Iterator[list[MuonEntry]]:
    """Yield entries with equal matrix shapes next to each other, as many per batch as `limit` bytes allow."""
    by_shape: dict[Any, list[MuonEntry]] = {}
    for entry in entries:
        held = entry.param if needs_gather(entry.param) else local_tensor(entry.param)
        if held.numel() == 0:
            continue
        key = (entry.param.device, held.numel(), _matrix_shapes(entry.view, tuple(held.shape)))
        by_shape.setdefault(key, []).append(entry)
    for (_, numel, _), group in by_shape.items():
        per_batch = max(1, limit // (4 * numel))
        for start in range(0, len(group), per_batch):
            yield group[start : start + per_batch]


@functools.cache
def _matrix_shapes(view: MatrixView, shape: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    return tuple(view.matrix_shapes(shape))


def _momentum_update_(entry: MuonEntry, options: MuonOptions, skip: Tensor | None) -> Tensor:
    """Fold the gradient into the momentum and return the whole update in the momentum's dtype."""
    momentum = local_tensor(entry.momentum)
    grad = local_tensor(entry.grad).to(momentum.dtype)
    if skip is None:
        momentum.lerp_(grad, 1.0 - options.momentum)
    else:
        skip = skip.to(momentum.device)
        grad = torch.where(skip, torch.zeros((), dtype=grad.dtype, device=grad.device), grad)
        # A weight of exactly zero leaves the momentum as it is; the other value is what the host path uses.
        weight = torch.full((), 1.0 - options.momentum, dtype=momentum.dtype, device=momentum.device)
        momentum.lerp_(grad, weight.masked_fill(skip, 0.0))
    update = torch.lerp(grad, momentum, options.momentum) if options.nesterov else momentum
    return whole_matrix(update, entry.param)


def _apply_(
    entry: MuonEntry,
    orthogonal: list[Tensor],
    update: Tensor,
    options: MuonOptions,
    skip: Tensor | None,
    squares: list[Tensor] | None,
) -> None:
    """Decay the parameter and move it along the orthogonalized matrices."""
    scales = [adjust_scale(options.adjust_lr_fn, matrix.shape[-2], matrix.shape[-1]) for matrix in orthogonal]
    if len(set(scales)) > 1:  # a fused parameter whose parts differ in shape
        orthogonal = [matrix * scale for matrix, scale in zip(orthogonal, scales, strict=True)]
        scales = [1.0]
    direction = entry.view.assemble(orthogonal, like=update)
    if needs_gather(entry.param):
        direction = local_part(direction, entry.param)
    alpha, decay = -options.lr * scales[0], 1.0 - options.lr * options.weight_decay
    target = local_tensor(entry.param)
    weight = target if target.dtype == direction.dtype else target.to(direction.dtype)
    if skip is None:
        weight.mul_(decay)
    else:
        skip = skip.to(weight.device)
        weight.mul_(torch.full((), decay, dtype=weight.dtype, device=weight.device).masked_fill(skip, 1.0))
        direction = direction * (~skip).to(direction.dtype)
    weight.add_(direction, alpha=alpha)
    if weight is not target:
        target.copy_(weight)
    if squares is not None:
        dtype = torch.promote_types(direction.dtype, torch.float32)
        squares.append(torch.linalg.vector_norm(direction, dtype=dtype).mul(alpha).square())
