# SPDX-License-Identifier: Apache-2.0
"""Derive the Polar Express table offline: the greedy best odd quintic of each step (arXiv:2505.16932).

Written from the paper's description, independent of the package; run it to print the rows.
"""

from __future__ import annotations

import numpy as np

LOWER = 1e-3  # smallest singular value that the table is designed for, relative to the Frobenius norm
CUSHION = 0.02407327424182761  # the paper's: do not fit below this share of the upper end
SAFETY = 1.01  # rounding may push singular values above one; all rows but the last shrink their input by this


def best_odd_quintic(low: float, high: float) -> tuple[float, float, float]:
    """Return (a, b, c) that minimise max |1 - (a x + b x^3 + c x^5)| on [low, high], by exchange."""
    if 1 - low / high < 5e-6:  # the system below turns singular; its limit is the cubic-contact quintic
        return 15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5
    inner = np.array([(3 * low + high) / 4, (low + 3 * high) / 4])
    error = np.inf
    for _ in range(200):
        x = np.array([low, *inner, high])
        system = np.stack([x, x**3, x**5, np.array([1.0, -1.0, 1.0, -1.0])], axis=1)
        a, b, c, level = np.linalg.solve(system, np.ones(4))
        root = np.sqrt(9 * b * b - 20 * a * c)
        inner = np.sqrt((-3 * b + np.array([-root, root])) / (10 * c))
        if abs(level - error) < 1e-15:
            break
        error = level
    return float(a), float(b), float(c)


def derive(num_rows: int) -> list[tuple[float, float, float]]:
    """Return the `num_rows` rows of the table, safety factor included in all but the last."""
    low, high = LOWER, 1.0
    rows = []
    for _ in range(num_rows):
        a, b, c = best_odd_quintic(max(low, CUSHION * high), high)
        at_low, at_high = (a * x + b * x**3 + c * x**5 for x in (low, high))
        if low < CUSHION * high:  # centre the image of the whole interval on one
            a, b, c = (2 / (at_low + at_high) * k for k in (a, b, c))
        rows.append((a, b, c))
        low = a * low + b * low**3 + c * low**5
        high = 2 - low
    safe = [(a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in rows[:-1]]
    return [*safe, rows[-1]]


if __name__ == "__main__":
    for row in derive(8):
        print(row)
