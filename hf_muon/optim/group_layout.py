# SPDX-License-Identifier: Apache-2.0
"""Turns what the caller gives (parameters, named parameters, groups) into Muon groups and AdamW groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..config import DEFAULT_BETAS, DEFAULT_EPS, MuonConfig
from ..param_groups.sites import true_shape
from ..param_groups.views import MatrixView
from .notices import shorten

MUON_KEYS = ("momentum", "nesterov", "ns_method", "ns_steps", "ns_coefficients", "ns_dtype", "adjust_lr_fn")
# Options that only make sense for the whole optimizer; in a group they would be silently without effect.
_WHOLE_OPTIMIZER_KEYS = {
    "muon_lr": "lr",
    "adam_lr": "lr",
    "muon_weight_decay": "weight_decay",
    "adam_weight_decay": "weight_decay",
}
_UNTAGGED = (
    "Call hf_muon.tag_parameters(model) first, or give groups with use_muon=True or False, or let"
    " hf_muon.OptimizerFactory do both."
)


def as_groups(params_or_groups: Any) -> list[dict[str, Any]]:
    """Return the caller's argument as a list of group dicts, each a shallow copy.

    Raises:
        TypeError: a single tensor, or dicts mixed with parameters.
        ValueError: nothing in it.
    """
    if isinstance(params_or_groups, Tensor):
        raise TypeError("params_or_groups must be an iterable of parameters or groups; got a single tensor.")
    if isinstance(params_or_groups, dict):
        raise TypeError("params_or_groups must be an iterable of parameters or groups; got a dict. Put it in a list.")
    items = list(params_or_groups)
    if not items:
        raise ValueError("params_or_groups must hold at least one parameter; got none. Is every parameter frozen?")
    kinds = {isinstance(item, dict) for item in items}
    if len(kinds) == 2:
        raise TypeError(
            "params_or_groups must be all groups or all parameters; got both. Put the parameters in groups."
        )
    return [dict(item) for item in items] if kinds == {True} else [{"params": items}]


def split_group(group: dict[str, Any], config: MuonConfig) -> list[dict[str, Any]]:
    """Return the groups that `group` stands for, complete with every option and checked.

    A group with `use_muon` stays one group. Without it the tags on the parameters decide: Muon, AdamW with decay,
    AdamW without decay (norms and biases, unless the group names its own `weight_decay`), in this order, empty ones
    left out; each keeps the group's options.

    Args:
        group: `params` (tensors or (name, tensor) pairs) and any options.
        config: gives the options that the group does not name.

    Raises:
        ValueError, TypeError, NotImplementedError: a parameter or option that cannot be used, by name.
    """
    group = dict(group)
    for key, meant in _WHOLE_OPTIMIZER_KEYS.items():
        if key in group:
            raise ValueError(f"{key!r} must not stand in a parameter group; got {group[key]!r}. Use {meant!r} there.")
    params, names = _params_and_names(group)
    views = group.pop("matrix_views", None)
    if views is None:
        views = [getattr(param, "muon_view", None) or MatrixView() for param in params]
    if len(views) != len(params):
        raise ValueError(f"matrix_views must have one entry per parameter; got {len(views)} for {len(params)}.")
    labels = names or [f"params[{index}]" for index in range(len(params))]
    _check_params(params, labels)
    if "use_muon" in group:
        use_muon = group.pop("use_muon")
        if not isinstance(use_muon, bool):
            raise TypeError(f"use_muon must be True or False; got {use_muon!r}.")
        parts = [("muon" if use_muon else "adamw", list(range(len(params))))]
    else:
        parts = _parts_by_tag(params, labels, keep_decay="weight_decay" in group)
    result = []
    for kind, members in parts:
        part = dict(group)
        part["params"] = [params[i] for i in members]
        if names is not None:
            part["param_names"] = [names[i] for i in members]
        if kind == "muon":
            part["matrix_views"] = [views[i] for i in members]
            _check_matrices(part["params"], [labels[i] for i in members], part["matrix_views"])
        elif kind == "no_decay":
            part["weight_decay"] = 0.0
        part["use_muon"] = kind == "muon"
        result.append(_fill_options(part, config))
    return result


def check_lengths(groups: Iterable[dict[str, Any]]) -> None:
    """Check that every list of a group has one entry per parameter.

    Raises:
        ValueError: one has not.
    """
    for group in groups:
        for key in ("param_names", "matrix_views"):
            if key in group and len(group[key]) != len(group["params"]):
                raise ValueError(
                    f"{key} must have one entry per parameter; got {len(group[key])} for {len(group['params'])}."
                )


def label_of(group: dict[str, Any], group_index: int, index: int) -> str:
    """Return the name of a parameter for messages: its FQN, or its place."""
    names = group.get("param_names")
    return names[index] if names else f"param_groups[{group_index}]['params'][{index}]"


def _params_and_names(group: dict[str, Any]) -> tuple[list[Tensor], list[str] | None]:
    if "params" not in group:
        raise ValueError(f"a parameter group must have the key 'params'; got {sorted(group)}.")
    items = group.pop("params")
    if isinstance(items, set):
        raise TypeError("params must be an ordered collection; got a set. Use a list: order must not change by run.")
    items = [items] if isinstance(items, Tensor) else list(items)
    pairs = [item for item in items if isinstance(item, tuple)]
    names = group.pop("param_names", None)
    if pairs:
        if len(pairs) != len(items):
            raise ValueError(f"params must all be named or all be unnamed; got {len(pairs)} named of {len(items)}.")
        names, items = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    names = None if names is None else list(names)
    if names is not None and len(names) != len(items):
        raise ValueError(f"param_names must have one entry per parameter; got {len(names)} for {len(items)}.")
    return items, names


def _check_params(params: Sequence[Any], labels: Sequence[str]) -> None:
    seen: dict[int, str] = {}
    for param, label in zip(params, labels, strict=True):
        if not isinstance(param, Tensor):
            raise TypeError(f"{label} must be a tensor; got {type(param).__name__}.")
        if torch.is_complex(param):
            raise NotImplementedError(
                f"{label} must be real; got {param.dtype}. Store its torch.view_as_real form as the parameter."
            )
        if id(param) in seen:
            raise ValueError(f"{label} must be given once; it is the same tensor as {seen[id(param)]}. Drop one.")
        seen[id(param)] = label


def _check_matrices(params: Iterable[Tensor], labels: Iterable[str], views: Iterable[MatrixView]) -> None:
    for param, label, view in zip(params, labels, views, strict=True):
        shape = true_shape(param)
        if len(shape) < 2 or (len(shape) > 3 and not view.flatten):
            raise ValueError(
                f"{label} must have 2 or 3 dimensions to be on Muon; got shape {shape}."
                " Put it in a group with use_muon=False."
            )


def _parts_by_tag(params: list[Tensor], labels: list[str], keep_decay: bool) -> list[tuple[str, list[int]]]:
    tags = [getattr(param, "use_muon", None) for param in params]
    missing = [label for label, tag in zip(labels, tags, strict=True) if tag is None]
    if missing:
        raise ValueError(f"{shorten(missing)} must say which half updates them; got no use_muon tag. {_UNTAGGED}")
    kinds = [
        "muon" if tag else "adamw" if keep_decay or len(true_shape(param)) >= 2 else "no_decay"
        for param, tag in zip(params, tags, strict=True)
    ]
    parts = [(kind, [i for i, k in enumerate(kinds) if k == kind]) for kind in ("muon", "adamw", "no_decay")]
    # An empty group given by the caller stays, so that groups are the same on every rank.
    return [part for part in parts if part[1]] or [("adamw", [])]


def _fill_options(part: dict[str, Any], config: MuonConfig) -> dict[str, Any]:
    """Add the options that are not there and check those that are."""
    if part["use_muon"]:
        defaults = {key: getattr(config, key) for key in MUON_KEYS}
        defaults.update(lr=config.resolved_muon_lr, weight_decay=config.resolved_muon_weight_decay)
    else:
        defaults = {"betas": config.betas or DEFAULT_BETAS, "eps": DEFAULT_EPS if config.eps is None else config.eps}
        defaults.update(lr=config.resolved_adam_lr, weight_decay=config.resolved_adam_weight_decay)
    given = {key: part[key] for key in defaults if key in part}
    if isinstance(lr := given.get("lr"), Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr must be a number or a one-element tensor; got shape {tuple(lr.shape)}.")
        given["lr"] = float(lr)
    checked = dataclasses.replace(config, **given)  # the checks of MuonConfig, with its messages
    for key, default in defaults.items():
        if key not in part:
            part[key] = default
        elif not isinstance(part[key], Tensor):
            part[key] = getattr(checked, key)
    return part
