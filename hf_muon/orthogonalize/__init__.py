# SPDX-License-Identifier: Apache-2.0
"""Orthogonalize matrices by Newton-Schulz iteration: the one computation that makes Muon what it is."""

from __future__ import annotations

from .coefficients import COEFFICIENTS, coefficient_rows
from .cost import ns_flops, resolve_method
from .dispatch import resolve_dtype, stack_size
from .newton_schulz import TINY, newton_schulz, newton_schulz_many

__all__ = [
    "COEFFICIENTS",
    "TINY",
    "coefficient_rows",
    "newton_schulz",
    "newton_schulz_many",
    "ns_flops",
    "resolve_dtype",
    "resolve_method",
    "stack_size",
]
