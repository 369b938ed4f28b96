# SPDX-License-Identifier: Apache-2.0
"""Parameter groups as DeepSpeed's engine needs them: names after its module replacement, experts apart."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...optim import MuonWithAuxAdam
from ...param_groups import MatrixView, explain_parameters


def refresh_groups(optimizer: MuonWithAuxAdam, model: nn.Module, *, has_experts: bool) -> None:
    """Bring names and views of every group up to date with `model`, and give experts groups of their own. In place.

    DeepSpeed may have put other parameters into the groups (AutoEP packs the experts of this rank into new tensors).
    Under expert parallelism each rank holds other experts, which are reduced over fewer ranks: DeepSpeed wants them in
    groups marked "moe" and named after their set of ranks.

    Args:
        optimizer: groups hold parameters of `model`.
        model: the module that DeepSpeed trains, before its optimizer is partitioned.
        has_experts: whether DeepSpeed found expert layers of its own kind.

    Raises:
        RuntimeError: a learning-rate scheduler exists already and would miss the groups of the experts.
    """
    if has_experts:
        _split_experts(optimizer)
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    views: dict[str, MatrixView] | None = None
    for group in optimizer.param_groups:
        group["param_names"] = [known.get(id(p), f"unnamed.{i}") for i, p in enumerate(group["params"])]
        if not group["use_muon"]:
            continue
        if views is None and any(getattr(p, "muon_view", None) is None for p in group["params"]):
            split, conv = optimizer.config.resolved_matrix_split, optimizer.config.conv
            views = {row.name: row.view for row in explain_parameters(model, matrix_split=split, conv=conv)}
        group["matrix_views"] = [
            getattr(p, "muon_view", None) or (views or {}).get(name, MatrixView())
            for p, name in zip(group["params"], group["param_names"], strict=True)
        ]
        remember_views(group)


def remember_views(group: dict[str, Any]) -> None:
    """Write the views of a Muon group on its parameters: DeepSpeed may change the order and number of these."""
    for parameter, view in zip(group["params"], group.get("matrix_views") or (), strict=False):
        parameter.muon_view = view


def _split_experts(optimizer: MuonWithAuxAdam) -> None:
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    before = len(optimizer.param_groups)
    for index, group in enumerate(optimizer.param_groups):
        group.setdefault("name", f"{'muon' if group['use_muon'] else 'adamw'}-{index}")
    groups = split_params_into_different_moe_groups_for_optimizer(list(optimizer.param_groups))
    optimizer.param_groups[:] = [group for group in groups if group["params"]]
    if len(optimizer.param_groups) != before and any("initial_lr" in group for group in optimizer.param_groups):
        raise RuntimeError(
            "The learning-rate scheduler must be made after DeepSpeed split the experts into groups of their own;"
            f" {before} groups became {len(optimizer.param_groups)}. Make it from the optimizer that prepare() or"
            " deepspeed.initialize() returns."
        )
