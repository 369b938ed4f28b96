# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz orthogonalization: normalise, pick form and dtype, iterate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..tracing import traced
from . import compiled
from .coefficients import Row, coefficient_rows
from .cost import check_method, check_steps, resolve_method
from .dispatch import loops_over_matrices, resolve_dtype
from .iteration import gram_iteration, standard_iteration

TINY = 5e-324  # the smallest positive double: the default never changes a result, zero is handled apart
BATCH_BYTES = 256 * 2**20  # largest stack of equal matrices that `newton_schulz_many` builds
_FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def newton_schulz(
    matrix: Tensor,
    *,
    method: str = "gram",
    steps: int = 5,
    coefficients: str | Sequence[Sequence[float]] = "keller",
    dtype: str | torch.dtype | None = None,
    eps: float = TINY,
) -> Tensor:
    """Bring the singular values of each matrix near one and keep its singular vectors.

    Scale-invariant: `newton_schulz(c * U)` equals `newton_schulz(U)` for every finite positive `c` that the dtype
    can hold. A zero matrix gives exact zeros. A matrix that holds inf or NaN gives NaN and leaves the other
    matrices of the batch alone. The input is neither changed nor aliased. Not differentiable: the result carries
    no graph.

    Args:
        matrix: (..., M, N), a real floating dtype; leading dimensions are a batch.
        method: `gram` (used where it costs fewer FLOPs, `standard` elsewhere) or `standard`.
        steps: iterations, at least 1.
        coefficients: a table name or rows (a, b, c), one per step or one for all. `polar_express` at 8 steps brings
            singular values of at least 1e-3 of the Frobenius norm into [0.95, 1.05]; smaller ones end below.
        dtype: dtype of the products; None or `auto` picks one for the device, see `resolve_dtype`.
        eps: lower bound of the Frobenius norm that a matrix is divided by.

    Returns:
        (..., M, N) in the dtype of `matrix`.

    Raises:
        TypeError: `matrix` is not a tensor of a real floating dtype.
        ValueError: fewer than two dimensions, unknown method, coefficients or dtype, steps below 1, eps not above 0.

    Note:
        FLOPs: `ns_flops`. Beyond the result it holds one more (..., M, N) and two (standard) or four (gram) square
        buffers of the short side, in the dtype of the products; on a CPU large matrices of a batch go one by one.
    """
    rows = _check(matrix, method, steps, coefficients, eps)
    if torch.compiler.is_compiling():  # the dtype is resolved inside: its probe must not be traced
        name = "auto" if dtype is None else str(dtype).removeprefix("torch.")
        return compiled.newton_schulz_op(matrix, method, [k for row in rows for k in row], name, float(eps))
    product_dtype = resolve_dtype(dtype, matrix.device, matrix.dtype)
    return orthogonalize(matrix, method, rows, product_dtype, eps)


def newton_schulz_many(
    matrices: Sequence[Tensor],
    *,
    method: str = "gram",
    steps: int = 5,
    coefficients: str | Sequence[Sequence[float]] = "keller",
    dtype: str | torch.dtype | None = None,
    eps: float = TINY,
) -> list[Tensor]:
    """Orthogonalize many matrices; those of equal shape, dtype and device share batched products.

    Args:
        matrices: tensors (..., M, N) of any mix of shapes, dtypes and devices.
        method: as in `newton_schulz`, like the options below.
        steps: iterations, at least 1.
        coefficients: table name or rows.
        dtype: dtype of the products.
        eps: lower bound of the norm.

    Returns:
        One tensor per input, in order; equal to `newton_schulz` of each to rounding.

    Raises:
        TypeError: as in `newton_schulz`.
        ValueError: as in `newton_schulz`.

    Note:
        A stack holds at most 256 MiB; matrices too large to gain from a batch on their device go one by one.
    """
    options = {"method": method, "steps": steps, "coefficients": coefficients, "dtype": dtype, "eps": eps}
    alike: dict[tuple, list[int]] = {}
    for index, matrix in enumerate(matrices):
        _check(matrix, method, steps, coefficients, eps)
        alike.setdefault((matrix.shape, matrix.dtype, matrix.device), []).append(index)
    results: list[Tensor | None] = [None] * len(matrices)
    for indices in alike.values():
        for chunk in _chunks(indices, matrices[indices[0]], dtype):
            if len(chunk) == 1:
                results[chunk[0]] = newton_schulz(matrices[chunk[0]], **options)  # type: ignore[arg-type]
                continue
            stacked = newton_schulz(torch.stack([matrices[i] for i in chunk]), **options)  # type: ignore[arg-type]
            for index, result in zip(chunk, stacked.unbind(0), strict=True):
                results[index] = result
    return [result for result in results if result is not None]


