# SPDX-License-Identifier: Apache-2.0
"""The two forms of the quintic iteration on normalised matrices, with reused buffers.

A wide matrix is multiplied from the left, a tall one from the right, so the squares always have the short side
and nothing is transposed in memory. All squares (A, R, Z, Q) are symmetric polynomials of one matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .coefficients import Row
from .cost import gram_runs, panel_bounds

_SMALL_SIDE = 128  # up to here a call costs more than a pass over a square


def standard_iteration(x: Tensor, rows: tuple[Row, ...], spare: Tensor | None = None) -> Tensor:
    """Apply `X <- a X + (b A + c A^2) X`, `A = X X^T`, once per row.

    Args:
        x: (M, N) or (B, M, N), Frobenius norm at most about one; overwritten.
        rows: (a, b, c) per step.
        spare: a buffer like `x` to work in; overwritten. Without it one is made.

    Returns:
        The iterate: `x` or the buffer.
    """
    spare = torch.empty_like(x) if spare is None else spare
    gram, square = _squares(x, 2)
    for a, b, c in rows:
        _gram(x, gram)
        _symmetric(gram, gram, base=gram, beta=b, alpha=c, out=square)
        _apply(square, x, beta=a, out=spare)
        x, spare = spare, x
    return x


def gram_iteration(x: Tensor, rows: tuple[Row, ...], spare: Tensor | None = None) -> Tensor:
    """Run the same polynomials on `R = X X^T` and multiply X once per run: `X <- Q X`.

    Each run of `gram_runs` starts from a fresh R. Within a run R follows by `R <- P R P`, whose rounding error grows
    by a^2 per step for small eigenvalues; restarting after step 2 and then every third step bounds it.

    Args:
        x: (M, N) or (B, M, N), Frobenius norm at most about one; overwritten.
        rows: (a, b, c) per step.
        spare: a buffer like `x` to work in; overwritten. Without it one is made.

    Returns:
        The iterate: `x` or the buffer.
    """
    spare = torch.empty_like(x) if spare is None else spare
    r, z, q, t = _squares(x, 4)
    start = 0
    for length in gram_runs(len(rows)):
        _gram(x, r)
        for step, (a, b, c) in enumerate(rows[start : start + length]):
            _symmetric(r, r, base=r, beta=b, alpha=c, out=z)
            if step == 0:
                _add_multiple_of_identity(z, a, out=q)
            else:
                _symmetric(q, z, base=q, beta=a, alpha=1.0, out=t)
                q, t = t, q
            if step < length - 1:  # R after the last step of a run is never read
                _symmetric(r, z, base=r, beta=a, alpha=1.0, out=t)
                _symmetric(z, t, base=t, beta=a, alpha=1.0, out=r)
        _apply(q, x, beta=0.0, out=spare)
        x, spare = spare, x
        start += length
    return x


def _add_multiple_of_identity(square: Tensor, a: float, out: Tensor) -> None:
    """Write `square + a I`: small ones in one call, large ones without another matrix."""
    short = square.shape[-1]
    if short <= _SMALL_SIDE:
        torch.add(square, torch.eye(short, dtype=square.dtype, device=square.device), alpha=a, out=out)
    else:
        out.copy_(square).diagonal(dim1=-2, dim2=-1).add_(a)


def _squares(x: Tensor, count: int) -> list[Tensor]:
    short = min(x.shape[-2:])
    return [x.new_empty(*x.shape[:-2], short, short) for _ in range(count)]


def _gram(x: Tensor, out: Tensor) -> None:
    """Write `X X^T` of a wide X, or `X^T X` of a tall one."""
    left, right = (x, x.mT) if x.shape[-2] <= x.shape[-1] else (x.mT, x)
    _symmetric(left, right, base=None, beta=0.0, alpha=1.0, out=out)


def _symmetric(left: Tensor, right: Tensor, *, base: Tensor | None, beta: float, alpha: float, out: Tensor) -> None:
    """Write `beta base + alpha left right`, known to be symmetric, computing only panels up to the diagonal."""
    bounds = panel_bounds(out.shape[-1], out.device.type)
    if len(bounds) == 1:
        _product(base, left, right, beta=beta, alpha=alpha, out=out)
        return
    for start, end in bounds:
        rows, columns = slice(start, end), slice(0, end)
        _product(
            None if base is None else base[..., rows, columns],
            left[..., rows, :],
            right[..., columns],
            beta=beta,
            alpha=alpha,
            out=out[..., rows, columns],
        )
    for start, end in bounds[1:]:
        out[..., :start, start:end].copy_(out[..., start:end, :start].mT)


def _apply(square: Tensor, x: Tensor, *, beta: float, out: Tensor) -> None:
    """Write `beta X + S X` of a wide X, or `beta X + X S` of a tall one."""
    left, right = (square, x) if x.shape[-2] <= x.shape[-1] else (x, square)
    _product(x if beta else None, left, right, beta=beta, alpha=1.0, out=out)


def _product(base: Tensor | None, left: Tensor, right: Tensor, *, beta: float, alpha: float, out: Tensor) -> None:
    """Write `beta base + alpha left right` into `out`; without `base`, just `left right`."""
    if base is None:
        (torch.mm if out.ndim == 2 else torch.bmm)(left, right, out=out)
        return
    add_product = torch.addmm if out.ndim == 2 else torch.baddbmm
    add_product(base, left, right, beta=beta, alpha=alpha, out=out)
