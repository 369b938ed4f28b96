# SPDX-License-Identifier: Apache-2.0
"""Which kind of parallelism a model is about to train under, and whether this version can train it."""

from __future__ import annotations

import enum
import functools
import logging

import torch
from torch import nn

from ..._compat import accelerate_state
from ...config import MuonConfig
from ...optim.data_parallel import NEEDS_FSDP2

logger = logging.getLogger("hf_muon.integrations.transformers")


class Backend(enum.Enum):
    """How parameters and gradients are spread over ranks."""

    SINGLE = "single"
    DDP = "ddp"
    FSDP1 = "fsdp1"
    FSDP2 = "fsdp2"
    DEEPSPEED = "deepspeed"
    TENSOR_PARALLEL = "tensor_parallel"
    LOAD_SHARDED = "load_sharded"


def detect_backend(model: nn.Module) -> Backend:
    """Return how `model` will train, from the model itself and from Accelerate's state; no communication."""
    if _is_tensor_parallel(model):
        return Backend.TENSOR_PARALLEL
    if getattr(model, "is_distributed_loading_by_transformers", False):
        return Backend.LOAD_SHARDED
    if any(_is_fsdp1(module) for module in model.modules()):
        return Backend.FSDP1
    if find_ddp(model):
        return Backend.DDP
    state = accelerate_state()
    kind = str(getattr(state, "distributed_type", "NO")).rpartition(".")[2]
    if kind == "DEEPSPEED":
        return Backend.DEEPSPEED
    if kind == "FSDP":
        version = getattr(getattr(state, "fsdp_plugin", None), "fsdp_version", 1)
        return Backend.FSDP2 if version == 2 else Backend.FSDP1
    if any(_mesh_axes(parameter) is not None for parameter in model.parameters()):
        return Backend.FSDP2
    return Backend.DDP if getattr(state, "num_processes", 1) > 1 else Backend.SINGLE


def find_ddp(model: nn.Module) -> list[nn.parallel.DistributedDataParallel]:
    """Return the DistributedDataParallel modules that `model` is or holds, in module order."""
    return [module for module in model.modules() if isinstance(module, nn.parallel.DistributedDataParallel)]


def check_supported(model: nn.Module, backend: Backend, config: MuonConfig) -> None:
    """Raise when `model` cannot be trained under `backend`; say once what is right but slow.

    Raises:
        NotImplementedError: a backend, parameter kind or option of later versions; names the alternative.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise NotImplementedError(
                f"{name} must be real; got {parameter.dtype}. Store its real and imaginary parts, or freeze it."
            )
    refusal = _REFUSALS.get(backend)
    if refusal is not None:
        raise NotImplementedError(refusal)
    if config.dmuon in ("z2", "z3") and backend is Backend.DDP:
        raise NotImplementedError(NEEDS_FSDP2.format(config.dmuon))
    if config.dmuon in ("z2", "z3") and backend is Backend.SINGLE:
        _say_once(f"dmuon={config.dmuon} has no effect on one process: every matrix is whole here.")
    notice = _NOTICES.get(backend)
    if notice is not None and config.dmuon == "off":
        _say_once(notice)


_REFUSALS = {
    Backend.FSDP1: (
        "FSDP must be version 2 for Muon; got version 1, whose flat parameters hide the matrices. Set"
        ' "fsdp_version": 2 in the Accelerate file or in fsdp_config.'
    ),
    Backend.TENSOR_PARALLEL: (
        "The model must hold whole matrices for Muon; got tensor parallel parameters. Load it without tp_plan and"
        " use FSDP2."
    ),
    Backend.LOAD_SHARDED: (
        "The model must be sharded by Accelerate for Muon; got one that transformers sharded at load time. Load it"
        " without distributed_config and use an Accelerate file with FSDP2."
    ),
}
_NOTICES = {
    Backend.DDP: "Under DDP with dmuon=off every rank orthogonalizes every matrix: right, but repeated work.",
    Backend.FSDP2: "Under FSDP2 with dmuon=off every rank gathers and orthogonalizes every matrix: right, but slow.",
}


@functools.cache
def _say_once(message: str) -> None:
    logger.info(message)


def _is_fsdp1(module: nn.Module) -> bool:
    return any(
        cls.__name__ == "FullyShardedDataParallel" and cls.__module__.startswith("torch.distributed.fsdp")
        for cls in type(module).__mro__
    )


def _is_tensor_parallel(model: nn.Module) -> bool:
    if (getattr(model, "tp_size", None) or 1) > 1:
        return True
    return any("tp" in (_mesh_axes(parameter) or ()) for parameter in model.parameters())


def _mesh_axes(parameter: torch.Tensor) -> tuple[str, ...] | None:
    """Return the mesh axis names of a DTensor, None for a plain tensor."""
    if type(parameter) in (torch.Tensor, nn.Parameter) or not torch.distributed.is_available():
        return None
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return None
    return tuple(parameter.device_mesh.mesh_dim_names or ())
