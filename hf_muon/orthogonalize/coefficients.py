# SPDX-License-Identifier: Apache-2.0
"""Coefficient tables (a, b, c) of the quintic `x -> a x + b x^3 + c x^5`, one row per step, with their sources."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..config import nearest
from .cost import check_steps

Row = tuple[float, float, float]

COEFFICIENTS: dict[str, tuple[Row, ...]] = {
    # Keller Jordan, "Muon", 2024, kellerjordan.github.io/posts/muon; also the default of torch.optim.Muon.
    # Steepest slope at zero; singular values end anywhere in about [0.7, 1.2] and do not converge.
    "keller": ((3.4445, -4.7750, 2.0315),),
    # Amsel, Persson, Musco, Gower, "The Polar Express", arXiv:2505.16932: the greedy best quintic of each step for
    # singular values in [1e-3, 1], with the paper's safety factor 1.01 in every row but the last. Re-derived in
    # tests/unit/orthogonalize/minimax_quintic.py, which also compares. The last row is the limit and repeats.
    "polar_express": (
        (8.205160414005569, -22.90193498705604, 16.460724910180307),
        (4.066395159942772, -2.861154086755142, 0.5183995226694742),
        (3.9095949044379146, -2.8233517350395134, 0.5250369769390019),
        (3.285564017198614, -2.4153019596359453, 0.48529406552790877),
        (2.277873287083978, -1.6198217652654403, 0.39848078704168294),
        (1.8725756512746514, -1.2307042574884293, 0.3585161620951164),
        (1.8564371097522294, -1.213239281911391, 0.3567997894102731),
        (1.875, -1.25, 0.375),
    ),
}


def coefficient_rows(coefficients: str | Sequence[Sequence[float]], steps: int) -> tuple[Row, ...]:
    """Return one (a, b, c) row per step; a table shorter than `steps` repeats its last row.

    Args:
        coefficients: a name in `COEFFICIENTS`, or rows: one for all steps, or at least one per step.
        steps: number of iterations, at least 1.

    Raises:
        ValueError: an unknown name, rows that are not three finite numbers, or a number of explicit rows that is
            neither 1 nor at least `steps`.
    """
    check_steps(steps)
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            raise ValueError(
                f"coefficients must be {', '.join(COEFFICIENTS)} or rows (a, b, c); got {coefficients!r}."
                f"{nearest(coefficients, tuple(COEFFICIENTS))}"
            )
        rows = COEFFICIENTS[coefficients]
    else:
        rows = _checked_rows(coefficients)
        if 1 < len(rows) < steps:
            raise ValueError(
                f"coefficients must hold one row, or one per step ({steps}); got {len(rows)} rows. "
                "Add rows or lower steps."
            )
    return tuple(rows[min(step, len(rows) - 1)] for step in range(steps))


def _checked_rows(coefficients: Sequence[Sequence[float]]) -> tuple[Row, ...]:
    try:
        rows = tuple((float(a), float(b), float(c)) for a, b, c in coefficients)
    except (TypeError, ValueError):
        rows = ()
    if not rows or not all(math.isfinite(value) for row in rows for value in row):
        raise ValueError(
            f"coefficients must be rows of three finite numbers (a, b, c); got {coefficients!r}. "
            "Use 'keller' if unsure."
        )
    return rows
