# SPDX-License-Identifier: Apache-2.0
"""Owners under Accelerate's DDP: given when model and optimizer are prepared, gathered when state is saved."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..._compat import accelerator_optimizers
from ...optim import MuonWithAuxAdam
from .prepare import muon_optimizers

# DDP modules that an Accelerator made, in that order: it keeps only the models inside.
_WRAPPED: weakref.WeakKeyDictionary[Any, list[weakref.ref[DistributedDataParallel]]] = weakref.WeakKeyDictionary()


def prepare(original: Callable[..., Any], accelerator: Any, *args: Any, **options: Any) -> Any:
    """Run `Accelerator.prepare`; then give owners to the matrices of each DDP model and its `MuonWithAuxAdam`.

    Collective where a `MuonWithAuxAdam` and its model are both prepared, in one call or in two.
    """
    result = original(accelerator, *args, **options)
    wrapped = _WRAPPED.setdefault(accelerator, [])
    for item in result if isinstance(result, tuple) else (result,):
        if isinstance(item, nn.Module):
            wrapped += [weakref.ref(ddp) for ddp in item.modules() if isinstance(ddp, DistributedDataParallel)]
    for optimizer in muon_optimizers(accelerator):
        for reference in wrapped:
            ddp = reference()
            if ddp is not None and optimizer.has_matrices_in(ddp):
                optimizer.dedicate_matrices(ddp)
    for wrapper in accelerator_optimizers(accelerator):
        inner = getattr(wrapper, "optimizer", None)
        if isinstance(inner, MuonWithAuxAdam):  # what the user holds is the wrapper
            wrapper.consolidate_state_dict = inner.consolidate_state_dict
    return result


def save_state(original: Callable[..., Any], accelerator: Any, *args: Any, **options: Any) -> Any:
    """Run `Accelerator.save_state` with all momentum at hand. Collective under DDP with owners.

    Accelerate builds the state on every rank and writes it on the main process (or one per machine).
    """
    on_each_node = accelerator.project_configuration.save_on_each_node
    keep = accelerator.is_local_main_process if on_each_node else accelerator.is_main_process
    optimizers = muon_optimizers(accelerator)
    for optimizer in optimizers:
        optimizer.gather_momentum(keep, allow_partial=True)
    try:
        return original(accelerator, *args, **options)
    finally:
        for optimizer in optimizers:
            optimizer.forbid_partial_state()
