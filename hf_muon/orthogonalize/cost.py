# SPDX-License-Identifier: Apache-2.0
"""Cost model: the matrix-product FLOPs that one orthogonalization runs, and the choice of form made from them."""

from __future__ import annotations

import functools
import itertools

from ..config import nearest

METHODS = ("gram", "standard")

# Up to this many iterations share one Gram matrix. The first run is shorter: it meets the smallest singular values,
# whose squares lie nearest to the rounding error of R.
_FIRST_RUN = 2
_LATER_RUN = 3

# From this short side on, a CPU computes symmetric products in row panels up to the diagonal and mirrors the rest.
# Measured in fp32, one core (MKL, AVX2), gain over the full product: 0.94 at 192, 1.1 at 256, 1.27 at 384, 1.46 at
# 576, 1.61 at 896 with four panels; 1.44 at 2048 with eight. More panels of the same matrix are too thin again.
PANEL_MIN_SIDE = 256
NUM_PANELS = 4
MANY_PANELS_MIN_SIDE = 2048
MANY_PANELS = 8


def check_method(method: str) -> None:
    """Raise ValueError unless `method` is `gram` or `standard`."""
    if method not in METHODS:
        raise ValueError(f"method must be gram or standard; got {method!r}.{nearest(method, METHODS)}")


def check_steps(steps: int) -> None:
    """Raise ValueError unless `steps` is a whole number of at least 1."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a whole number of at least 1; got {steps!r}. Muon's default is 5.")


def gram_runs(steps: int) -> tuple[int, ...]:
    """Split `steps` into runs between restarts: 5 -> (2, 3), 8 -> (2, 3, 3)."""
    runs = [min(steps, _FIRST_RUN)]
    while (left := steps - sum(runs)) > 0:
        runs.append(min(left, _LATER_RUN))
    return tuple(runs)


@functools.cache
def panel_bounds(n: int, device_type: str) -> tuple[tuple[int, int], ...]:
    """Return the row panels in which a symmetric (n, n) product is computed on this kind of device.

    Panel (start, end) computes rows start:end of columns 0:end. One panel means a plain full product.
    """
    count = 1
    if device_type == "cpu" and n >= PANEL_MIN_SIDE:
        count = MANY_PANELS if n >= MANY_PANELS_MIN_SIDE else NUM_PANELS
    edges = [n * i // count for i in range(count + 1)]
    return tuple(itertools.pairwise(edges))


def ns_flops(m: int, n: int, *, steps: int = 5, method: str = "gram", batch: int = 1, device_type: str = "cpu") -> int:
    """Count the FLOPs of the matrix products that `newton_schulz` runs for `batch` matrices of shape (m, n).

    Args:
        m: rows.
        n: columns.
        steps: Newton-Schulz iterations, at least 1.
        method: `gram` or `standard`; `gram` counts the standard form where `resolve_method` picks that.
        batch: number of matrices.
        device_type: a CPU computes large symmetric products by half, so its count is lower.

    Returns:
        FLOPs, a multiply-add counted as two. Elementwise work, O(m n) per step, is not in it.

    Raises:
        ValueError: unknown method, steps below 1.
    """
    if resolve_method(method, m, n, steps, device_type=device_type) == "gram":
        return batch * _gram_flops(m, n, steps, device_type)
    return batch * _standard_flops(m, n, steps, device_type)


@functools.cache
def resolve_method(method: str, m: int, n: int, steps: int, *, device_type: str = "cpu") -> str:
    """Return the form that is run: `gram` only where it was asked for and costs fewer FLOPs, else `standard`.

    Raises:
        ValueError: unknown method, steps below 1.
    """
    check_method(method)
    check_steps(steps)
    if method == "gram" and _gram_flops(m, n, steps, device_type) < _standard_flops(m, n, steps, device_type):
        return "gram"
    return "standard"


def _symmetric_flops(n: int, k: int, device_type: str) -> int:
    """FLOPs of a symmetric (n, k) x (k, n) product."""
    return sum(2 * (end - start) * end * k for start, end in panel_bounds(n, device_type))


def _standard_flops(m: int, n: int, steps: int, device_type: str) -> int:
    short, long = sorted((m, n))
    per_step = _symmetric_flops(short, long, device_type) + _symmetric_flops(short, short, device_type)
    return steps * (per_step + 2 * short * short * long)


def _gram_flops(m: int, n: int, steps: int, device_type: str) -> int:
    short, long = sorted((m, n))
    runs = gram_runs(steps)
    per_run = _symmetric_flops(short, long, device_type) + 2 * short * short * long
    # A run of k iterations: k products for Z, k-1 for Q (the first is Z + aI), 2(k-1) for R (the last is unused).
    squares = sum(run + 3 * (run - 1) for run in runs)
    return len(runs) * per_run + squares * _symmetric_flops(short, short, device_type)
