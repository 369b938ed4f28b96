# SPDX-License-Identifier: Apache-2.0
"""Doors of an optimizer: state of owned parameters leaves as ordinary sharded DTensors.

The way back needs no door for `MuonWithAuxAdam`: it copies a sharded or whole tensor into the layout of its parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..distributed import OwnedDTensor, find_runtime, to_standard

_MARK = "_hf_muon_door_handles"


def install_optimizer_doors(optimizer: torch.optim.Optimizer, model: nn.Module | None = None) -> None:
    """Make `optimizer.state_dict()` hand out state as FSDP2 would hold it. Safe to call twice.

    Args:
        optimizer: a `MuonWithAuxAdam` over owned parameters.
        model: its model, if `torch.distributed.checkpoint` will read the optimizer: a forward without backward (an
            evaluation) leaves gathered parameters registered, under which it would not find the optimizer's. They are
            freed first.

    Note:
        From then on `state_dict()` is collective over the training mesh.
    """
    for handle in optimizer.__dict__.pop(_MARK, ()):
        handle.remove()
    handles = [optimizer.register_state_dict_post_hook(_hand_out)]
    if model is not None:
        handles.append(optimizer.register_state_dict_pre_hook(_resharding(model)))
    optimizer.__dict__[_MARK] = tuple(handles)


def _hand_out(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    # The inner dicts are the optimizer's own: build new ones. Sorted numbers give every rank the same order.
    state = state_dict["state"]
    numbers = sorted(key for key in state if isinstance(key, int))
    others = [key for key in state if not isinstance(key, int)]
    new_state = {key: _converted(state[key]) for key in (*numbers, *others)}
    return {**state_dict, "state": new_state}


def _converted(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {key: to_standard(value) if isinstance(value, OwnedDTensor) else value for key, value in values.items()}


def _resharding(model: nn.Module) -> Callable[[torch.optim.Optimizer], None]:
    reference = weakref.ref(model)

    def reshard(_: torch.optim.Optimizer) -> None:
        present = reference()
        if present is not None:
            reshard_units(present)

    return reshard


def reshard_units(model: nn.Module) -> None:
    """Free what forwards without a backward left gathered, in FSDP2's units and in ours. No communication."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    runtime = find_runtime(model)
    if runtime is not None:
        runtime.reshard()
