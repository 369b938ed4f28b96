# SPDX-License-Identifier: Apache-2.0
"""`dedicate_params` as users call it: owners, and a model whose `state_dict()` is an ordinary FSDP2 one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import distributed
from .model_doors import install_model_doors


@contextmanager
def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool = True,
    predicate: Callable[[str, nn.Parameter], bool] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    rates: str | os.PathLike[str] | None = None,
) -> Iterator[nn.Module]:
    """Give matrices a dedicated owner; put the `fully_shard` calls inside. Collective over `mesh`.

        hf_muon.tag_parameters(model)
        with hf_muon.dedicate_params(model, mesh):
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = hf_muon.MuonWithAuxAdam(model.named_parameters(), lr=1e-3)

    Inside, FSDP2 sees a model without these matrices. Afterwards `model` is trained and saved as any FSDP2 model:
    `state_dict()` hands out even `Shard(0)` DTensors (collective: call it on all ranks), `load_state_dict()` takes
    them back. The same holds for the state of `MuonWithAuxAdam`; for another optimizer call
    `hf_muon.checkpoint.install_optimizer_doors(optimizer, model)` once.

    Args:
        model: the root module, on the training device or on meta.
        mesh: the mesh given to `fully_shard`: 1-D (shard) or 2-D (replicate, shard).
        reshard_after_forward: True gathers matrices again for backward (Z3), False keeps them (Z2). Need not equal
            FSDP2's own choice.
        predicate: `(name, parameter) -> bool`, which parameters get an owner; the default asks `parameter.use_muon`.
        param_dtype: dtype of gathered copies; None: what `fully_shard`'s policy says.
        reduce_dtype: dtype of gradients on the wire; None: what the policy says, else `param_dtype`.
        rates: file that `hf-muon calibrate` wrote: owners are balanced by its seconds instead of by FLOPs. All ranks
            need the same contents.

    Raises:
        ValueError: no parameter is chosen, a matrix cannot be owned, the mesh has more than two dimensions, or the
            file of rates cannot be read.
        RuntimeError: the ranks disagree (raised on all of them).
    """
    with distributed.dedicate_params(
        model,
        mesh,
        reshard_after_forward=reshard_after_forward,
        predicate=predicate,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        rates=rates,
    ):
        yield model
    install_model_doors(model)
