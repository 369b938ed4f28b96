# SPDX-License-Identifier: Apache-2.0
"""Which parameter is updated by which algorithm: rules, matrix views, groups."""

from .fused import known_layouts
from .groups import build_param_groups
from .tagging import (
    LOW_COVERAGE,
    ParameterRow,
    Summary,
    apply_tags,
    check_coverage,
    explain_parameters,
    summarize,
    tag_parameters,
    user_choice,
)
from .views import MatrixView

__all__ = [
    "LOW_COVERAGE",
    "MatrixView",
    "ParameterRow",
    "Summary",
    "apply_tags",
    "build_param_groups",
    "check_coverage",
    "explain_parameters",
    "known_layouts",
    "summarize",
    "tag_parameters",
    "user_choice",
]
