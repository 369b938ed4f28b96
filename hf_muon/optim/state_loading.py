# SPDX-License-Identifier: Apache-2.0
"""Matches a saved optimizer state to the present parameters, by name where both sides have names.

Nothing is changed while matching: an error leaves the optimizer as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..config import MuonConfig, coerce_options
from .group_layout import label_of
from .notices import logger, shorten
from .parameter_state import State, state_keys

# Keys of a group that describe the present model; a checkpoint never overrides them.
LIVE_KEYS = ("params", "param_names", "matrix_views", "use_muon")


@dataclass
class LoadPlan:
    """What to load: group dicts in the present layout, and per parameter its saved state or None (starts fresh)."""

    groups: list[dict[str, Any]]
    states: list[tuple[Tensor, bool, State | None]] = field(default_factory=list)

    def as_state_dict(self) -> dict[str, Any]:
        """Return the groups as a state_dict without state; `torch.optim.Optimizer.load_state_dict` takes it."""
        start, packed = 0, []
        for group in self.groups:
            count = len(group["params"])
            packed.append({**group, "params": list(range(start, start + count))})
            start += count
        return {"state": {}, "param_groups": packed}


@dataclass(frozen=True)
class _Saved:
    """One parameter of a checkpoint."""

    key: Any
    name: str | None
    group: int


def make_plain(group: dict[str, Any]) -> None:
    """Leave only plain values in a group of a state dict, in place; see `MuonWithAuxAdam.state_dict`."""
    if "matrix_views" in group:
        group["matrix_views"] = None
    if not isinstance(rows := group.get("ns_coefficients", ""), str):
        group["ns_coefficients"] = "; ".join(" ".join(map(repr, row)) for row in rows)


def plan_load(live_groups: Sequence[dict[str, Any]], state_dict: Mapping[str, Any]) -> LoadPlan:
    """Match `state_dict` to `live_groups`.

    Parameters are matched by name where the checkpoint and the optimizer have names, whatever their order and
    grouping; else by position, which needs groups of the same sizes. Unmatched parameters start fresh and unmatched
    saved names are left out, with one log line each. Hyperparameters of a group come from the saved group that holds
    most of its parameters and belongs to the same half.

    Args:
        live_groups: the optimizer's `param_groups`.
        state_dict: of `MuonWithAuxAdam`, of `torch.optim.AdamW` (its averages are taken by the AdamW half), or as
            `torch.distributed.checkpoint` hands it, with names in the place of numbers.

    Raises:
        ValueError: not a state_dict, groups that do not match by position, or a shape that differs, by name.
    """
    if "param_groups" not in state_dict or "state" not in state_dict:
        raise ValueError(f"state_dict must have the keys 'state' and 'param_groups'; got {sorted(state_dict)}.")
    saved_groups = state_dict["param_groups"]
    matches = _match(live_groups, saved_groups)
    plan = LoadPlan([_merge_group(g, saved_groups, m) for g, m in zip(live_groups, matches, strict=True)])
    fresh: list[str] = []
    other_half: list[str] = []
    for index, (group, found) in enumerate(zip(live_groups, matches, strict=True)):
        for place, (param, entry) in enumerate(zip(group["params"], found, strict=True)):
            label = label_of(group, index, place)
            state = None if entry is None else state_dict["state"].get(entry.key)
            if not state:
                fresh.append(label)
            elif any(key not in state for key in state_keys(group["use_muon"])):
                other_half.append(label)
                state = None
            else:
                _check_shapes(label, param, state, group["use_muon"])
            plan.states.append((param, group["use_muon"], state or None))
    if fresh:
        logger.warning("The checkpoint has no optimizer state for %s: starts fresh.", shorten(fresh))
    if other_half:
        logger.warning(
            "The checkpoint holds the state of another optimizer for %s (%d parameters): it starts fresh.",
            shorten(other_half),
            len(other_half),
        )
    return plan


def _match(live_groups: Sequence[dict[str, Any]], saved_groups: Sequence[Any]) -> list[list[_Saved | None]]:
    saved = [[_Saved(key, name, i) for key, name in _keys_and_names(g)] for i, g in enumerate(saved_groups)]
    by_name = {entry.name: entry for group in saved for entry in group if entry.name is not None}
    all_named = sum(len(group) for group in saved) == len(by_name)
    live_named = all("param_names" in group or not group["params"] for group in live_groups)
    same_sizes = [len(group) for group in saved] == [len(group["params"]) for group in live_groups]
    live_names = {name for group in live_groups for name in group.get("param_names", ())}
    # torch.distributed.checkpoint hands over its own FQNs in the present order; they may differ from ours by a prefix.
    foreign_names = all(isinstance(entry.key, str) for group in saved for entry in group)
    foreign_names = foreign_names and live_names.isdisjoint(by_name)
    if all_named and live_named and not (foreign_names and same_sizes):
        if gone := [name for name in by_name if name not in live_names]:
            logger.warning("The checkpoint has state of %s, not in this optimizer: left out.", shorten(gone))
        return [[by_name.get(name) for name in group.get("param_names", ())] for group in live_groups]
    if not same_sizes:
        raise ValueError(
            f"state_dict must have groups of the sizes {[len(g['params']) for g in live_groups]} when it carries no"
            f" parameter names; got {[len(group) for group in saved]}. Load a checkpoint with param_names (build both"
            " optimizers from model.named_parameters()), or start with a new optimizer."
        )
    return [list(group) for group in saved]


def _keys_and_names(group: Mapping[str, Any]) -> list[tuple[Any, str | None]]:
    keys = list(group["params"])
    if keys and all(isinstance(key, str) for key in keys):
        return [(key, key) for key in keys]
    names = group.get("param_names")
    if names is None or len(names) != len(keys):
        return [(key, None) for key in keys]
    return list(zip(keys, names, strict=True))


def _merge_group(live: dict[str, Any], saved_groups: Sequence[Any], found: list[_Saved | None]) -> dict[str, Any]:
    """Return the live group with the hyperparameters of the saved group that it comes from."""
    merged = dict(live)
    votes = Counter(entry.group for entry in found if entry is not None)
    for index, _ in votes.most_common():
        saved = saved_groups[index]
        # Groups of torch.optim.AdamW carry no use_muon: they belong to the AdamW half.
        if bool(saved.get("use_muon", False)) != live["use_muon"]:
            continue
        ours = "use_muon" in saved
        known = {*live, "initial_lr"}
        merged.update({k: v for k, v in saved.items() if k not in LIVE_KEYS and (ours or k in known)})
        break
    if "ns_coefficients" in merged:  # explicit ones were saved as a string
        text = {"ns_coefficients": merged["ns_coefficients"]}
        merged["ns_coefficients"] = MuonConfig(**coerce_options(text)).ns_coefficients
    return merged


def _check_shapes(label: str, param: Tensor, state: Mapping[str, Any], use_muon: bool) -> None:
    for key in state_keys(use_muon):
        if key != "step" and tuple(state[key].shape) != tuple(param.shape):
            raise ValueError(
                f"{label}: {key} must have the parameter's shape {tuple(param.shape)}; the checkpoint has"
                f" {tuple(state[key].shape)}. It was written by another model."
            )
