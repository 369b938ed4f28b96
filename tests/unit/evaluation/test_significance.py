# SPDX-License-Identifier: Apache-2.0
"""The paired test against enumeration of every outcome, and its standard error against the sample formula."""

import itertools
import math
import random
from fractions import Fraction

import pytest

from evaluation.significance import exact_sign_test, paired_comparison


def enumerated(n01, n10):
    """Two-sided p over all 2^n equally likely outcomes: at least as far from the middle as the one seen."""
    count = n01 + n10
    seen = abs(n10 - n01)
    far = sum(abs(2 * sum(outcome) - count) >= seen for outcome in itertools.product((0, 1), repeat=count))
    return Fraction(far, 2**count)


@pytest.mark.parametrize("count", range(11))
def test_p_equals_enumeration(count):
    for n01 in range(count + 1):
        # One rounding of an exact fraction.
        assert exact_sign_test(n01, count - n01) == pytest.approx(float(enumerated(n01, count - n01)), rel=1e-15)


def test_large_counts_neither_underflow_nor_overflow():
    assert 0 < exact_sign_test(400, 600) < 1e-9
    assert exact_sign_test(7000, 7000) == 1.0
    assert exact_sign_test(0, 3000) == 0.0 or exact_sign_test(0, 3000) > 0
    assert exact_sign_test(5, 0) == 2 / 2**5


def test_difference_and_standard_error():
    count = 50
    a = [random.random() < 0.6 for _ in range(count)]
    b = [x if random.random() < 0.7 else not x for x in a]
    result = paired_comparison(a, b)
    differences = [int(x) - int(y) for x, y in zip(a, b, strict=True)]
    mean = sum(differences) / count
    variance = sum((d - mean) ** 2 for d in differences) / count
    assert result["difference"] == pytest.approx(mean, abs=1e-12)
    assert result["standard_error"] == pytest.approx(math.sqrt(variance / count), abs=1e-12)
    assert result["n01"] == differences.count(-1) and result["n10"] == differences.count(1) and result["n"] == count
    swapped = paired_comparison(b, a)
    assert swapped["p"] == result["p"] and swapped["difference"] == -result["difference"]


def test_equal_runs():
    result = paired_comparison([True, False], [True, False])
    assert result == {"n": 2, "n01": 0, "n10": 0, "difference": 0.0, "standard_error": 0.0, "p": 1.0}


@pytest.mark.parametrize(("a", "b"), [([], []), ([True], [True, False])])
def test_runs_must_cover_the_same_rows(a, b):
    with pytest.raises(ValueError, match="both runs must cover the same rows"):
        paired_comparison(a, b)
