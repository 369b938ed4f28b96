# SPDX-License-Identifier: Apache-2.0
"""How sure is a score, and is one run better than another on the same rows? Needs the standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def standard_error(share: float, count: int) -> float:
    """Return the binomial standard error of a share of `count` rows."""
    return math.sqrt(share * (1 - share) / count)


def paired_comparison(correct_a: Sequence[bool], correct_b: Sequence[bool]) -> dict[str, Any]:
    """Compare two runs on the same rows, in the same order.

    Args:
        correct_a: whether the first run had each row right.
        correct_b: the same for the second.

    Returns:
        `n`; `n01` (only the second right) and `n10` (only the first); `difference`, the first share minus the
        second; `standard_error` of the difference, paired; `p`, two-sided and exact.

    Raises:
        ValueError: the lengths differ, or there is no row.

    References:
        McNemar (1947) with the exact binomial distribution: under equality n10 ~ Binomial(n01 + n10, 1/2). The
        variance of the difference is (n01 + n10 - (n10 - n01)^2 / n) / n^2.
    """
    count = len(correct_a)
    if count != len(correct_b) or not count:
        raise ValueError(f"both runs must cover the same rows; got {count} and {len(correct_b)}.")
    n10 = sum(bool(a) and not b for a, b in zip(correct_a, correct_b, strict=True))
    n01 = sum(bool(b) and not a for a, b in zip(correct_a, correct_b, strict=True))
    variance = (n01 + n10 - (n10 - n01) ** 2 / count) / count**2
    return {
        "n": count,
        "n01": n01,
        "n10": n10,
        "difference": (n10 - n01) / count,
        "standard_error": math.sqrt(max(0.0, variance)),
        "p": exact_sign_test(n01, n10),
    }


def exact_sign_test(n01: int, n10: int) -> float:
    """Return the two-sided p-value of `n01` against `n10` differing rows; 1.0 where nothing differs.

    Note:
        Whole numbers throughout, so nothing underflows; microseconds for thousands of rows.
    """
    differing = n01 + n10
    term = tail = 1
    for successes in range(1, min(n01, n10) + 1):
        term = term * (differing - successes + 1) // successes
        tail += term
    return float(min(1.0, 2 * tail / 2**differing)) if n01 != n10 else 1.0