@traced("newton_schulz", lambda matrix, *_: "x".join(map(str, matrix.shape)))
@torch.no_grad()
def orthogonalize(
    matrix: Tensor, method: str, rows: tuple[Row, ...], product_dtype: torch.dtype, eps: float
) -> Tensor:
    """Run the iteration on checked arguments; see `newton_schulz`."""
    if matrix.numel() == 0:
        return torch.empty_like(matrix)
    m, n = matrix.shape[-2:]
    batch = math.prod(matrix.shape[:-2])
    form = resolve_method(method, m, n, len(rows), device_type=matrix.device.type)
    iterate = gram_iteration if form == "gram" else standard_iteration
    flat = matrix.reshape(batch, m, n)
    if not loops_over_matrices(m, n, matrix.device.type):
        # A batch of one too: one kernel for every batch size, so that a result does not depend on its neighbours.
        return iterate(_normalised(flat, product_dtype, eps), rows).to(matrix.dtype).reshape(matrix.shape)
    if batch == 1:
        return iterate(_normalised(flat[0], product_dtype, eps), rows).to(matrix.dtype).reshape(matrix.shape)
    out = torch.empty(flat.shape, dtype=matrix.dtype, device=matrix.device)
    for one, target in zip(flat.unbind(0), out.unbind(0), strict=True):
        target.copy_(iterate(_normalised(one, product_dtype, eps), rows))
    return out.reshape(matrix.shape)


def _normalised(matrix: Tensor, product_dtype: torch.dtype, eps: float) -> Tensor:
    """Divide each matrix by max(Frobenius norm, eps) in at least float32, then cast; always a new tensor."""
    wide = matrix if matrix.dtype == torch.float64 else matrix.float()
    # Squares of very large or very small entries leave the range of float32: bring the largest entry to one first.
    largest = wide.abs().amax(dim=(-2, -1), keepdim=True)
    # Into a contiguous tensor: the bits of the result then do not depend on how the matrix was stored.
    scaled = torch.div(wide, torch.where(largest == 0, 1.0, largest), out=wide.new_empty(wide.shape))
    # Row norms first: a single running sum over tens of millions of entries would lose digits.
    norm = torch.linalg.vector_norm(torch.linalg.vector_norm(scaled, dim=-1, keepdim=True), dim=-2, keepdim=True)
    if eps > TINY:
        norm = torch.maximum(norm, eps / largest)
    return scaled.div_(torch.where(norm == 0, 1.0, norm)).to(product_dtype)


def _check(
    matrix: Tensor, method: str, steps: int, coefficients: str | Sequence[Sequence[float]], eps: float
) -> tuple[Row, ...]:
    if not isinstance(matrix, Tensor):
        raise TypeError(
            f"matrix must be a tensor; got {type(matrix).__name__}. Pass torch.Tensor of shape (..., M, N)."
        )
    if matrix.dtype not in _FLOATING:
        raise TypeError(
            f"matrix must have a real floating dtype; got {matrix.dtype}. Convert it to float32, bfloat16 or float16."
        )
    if matrix.ndim < 2:
        raise ValueError(
            f"matrix must have at least two dimensions; got shape {tuple(matrix.shape)}. "
            "Put vectors and scalars on AdamW."
        )
    check_method(method)
    check_steps(steps)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not eps > 0:
        raise ValueError(f"eps must be a number above 0; got {eps!r}. Leave it out for the default.")
    return coefficient_rows(coefficients, steps)


def _chunks(indices: list[int], example: Tensor, dtype: str | torch.dtype | None) -> list[list[int]]:
    """Split matrices of one shape into stacks that stay below `BATCH_BYTES`; singles where a batch is no gain."""
    if example.numel() == 0 or loops_over_matrices(example.shape[-2], example.shape[-1], example.device.type):
        return [[index] for index in indices]
    width = max(4, resolve_dtype(dtype, example.device, example.dtype).itemsize)
    size = max(1, BATCH_BYTES // (example.numel() * width))
    return [indices[start : start + size] for start in range(0, len(indices), size)]
