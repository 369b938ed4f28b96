# SPDX-License-Identifier: Apache-2.0
"""Find and replace tensors in what a module takes and returns: containers, named tuples, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch


def grad_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors inside `value` that require gradients, in a fixed order."""
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _map(value, collect)
    return found


def replace_grad_tensors(value: Any, replacements: list[torch.Tensor]) -> Any:
    """Return `value` with its gradient-requiring tensors replaced, in the order of `grad_tensors`.

    Containers on the way are copied, never changed; objects of other kinds (caches) are passed through untouched.
    """
    queue = iter(replacements)
    return _map(value, lambda _: next(queue))


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value) if value.requires_grad else value
    if isinstance(value, dict):
        changed = {key: _map(item, change) for key, item in value.items()}
        if all(changed[key] is value[key] for key in changed):
            return value
        result: Any = copy.copy(value)  # keeps OrderedDict, ModelOutput and their attributes
        for key, item in changed.items():
            result[key] = item
        return result
    if isinstance(value, (list, tuple)):
        items = [_map(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
        changed = {name: _map(item, change) for name, item in fields.items()}
        if all(changed[name] is fields[name] for name in fields):
            return value
        twin: Any = copy.copy(value)  # not dataclasses.replace: it would run __init__ again
        for name, item in changed.items():
            object.__setattr__(twin, name, item)
        return twin
    return value
