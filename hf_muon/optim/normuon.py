# SPDX-License-Identifier: Apache-2.0
"""NorMuon: give the rows of an orthogonalized update one size, by a running second moment per output neuron.

References: Li, Liu, Liang, Chen, Zhao, "NorMuon: Making Muon more efficient and scalable", arXiv:2510.05491.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ..param_groups.views import MatrixView
from .state_spec import ROW_STATISTICS
from .tensor_layout import copy_into_layout, is_dtensor, is_owned, local_tensor

EPS = 1e-8  # the paper names none; rows of an orthogonalized update are far above it


@torch.no_grad()
def normalize_rows_(
    orthogonal: Sequence[Tensor], rows: Tensor, view: MatrixView, beta2: float, skip: Tensor | None
) -> list[Tensor]:
    """Return the matrices with their rows normalised, and update the row statistics in place.

    Per (M, N) matrix `O`: `v = beta2 v + (1 - beta2) mean over columns of O*O`; `O <- O / (sqrt(v) + eps)`; then `O`
    is scaled to the Frobenius norm sqrt(min(M, N)) of an orthogonal matrix, so that `adjust_lr_fn` means the same as
    without: under `match_rms_adamw` the step has the norm 0.2 lr sqrt(M N) of the paper.

    Args:
        orthogonal: (..., M_i, N) matrices of one parameter, as its view gives them.
        rows: whole row statistics in storage layout, see `row_shape`.
        view: of the parameter.
        beta2: decay of the row statistics.
        skip: bool tensor, 0-dim or what `view.per_matrix` returns; where true the statistics stay as they are.
    """
    results, moments = [], []
    for matrix, before in zip(orthogonal, view.matrices(rows), strict=True):
        m, n = matrix.shape[-2:]
        wide = matrix.to(before.dtype).contiguous()  # so that sums run in one order, however the matrix is stored
        mean_square = wide.square().mean(dim=-1, keepdim=True) if n else torch.zeros_like(before)  # (..., M, 1)
        moment = before * beta2 + mean_square * (1.0 - beta2)
        moments.append(moment)
        even = wide / (moment.sqrt() + EPS)
        norm = torch.linalg.vector_norm(even, dim=(-2, -1), keepdim=True)
        results.append(even * (math.sqrt(min(m, n)) / torch.where(norm == 0, 1.0, norm)))
    moments_in_storage = view.assemble(moments, like=rows)
    if skip is not None:
        moments_in_storage = torch.where(_rows_of(skip.to(rows.device), rows, view), rows, moments_in_storage)
    rows.copy_(moments_in_storage)
    return results


def _rows_of(mask: Tensor, rows: Tensor, view: MatrixView) -> Tensor:
    """Return a mask over the matrices of a parameter as one over its row statistics, which are shorter on one axis."""
    if mask.ndim and view.stack > 1:
        return mask[:: mask.shape[0] // rows.shape[0]]
    return mask[:, : rows.shape[1]] if mask.ndim and view.alternating > 1 else mask


def row_shape(view: MatrixView, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the storage shape of one number per output row: the parameter's, with 1 in place of the input axis."""
    if view.flatten:
        return (1, math.prod(shape[1:])) if view.transposed else (shape[0], 1)
    if not view.transposed:
        return (*shape[:-1], view.alternating)
    return (view.stack, shape[-1]) if view.stack > 1 else (*shape[:-2], 1, shape[-1])


def add_row_statistics(group: dict[str, Any], state: dict[Tensor, dict[str, Any]]) -> None:
    """Give every parameter of a Muon group row statistics where it has none: zeros, whole on every rank but owned."""
    for param, view in zip(group["params"], group["matrix_views"], strict=True):
        if ROW_STATISTICS not in state[param]:
            state[param][ROW_STATISTICS] = _zero_rows(param, row_shape(view, tuple(param.shape)))


def load_rows(saved: Tensor | None, live: Tensor) -> Tensor:
    """Return new row statistics in the layout of `live`: the saved values, or zeros where there are none that fit."""
    if saved is None or tuple(saved.shape) != tuple(live.shape):
        return torch.zeros_like(live)
    if is_dtensor(live):
        return copy_into_layout(saved, live, live.dtype)
    if is_dtensor(saved):
        saved = cast(Any, saved).full_tensor()
    return saved.to(device=live.device, dtype=live.dtype, copy=True)


def _zero_rows(param: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return zeros of `shape`: owned where `param` is, else plain, and the same on all ranks of a sharded one."""
    local = local_tensor(param)
    dtype = torch.promote_types(param.dtype, torch.float32)
    if not is_owned(param):
        return torch.zeros(shape, dtype=dtype, device=local.device)
    from ..distributed import OwnedDTensor
    from ..distributed.owned import own

    layout = cast(OwnedDTensor, param).owner_layout
    parts = layout.parts
    if shape[0] != param.shape[0]:  # of a transposed matrix, which one owner holds whole
        parts = tuple(part._replace(start=0, stop=shape[0]) for part in parts)
    layout = replace(layout, shape=torch.Size(shape), parts=parts)
    return own(torch.zeros(layout.local_shape, dtype=dtype, device=local.device), layout)
