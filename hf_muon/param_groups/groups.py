# SPDX-License-Identifier: Apache-2.0
"""Turn routing rows into the groups that `MuonWithAuxAdam` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .tagging import ParameterRow


def build_param_groups(
    rows: Sequence[ParameterRow],
    model: nn.Module,
    *,
    muon: Mapping[str, Any],
    adamw: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Build up to three groups: Muon, AdamW with weight decay, AdamW without.

    The order is fixed and each group keeps the order of `rows`, so every rank builds the same. An empty group is
    left out; rows come from shapes and names only, so that happens on all ranks alike.

    Args:
        rows: `explain_parameters(model)`.
        model: the model the rows describe.
        muon: options of the Muon group (`lr`, `weight_decay`, `momentum`, ...).
        adamw: options of both AdamW groups; `weight_decay` becomes 0.0 in the second.

    Raises:
        ValueError: the rows do not cover each trainable tensor of the model exactly once.
    """
    by_name = dict(model.named_parameters())
    _check_cover(rows, by_name)
    matrices = [row for row in rows if row.is_muon]
    decayed = [row for row in rows if not row.is_muon and row.decay]
    plain = [row for row in rows if not row.is_muon and not row.decay]
    groups: list[dict[str, Any]] = [
        {**_members(matrices, by_name), "matrix_views": [row.view for row in matrices], "use_muon": True, **muon},
        {**_members(decayed, by_name), "use_muon": False, **adamw},
        {**_members(plain, by_name), "use_muon": False, **adamw, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _members(rows: Sequence[ParameterRow], by_name: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    return {"params": [by_name[row.name] for row in rows], "param_names": [row.name for row in rows]}


def _check_cover(rows: Sequence[ParameterRow], by_name: Mapping[str, nn.Parameter]) -> None:
    names = [row.name for row in rows]
    trainable = {name for name, parameter in by_name.items() if parameter.requires_grad}
    missing, extra = sorted(trainable - set(names)), sorted(set(names) - trainable)
    if missing or extra or len(names) != len(set(names)):
        raise ValueError(
            "rows must name every trainable tensor of the model exactly once; "
            f"got {len(missing)} missing {missing[:3]}, {len(extra)} unknown or frozen {extra[:3]}. "
            "Call explain_parameters after freezing."
        )
