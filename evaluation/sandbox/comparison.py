# SPDX-License-Identifier: Apache-2.0
"""Compare two outputs as evalplus judges MBPP+: exactly, as sets, by presence, or within a tolerance.

References: the rules and the function names of evalplus 0.3 (evalplus/eval), Apache-2.0.
"""

from __future__ import annotations

import math
from typing import Any

_AS_SETS = {
    "similar_elements",
    "find_char_long",
    "common_in_nested_lists",
    "extract_singly",
    "larg_nnum",
    "intersection_array",
    "find_dissimilar",
    "Diff",
}
_BY_PRESENCE = {"check_str", "text_match_three", "text_starta_endb"}
_RELATIVE = 1e-7
_FLOAT_TOLERANCE = 1e-6  # for floats where the task gives no tolerance


def equal_outputs(name: str, output: Any, expected: Any, tolerance: float) -> bool:
    """Return whether a function's output counts as right.

    Args:
        name: the function; a few have a rule of their own.
        output: what the program returned.
        expected: what the reference returned for the same input.
        tolerance: absolute, for numbers; 0 leaves floats their default of 1e-6 and everything else exact.
    """
    if name == "are_equivalent" or (name == "sum_div" and output == 0):
        return True
    if name in _AS_SETS:
        return set(output) == set(expected)
    if name in _BY_PRESENCE and not isinstance(output, bool):
        return bool(expected) == (output is not None)
    if output == expected:
        return True
    if tolerance == 0 and _all_floats(expected):
        tolerance = _FLOAT_TOLERANCE
    return tolerance != 0 and type(output) is type(expected) and _close(output, expected, tolerance)


def _all_floats(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(item, float) for item in value)
    return isinstance(value, float)


def _close(output: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(expected, (list, tuple)):
        return len(output) == len(expected) and all(
            _close(a, b, tolerance) for a, b in zip(output, expected, strict=True)
        )
    if not isinstance(output, (int, float, complex)) or not isinstance(expected, (int, float, complex)):
        return False
    if any(isinstance(value, float) and not math.isfinite(value) for value in (output, expected)):
        return output == expected
    return abs(output - expected) <= tolerance + _RELATIVE * abs(expected)
