# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz orthogonalization: normalise, pick form and dtype, iterate."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..tracing import traced
from . import compiled
from .coefficients import Row, coefficient_rows
from .cost import check_method, check_steps, resolve_method
from .dispatch import loops_over_matrices, resolve_dtype, stack_size
from .iteration import gram_iteration, standard_iteration

TINY = sys.float_info.min  # the default never changes a result, zero is handled apart; survives flushed denormals
_CONTIGUOUS = torch.contiguous_format
_FEW_ELEMENTS = 16 * 1024
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
        FLOPs: `ns_flops`. Beyond the result it holds, for one stack at a time, two (M, N) and two (standard) or four
        (gram) square buffers of the short side per matrix, in the dtype of the products.
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
    in_place: bool = False,
) -> list[Tensor]:
    """Orthogonalize many matrices; those of equal shape, dtype and device share batched products.

    Args:
        matrices: tensors (..., M, N) of any mix of shapes, dtypes and devices.
        method: as in `newton_schulz`, like the options below.
        steps: iterations, at least 1.
        coefficients: table name or rows.
        dtype: dtype of the products.
        eps: lower bound of the norm.
        in_place: write each result over its input and return the inputs, which must not share memory.

    Returns:
        One tensor per input, in order; equal to `newton_schulz` of each to rounding.

    Raises:
        TypeError: as in `newton_schulz`.
        ValueError: as in `newton_schulz`.

    Note:
        Beyond the results one stack is worked on at a time: on a CPU what its caches hold or one matrix, elsewhere
        64 MiB of float32 or one matrix.
    """
    if torch.compiler.is_compiling():
        options = {"method": method, "steps": steps, "coefficients": coefficients, "dtype": dtype, "eps": eps}
        results = [newton_schulz(matrix, **options) for matrix in matrices]  # type: ignore[arg-type]
        return [m.copy_(r) for m, r in zip(matrices, results, strict=True)] if in_place else results
    rows: tuple[Row, ...] = ()
    alike: dict[tuple, list[int]] = {}
    for index, matrix in enumerate(matrices):
        rows = _check(matrix, method, steps, coefficients, eps)
        alike.setdefault((matrix.shape, matrix.dtype, matrix.device), []).append(index)
    outputs = list(matrices) if in_place else [torch.empty_like(m, memory_format=_CONTIGUOUS) for m in matrices]
    for indices in alike.values():
        first = matrices[indices[0]]
        product_dtype = resolve_dtype(dtype, first.device, first.dtype)
        group = [matrices[index] for index in indices]
        _traced([outputs[index] for index in indices], group, method, rows, product_dtype, eps)
    return outputs


def orthogonalize(
    matrix: Tensor, method: str, rows: tuple[Row, ...], product_dtype: torch.dtype, eps: float
) -> Tensor:
    """Run the iteration on checked arguments; see `newton_schulz`."""
    out = torch.empty_like(matrix, memory_format=_CONTIGUOUS)
    _orthogonalize_into([out], [matrix], method, rows, product_dtype, eps)
    return out


@torch.no_grad()
def _orthogonalize_into(
    outputs: Sequence[Tensor],
    matrices: Sequence[Tensor],
    method: str,
    rows: tuple[Row, ...],
    product_dtype: torch.dtype,
    eps: float,
) -> None:
    """Write the orthogonalized `matrices`, all of one shape, dtype and device, into `outputs`, stack by stack."""
    example = matrices[0]
    if example.numel() == 0:
        return
    m, n = example.shape[-2:]
    kind = example.device.type
    form = resolve_method(method, m, n, len(rows), device_type=kind)
    iterate = gram_iteration if form == "gram" else standard_iteration
    plain = loops_over_matrices(m, n, kind)
    for sources, targets in _stacks(matrices, outputs, stack_size(m, n, kind)):
        joined = sources[0] if len(sources) == 1 else torch.cat(sources)
        stack = _normalised(joined, product_dtype, eps, overwrite=len(sources) > 1)
        del joined  # it and the stack before would be in memory for nothing
        _iterate_into(targets, stack, functools.partial(iterate, rows=rows), plain)
        del stack


