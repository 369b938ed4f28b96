# SPDX-License-Identifier: Apache-2.0
"""The Muon update as a function on matrices: momentum, orthogonalization, decay, step.

Shapes: a parameter holds one or more matrices of (..., M, N), M the output dimension; its `MatrixView` says how.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..orthogonalize import newton_schulz_many
from ..param_groups.views import MatrixView
from .momentum_storage import MomentumStore
from .normuon import normalize_rows_
from .rounding import Rounding
from .tensor_layout import local_part, local_tensor, needs_gather, whole_matrix

# Of float32 updates alive at once; one larger parameter is a batch of its own. A CPU gains from what its caches hold.
MAX_BATCH_BYTES = 128 * 2**20
CPU_BATCH_BYTES = 4 * 2**20


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

    @property
    def newton_schulz(self) -> dict[str, Any]:
        """Return the keyword arguments of `newton_schulz` and `newton_schulz_many`."""
        return {
            "method": self.ns_method,
            "steps": self.ns_steps,
            "coefficients": self.ns_coefficients,
            "dtype": self.ns_dtype,
        }


@dataclass(frozen=True)
class MuonEntry:
    """One parameter of a step: `param` and `grad` in the same layout, `momentum` too (where it rests), and its view.

    Of a `routed` view, an expert whose slice of the gradient is exactly zero (no token reached it) is left as it is,
    like a parameter without gradient: no decay, no update, its momentum kept. `name` seeds random bits; `rows` are
    NorMuon's statistics in storage layout, `scales` those of a momentum that rests as codes.
    """

    param: Tensor
    grad: Tensor
    momentum: Tensor
    view: MatrixView
    name: str = ""
    rows: Tensor | None = None
    scales: Tensor | None = None


@dataclass(frozen=True)
class StepVariants:
    """What a step does beyond plain Muon; the default is plain Muon.

    Attributes:
        momentum: where momenta rest.
        rounding: random bits for bfloat16 weights; None rounds to nearest.
        normuon_beta2: decay of NorMuon's row statistics; None leaves rows as they are.
        observe: called with each entry, its update and its orthogonalized matrices, before they are applied.
    """

    momentum: MomentumStore = field(default_factory=MomentumStore)
    rounding: Rounding | None = None
    normuon_beta2: float | None = None
    observe: Callable[[MuonEntry, Tensor, Sequence[Tensor]], None] | None = None


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
    max_batch_bytes: int | None = None,
    squares: list[Tensor] | None = None,
    variants: StepVariants | None = None,
) -> None:
    """Update momenta and parameters in place by one Muon step.

    Per matrix: `B = lerp(B, G, 1-momentum)`; `U = lerp(G, B, momentum)` with `nesterov`, else `B`; `O = NS(U)`;
    `W = W (1 - lr*weight_decay) - lr*adjust(M, N)*O`. Collective for sharded DTensors that are not owned, which
    are gathered whole: every rank must pass the same entries in the same order.

    Args:
        entries: parameters with a gradient; owned parameters whose matrix is on another rank are passed over.
        options: of the group.
        skip: 0-dim bool tensor; where true nothing changes, to the bit. Lets CUDA skip without asking the host.
        max_batch_bytes: bound on the float32 updates held at once; None takes one that suits the device.
        squares: when given, the sum of squares of each applied step (decay aside) is appended.
        variants: what to do beyond plain Muon.

    Note:
        bf16 and fp16 parameters are updated in float32 and rounded once. Momentum that rests elsewhere is fetched one
        batch ahead, beside the products of the batch before. Beyond the state the peak is one batch of updates and
        what Newton-Schulz needs for one stack; without `nesterov`, or where somebody looks on, its results too.
    """
    variants = variants or StepVariants()
    batches = list(_batches(entries, max_batch_bytes))
    variants.momentum.fetch(batches[0] if batches else [])
    for index, batch in enumerate(batches):
        idle = [_untouched(entry, skip) for entry in batch]
        masks = [_mask_here(entry, mask) for entry, mask in zip(batch, idle, strict=True)]
        updates = [
            _momentum_update_(entry, options, mask, variants.momentum)
            for entry, mask in zip(batch, masks, strict=True)
        ]
        variants.momentum.fetch(batches[index + 1] if index + 1 < len(batches) else [])
        matrices = [entry.view.matrices(update) for entry, update in zip(batch, updates, strict=True)]
        flat = newton_schulz_many(
            [matrix for group in matrices for matrix in group],
            **options.newton_schulz,
            in_place=options.nesterov and variants.observe is None,  # else the update is the momentum, or is looked at
        )
        position = 0
        for place, (entry, update, group) in enumerate(zip(batch, updates, matrices, strict=True)):
            orthogonal = flat[position : position + len(group)]
            flat[position : position + len(group)] = []  # lets each result go as soon as it is applied
            if variants.observe is not None:
                variants.observe(entry, update, orthogonal)
            if variants.normuon_beta2 is not None and entry.rows is not None:
                rows = local_tensor(entry.rows)
                orthogonal = normalize_rows_(orthogonal, rows, entry.view, variants.normuon_beta2, idle[place])
            _apply_(entry, orthogonal, update, options, masks[place], squares, variants.rounding)


def _batches(entries: Iterable[MuonEntry], limit: int | None) -> Iterator[list[MuonEntry]]:
    """Yield entries with equal matrix shapes next to each other, as many per batch as `limit` bytes allow."""
    by_shape: dict[Any, list[MuonEntry]] = {}
    for entry in entries:
        held = entry.param if needs_gather(entry.param) else local_tensor(entry.param)
        if held.numel() == 0:
            continue
        key = (entry.param.device, held.numel(), _matrix_shapes(entry.view, tuple(held.shape)))
        by_shape.setdefault(key, []).append(entry)
    for (device, numel, _), group in by_shape.items():
        fitting = CPU_BATCH_BYTES if device.type == "cpu" else MAX_BATCH_BYTES
        per_batch = max(1, (fitting if limit is None else limit) // (4 * numel))
        for start in range(0, len(group), per_batch):
            yield group[start : start + per_batch]


@functools.cache
def _matrix_shapes(view: MatrixView, shape: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    return tuple(view.matrix_shapes(shape))


def _untouched(entry: MuonEntry, skip: Tensor | None) -> Tensor | None:
    """Return where nothing may change: `skip`, and the experts without a token.

    Returns:
        None, or a bool tensor that broadcasts to the whole parameter. Collective where the parameter is gathered.
    """
    if not entry.view.routed:
        return skip
    idle = ~entry.view.per_matrix(whole_matrix(local_tensor(entry.grad) != 0, entry.param))
    return idle if skip is None else idle | skip.to(idle.device)


def _mask_here(entry: MuonEntry, mask: Tensor | None) -> Tensor | None:
    """Return what `mask` means for this rank's part: shards may cut an expert, or the rows of one."""
    if mask is None or mask.ndim == 0 or not needs_gather(entry.param):
        return mask
    return local_part(mask.expand(entry.param.shape).contiguous(), entry.param)


