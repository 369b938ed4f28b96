# SPDX-License-Identifier: Apache-2.0
"""Doors of an optimizer other than `MuonWithAuxAdam`, which has them built in."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..distributed import reshard_units
from ..optim.owned_state import in_standard_layout

_MARK = "_hf_muon_door_handles"


def install_optimizer_doors(optimizer: torch.optim.Optimizer, model: nn.Module | None = None) -> None:
    """Make `optimizer.state_dict()` hand out state as FSDP2 would hold it. Safe to call twice.

    `MuonWithAuxAdam` does this by itself.

    Args:
        optimizer: any optimizer over owned parameters.
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
    return {**state_dict, "state": in_standard_layout(state_dict["state"])}


def _resharding(model: nn.Module) -> Callable[[torch.optim.Optimizer], None]:
    reference = weakref.ref(model)

    def reshard(_: torch.optim.Optimizer) -> None:
        present = reference()
        if present is not None:
            reshard_units(present)

    return reshard
