# SPDX-License-Identifier: Apache-2.0
"""Around Accelerate's FSDP2 preparation: take the Muon matrices out, let it shard the rest, put them back owned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from ..._compat import accelerator_optimizers, mark_prepared
from ...checkpoint import install_model_doors, verify_checkpoint
from ...checkpoint.integrity import agree
from ...distributed import DetachedMatrix, OwnedDTensor, Placement, attach, detach, find_runtime, put_back
from ...optim import MuonWithAuxAdam
from .settings import OwnerSettings, read_settings, refuse_unsupported, resolve_mode

logger = logging.getLogger("hf_muon.accelerate")


def prepare_fsdp2(original: Callable[..., Any], accelerator: Any, *args: Any) -> Any:
    """Run Accelerate's own `_prepare_fsdp2` with the Muon matrices dedicated to owners. Collective.

    Args:
        original: the method of Accelerate.
        accelerator: the Accelerator.
        *args: what the user gave to `prepare`.

    Raises:
        NotImplementedError: a setting that owners do not support, in one sentence.
        RuntimeError: the ranks disagree about the matrices (on every rank).
    """
    model = next((item for item in args if isinstance(item, nn.Module)), None)
    optimizer = next((found for item in args if (found := muon_optimizer(item)) is not None), None)
    if model is None or optimizer is None:
        return original(accelerator, *args)
    mode = resolve_mode(accelerator.state.fsdp_plugin, optimizer.config.dmuon)
    refuse_unsupported(accelerator, model)
    args = tuple(_wrapped(accelerator, item) if muon_optimizer(item) is not None else item for item in args)
    if mode == "off" or not any(group["params"] for group in optimizer.param_groups if group["use_muon"]):
        result = original(accelerator, *args)
        optimizer.rebuild_state()
        return result
    settings = read_settings(accelerator, mode, optimizer.config)
    groups = list(optimizer.param_groups)
    detached = _take_out(model, optimizer)
    matrix_of = {id(matrix.parameter): matrix for matrix in detached}
    with _without_muon_groups(optimizer, groups), _restored_on_error(detached):
        result = original(accelerator, *args)
    prepared = next(item for item in result if isinstance(item, nn.Module))
    if find_runtime(prepared) is not None:
        put_back(detached)  # a second prepare of the same model
    else:
        _attach(accelerator, prepared, detached, settings)
        _point_groups_at(matrix_of, optimizer)
        logger.info("DMuon %s: %d matrices have owners.", mode.upper(), len(detached))
    optimizer.rebuild_state()
    optimizer.finite_reducer = largest_over_ranks
    install_model_doors(prepared)
    return result


def load_state(original: Callable[..., Any], accelerator: Any, *args: Any, **options: Any) -> Any:
    """Run `Accelerator.load_state`; check the files of the folder first. Collective.

    Under FSDP2 only rank 0 opens some of them: an error there alone would leave the other ranks waiting.

    Raises:
        ValueError: a file is truncated or missing; it is named, on every rank, and nothing was loaded.
    """
    folder = args[0] if args else options.get("input_dir")
    if folder is not None and accelerator.is_fsdp2 and any(map(muon_optimizer, accelerator_optimizers(accelerator))):
        agree(verify_checkpoint, folder)
    return original(accelerator, *args, **options)


def muon_optimizer(item: Any) -> MuonWithAuxAdam | None:
    """Return the `MuonWithAuxAdam` that `item` is or wraps, else None."""
    while isinstance(item, torch.optim.Optimizer):
        if isinstance(item, MuonWithAuxAdam):
            return item
        item = getattr(item, "optimizer", None)
    return None


def muon_optimizers(accelerator: Any) -> list[MuonWithAuxAdam]:
    """Return every `MuonWithAuxAdam` that `accelerator` has prepared, in that order."""
    return [found for item in accelerator_optimizers(accelerator) if (found := muon_optimizer(item)) is not None]


def largest_over_ranks(flag: torch.Tensor) -> torch.Tensor:
    """Return the largest `flag` of all ranks: one all-reduce of one element."""
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return flag


def _wrapped(accelerator: Any, optimizer: Any) -> Any:
    """Wrap without moving state: it may be on meta here, and is made anew for the sharded parameters anyway."""
    if isinstance(optimizer, MuonWithAuxAdam):
        optimizer = accelerator.prepare_optimizer(optimizer, device_placement=False)
        mark_prepared(optimizer)
    return optimizer


def _take_out(model: nn.Module, optimizer: MuonWithAuxAdam) -> list[DetachedMatrix]:
    if find_runtime(model) is None:
        muon = {id(p) for group in optimizer.param_groups if group["use_muon"] for p in group["params"]}
        detached = detach(model, lambda name, parameter: id(parameter) in muon)
        if len(detached) < len(muon):
            put_back(detached)
            raise ValueError(
                f"the Muon parameters must all be trainable parameters of the model; got {len(muon)} of which the"
                f" model has {len(detached)}. Prepare the model together with its own optimizer."
            )
        return detached
    sites: dict[int, DetachedMatrix] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if isinstance(parameter, OwnedDTensor):
                full_name = f"{prefix}.{name}" if prefix else name
                entry = sites.setdefault(id(parameter), DetachedMatrix(full_name, cast(nn.Parameter, parameter), []))
                entry.sites.append((module, name))
                delattr(module, name)
    return list(sites.values())


@contextmanager
def _without_muon_groups(optimizer: MuonWithAuxAdam, groups: list[dict[str, Any]]) -> Iterator[None]:
    """Hide the Muon groups: Accelerate re-maps every optimizer parameter by its address in the model."""
    optimizer.param_groups = [group for group in groups if not group["use_muon"]]
    try:
        yield
    finally:
        rest = iter(optimizer.param_groups)
        optimizer.param_groups = [group if group["use_muon"] else next(rest) for group in groups]


@contextmanager
def _restored_on_error(detached: list[DetachedMatrix]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        put_back(detached)
        raise


def _attach(accelerator: Any, model: nn.Module, detached: list[DetachedMatrix], settings: OwnerSettings) -> None:
    if settings.only_rank_zero_has_weights and not accelerator.is_main_process:
        for matrix in detached:
            matrix.parameter = _without_values(matrix.parameter)
    placement = Placement(
        reshard_after_forward=settings.reshard_after_forward,
        master_dtype=torch.float32 if settings.upcast else None,
        rates=settings.rates,
        ns_dtype=settings.ns_dtype,
    )  # the dtypes of gathered copies and of gradients are read from what Accelerate gave to fully_shard
    attach(model, detached, training_mesh(accelerator, model), placement)


def _without_values(parameter: nn.Parameter) -> nn.Parameter:
    empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    empty.__dict__.update(parameter.__dict__)
    return empty


def training_mesh(accelerator: Any, model: nn.Module) -> Any:
    """Return the mesh over which Accelerate sharded `model`: `(shard,)` or `(replicate, shard)`.

    The very mesh of FSDP2's parameters where there are any, so that clipping sees one mesh.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return parameter.device_mesh
    whole = accelerator.torch_device_mesh
    if whole is not None:
        return whole[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    return init_device_mesh(accelerator.device.type, (accelerator.num_processes,))


def _point_groups_at(matrix_of: dict[int, DetachedMatrix], optimizer: MuonWithAuxAdam) -> None:
    """Exchange the parameters of the Muon groups for the owned ones; everything else in the groups stays."""
    for group in optimizer.param_groups:
        if group["use_muon"]:
            sites = [matrix_of[id(parameter)].sites[0] for parameter in group["params"]]
            group["params"] = [getattr(module, attribute) for module, attribute in sites]