_traced = traced("newton_schulz", lambda _, group, *__: f"{len(group)} x {'x'.join(map(str, group[0].shape))}")(
    _orthogonalize_into
)


def _iterate_into(targets: Sequence[Tensor], stack: Tensor, iterate: Callable[..., Tensor], plain: bool) -> None:
    """Iterate on a (b, M, N) stack, as one plain matrix where `plain`, and write it to `targets` of b altogether."""
    into = targets[0] if len(targets) == 1 and _is_like(targets[0], stack) else None
    spare = torch.empty_like(stack) if into is None else into
    # Without `plain` a stack of one too: one kernel for every number of matrices, so that neighbours do not matter.
    x, buffer = (stack[0], spare[0]) if plain else (stack, spare)
    result = iterate(x, spare=buffer)
    if into is None or result is not buffer:
        whole = result[None] if plain else result
        parts = whole.split([len(target) for target in targets]) if len(targets) > 1 else [whole]
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part)


def _is_like(target: Tensor, stack: Tensor) -> bool:
    """Return whether the iteration may use `target` as its buffer: at an address as round as a new tensor's, too."""
    aligned = target.storage_offset() * target.itemsize % 64 == 0
    return aligned and target.dtype == stack.dtype and target.is_contiguous()


def _stacks(
    matrices: Sequence[Tensor], outputs: Sequence[Tensor], size: int
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield pieces (b, M, N) of matrices and outputs, `size` matrices together at most; the outputs are views."""
    if len(matrices) == 1 and matrices[0].ndim <= 3 and (matrices[0].ndim == 2 or len(matrices[0]) <= size):
        yield [_batch(matrices[0])], [_batch(outputs[0])]
        return
    sources, targets, held = list[Tensor](), list[Tensor](), 0
    for matrix, output in zip(matrices, outputs, strict=True):
        for place in itertools.product(*map(range, matrix.shape[:-3])):
            for piece, target in zip(
                _batch(matrix[place]).split(size), _batch(output[place]).split(size), strict=True
            ):
                if sources and held + len(piece) > size:
                    yield sources, targets
                    sources, targets, held = [], [], 0
                sources.append(piece)
                targets.append(target)
                held += len(piece)
    if sources:
        yield sources, targets


def _batch(matrix: Tensor) -> Tensor:
    return matrix if matrix.ndim == 3 else matrix[None]


def _normalised(matrix: Tensor, product_dtype: torch.dtype, eps: float, *, overwrite: bool = False) -> Tensor:
    """Divide each matrix by max(Frobenius norm, eps) in at least float32, then cast; a new tensor, or `matrix`."""
    m, n = matrix.shape[-2:]
    if matrix.device.type == "cpu" and m * n <= _FEW_ELEMENTS and matrix.dtype != torch.float64:
        # Nothing leaves the range of float64: five calls in place of twelve, where calls are what costs.
        double = matrix.to(torch.float64, memory_format=_CONTIGUOUS)
        norm = torch.linalg.vector_norm(double, dim=(-2, -1), keepdim=True)
        return double.div_(norm.clamp_(min=eps)).to(product_dtype)
    wide = matrix if matrix.dtype == torch.float64 else matrix.float()
    # Squares of very large or very small entries leave the range of float32: bring the largest entry to one first.
    largest = torch.maximum(wide.amax(dim=(-2, -1), keepdim=True), wide.amin(dim=(-2, -1), keepdim=True).neg_())
    divisor = torch.where(largest == 0, 1.0, largest)
    # Into a contiguous tensor: the bits of the result then do not depend on how the matrix was stored.
    is_ours = (overwrite or wide is not matrix) and wide.is_contiguous()
    scaled = torch.div(wide, divisor, out=wide if is_ours else wide.new_empty(wide.shape))
    # Row norms first: a single running sum over tens of millions of entries would lose digits.
    norm = torch.linalg.vector_norm(torch.linalg.vector_norm(scaled, dim=-1, keepdim=True), dim=-2, keepdim=True)
    if eps > TINY:
        norm = torch.maximum(norm, (eps / divisor.double()).to(norm.dtype))
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