def _momentum_update_(entry: MuonEntry, options: MuonOptions, skip: Tensor | None, store: MomentumStore) -> Tensor:
    """Fold the gradient into the momentum and return the whole update in the dtype that the momentum is worked in."""
    momentum = store.take(entry)
    grad = local_tensor(entry.grad).to(momentum.dtype)
    if skip is None:
        momentum.lerp_(grad, 1.0 - options.momentum)
    else:
        skip = skip.to(momentum.device)
        grad = torch.where(skip, torch.zeros((), dtype=grad.dtype, device=grad.device), grad)
        # A weight of exactly zero leaves the momentum as it is; the other value is what the host path uses.
        weight = torch.full(skip.shape, 1.0 - options.momentum, dtype=momentum.dtype, device=momentum.device)
        momentum.lerp_(grad, weight.masked_fill_(skip, 0.0))
    update = torch.lerp(grad, momentum, options.momentum) if options.nesterov else momentum
    store.put(entry, momentum)
    return whole_matrix(update, entry.param)


def _apply_(
    entry: MuonEntry,
    orthogonal: list[Tensor],
    update: Tensor,
    options: MuonOptions,
    skip: Tensor | None,
    squares: list[Tensor] | None,
    rounding: Rounding | None,
) -> None:
    """Decay the parameter and move it along the orthogonalized matrices."""
    for matrix in orthogonal:  # scaled before they are put together: a part moves as it would on its own, to the bit
        matrix.mul_(adjust_scale(options.adjust_lr_fn, matrix.shape[-2], matrix.shape[-1]))
    direction = entry.view.assemble(orthogonal, like=update)
    if needs_gather(entry.param):
        direction = local_part(direction, entry.param)
    alpha, decay = -options.lr, 1.0 - options.lr * options.weight_decay
    target = local_tensor(entry.param)
    wide = torch.promote_types(target.dtype, direction.dtype)  # float64 weights keep their digits
    weight = target if target.dtype == wide else target.to(wide)
    if skip is None:
        weight.mul_(decay)
    else:
        skip = skip.to(weight.device)
        weight.mul_(torch.full(skip.shape, decay, dtype=weight.dtype, device=weight.device).masked_fill_(skip, 1.0))
        direction.mul_((~skip).to(direction.dtype))
    weight.add_(direction, alpha=alpha)
    if weight is not target and rounding is not None:
        rounding.store_(target, weight, entry.name, entry.param)
    elif weight is not target:
        target.copy_(weight)
    if squares is not None:
        dtype = torch.promote_types(direction.dtype, torch.float32)
        squares.append(torch.linalg.vector_norm(direction, dtype=dtype).mul(alpha).square())
