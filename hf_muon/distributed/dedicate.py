# SPDX-License-Identifier: Apache-2.0
"""Give matrices a dedicated owner: detach them, let FSDP2 shard the rest, attach them owned."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from .._compat import fsdp_precision
from .collectives import Communicator, RankGrid
from .hooks import attach_hooks
from .owned import OwnedDTensor, OwnerLayout, Part, own, own_parameter
from .ownership import Matrix, OwnershipPlan, build_plan
from .rates import read_rates, warn_of_other_device, work_on
from .runtime import DMuonRuntime, find_runtime
from .standard import from_rank_zero
from .unit import OwnedMatrix, Unit
from .validation import compare_ranks

Predicate = Callable[[str, nn.Parameter], bool]
FAILURE_TIMEOUT = timedelta(seconds=30)  # how long a rank that failed waits for the others to hear of it


@dataclass(eq=False)
class DetachedMatrix:
    """A parameter taken out of its modules, with the places to put it back."""

    name: str
    parameter: nn.Parameter
    sites: list[tuple[nn.Module, str]]


@dataclass(frozen=True)
class Placement:
    """How `attach` lays the matrices out.

    Args:
        reshard_after_forward: True is Z3, False is Z2.
        param_dtype: dtype of the gathered copies; None: the wrapped module's mixed-precision policy, else the
            parameter's own.
        reduce_dtype: dtype of gradients on the wire; None: the policy's, else `param_dtype`.
        master_dtype: dtype of the owner's weights; None keeps the parameter's own.
        timeout: limit for one wait on the CPU; None: the process group's.
        rates: file of measured rates that the owners are balanced by; None: FLOPs. Ranks must agree on its contents.
        ns_dtype: dtype of the Newton-Schulz products, to tell whether the rates are those of this run.
    """

    reshard_after_forward: bool = True
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    timeout: timedelta | None = None
    rates: str | os.PathLike[str] | None = field(default=None, repr=False)  # ranks compare what it holds, not its path
    ns_dtype: str = field(default="auto", repr=False)


@contextmanager
def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool = True,
    predicate: Predicate | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    rates: str | os.PathLike[str] | None = None,
) -> Iterator[nn.Module]:
    """Give matrices a dedicated owner; the layer below `hf_muon.dedicate_params`, which explains the arguments.

    Collective over `mesh`. Here `state_dict()` afterwards holds the owned tensors themselves; the public one also
    installs what turns them into standard tensors.

    Raises:
        ValueError: no parameter is chosen, a matrix cannot be owned, or the mesh has more than two dimensions.
        RuntimeError: the ranks disagree or one failed (raised on all of them).
    """
    grid = RankGrid(mesh)
    try:
        detached = detach(model, predicate)
    except ValueError:
        tell_other_ranks(mesh)
        raise
    placement = Placement(reshard_after_forward, param_dtype, reduce_dtype, rates=rates)
    # fully_shard replaces the other Parameters by new ones without the tags that an optimizer asks for.
    attributes = {name: dict(parameter.__dict__) for name, parameter in model.named_parameters()}
    try:
        yield model
    except Exception:
        put_back(detached)
        tell_other_ranks(mesh)
        raise
    except BaseException:  # an interrupt must not start a collective
        put_back(detached)
        raise
    attach(model, detached, grid.mesh, placement)
    for name, parameter in model.named_parameters():
        _copy_attributes(attributes.get(name, {}), parameter)


def detach(model: nn.Module, predicate: Predicate | None = None) -> list[DetachedMatrix]:
    """Take the chosen parameters out of `model`, so that `fully_shard` does not see them. Not a collective.

    Only trainable parameters of two or three dimensions qualify. A tensor registered at several places is one matrix.

    Raises:
        ValueError: nothing is chosen, or the model has owned parameters already.
    """
    if find_runtime(model) is not None:
        raise ValueError("model must not have dedicated parameters already; got one that has. Dedicate them once.")
    choose = predicate or _is_tagged
    found: dict[int, DetachedMatrix] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{prefix}.{attribute}" if prefix else attribute
            if id(parameter) in found:
                found[id(parameter)].sites.append((module, attribute))
            elif parameter.requires_grad and choose(name, parameter):
                _check_matrix(name, parameter)
                found[id(parameter)] = DetachedMatrix(name, parameter, [(module, attribute)])
    if not found:
        raise ValueError(
            "predicate must choose at least one trainable parameter; got none. "
            "Call hf_muon.tag_parameters(model) first, or pass predicate=."
        )
    for matrix in found.values():
        for module, attribute in matrix.sites:
            setattr(module, attribute, None)  # keeps its place among the module's parameters
    return list(found.values())


def put_back(detached: list[DetachedMatrix]) -> None:
    """Undo `detach`."""
    for matrix in detached:
        for module, attribute in matrix.sites:
            setattr(module, attribute, matrix.parameter)


def attach(
    model: nn.Module,
    detached: list[DetachedMatrix],
    mesh: DeviceMesh,
    placement: Placement | None = None,
) -> DMuonRuntime:
    """Put the matrices back, owned, and start the runtime. Collective over `mesh`.

    Weights come from their owner's copy. Where some ranks hold meta tensors (RAM-efficient loading), they come from
    grid position 0; where all do, owners get uninitialised memory, to be loaded through `from_standard`.

    Args:
        model: the root module, after its `fully_shard` calls.
        detached: what `detach` returned, on every rank for the same model.
        mesh: the mesh of `fully_shard`.
        placement: mode and dtypes.

    Returns:
        The runtime. `runtime.replaced[id(old_parameter)]` is the owned parameter for an optimizer's groups.

    Raises:
        RuntimeError: the ranks disagree (raised on all of them).
        ValueError: a unit mixes dtypes.
    """
    placement = placement or Placement()
    grid = RankGrid(mesh)
    comm = Communicator(grid, _device_of(mesh), placement.timeout)
    has_values = not any(matrix.parameter.is_meta for matrix in detached)
    try:
        homes = assign_units(model, detached)
        plan = make_plan(detached, homes, grid, placement)
    except Exception as error:
        put_back(detached)
        try:
            compare_ranks(comm, None, has_values)
        except RuntimeError:
            raise error from None
        raise
    try:
        reports = compare_ranks(comm, plan, has_values)
    except BaseException:
        put_back(detached)
        raise
    return start_runtime(model, detached, plan, homes, comm, placement, [report.has_values for report in reports])


def start_runtime(
    model: nn.Module,
    detached: list[DetachedMatrix],
    plan: OwnershipPlan,
    homes: dict[str, str],
    comm: Communicator,
    placement: Placement,
    sources: list[bool],
) -> DMuonRuntime:
    """Put the matrices back by a plan that all ranks share: what `attach` does after the comparison.

    Args:
        model: the root module, after its `fully_shard` calls.
        detached: what `detach` returned.
        plan: the ownership plan, known to be the same on all ranks.
        homes: FQN of the unit of every matrix.
        comm: the communicator.
        placement: mode and dtypes.
        sources: which grid positions have the weights.
    """
    matrices, replaced = _own_all(detached, plan, comm, placement, sources)
    units = _make_units(model, matrices, homes, comm, placement)
    runtime = DMuonRuntime(model, units, plan, comm, replaced)
    attach_hooks(runtime)
    return runtime


def tell_other_ranks(mesh: DeviceMesh) -> None:
    """Say that this rank failed before `attach`, so that ranks which wait there raise as well. Collective."""
    comm = Communicator(RankGrid(mesh), _device_of(mesh), FAILURE_TIMEOUT)
    with contextlib.suppress(RuntimeError):  # what is raised here for every rank; this one has its own error
        compare_ranks(comm, None, False)


def _is_tagged(name: str, parameter: nn.Parameter) -> bool:
    return bool(getattr(parameter, "use_muon", False))


def _check_matrix(name: str, parameter: nn.Parameter) -> None:
    flattened = bool(getattr(getattr(parameter, "muon_view", None), "flatten", False))
    if parameter.ndim not in (2, 3) and not (flattened and parameter.ndim > 3):
        raise ValueError(
            f"{name} must have 2 dimensions (or 3, batch first) to get an owner; got {parameter.ndim}. "
            "Leave it out of the predicate."
        )
    if not parameter.is_floating_point():
        raise ValueError(f"{name} must be floating point to get an owner; got {parameter.dtype}.")


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def assign_units(model: nn.Module, detached: list[DetachedMatrix]) -> dict[str, str]:
    """Return the unit's FQN of every matrix: the innermost wrapped module that contains all its places."""
    paths: dict[nn.Module, list[str]] = {}

    def walk(module: nn.Module, name: str, chain: tuple[str, ...]) -> None:
        if isinstance(module, FSDPModule) and name:
            chain = (*chain, name)
        known = paths.get(module)
        paths[module] = list(chain) if known is None else [a for a, b in zip(known, chain, strict=False) if a == b]
        for child_name, child in module.named_children():
            walk(child, f"{name}.{child_name}" if name else child_name, chain)

    walk(model, "", ())
    homes = {}
    for matrix in detached:
        chains = [paths[module] for module, _ in matrix.sites]
        shared = chains[0]
        for chain in chains[1:]:
            shared = [a for a, b in zip(shared, chain, strict=False) if a == b]
        homes[matrix.name] = shared[-1] if shared else ""
    return homes


def make_plan(
    detached: list[DetachedMatrix],
    homes: dict[str, str],
    grid: RankGrid,
    placement: Placement,
    device_type: str | None = None,
) -> OwnershipPlan:
    """Choose the owners of detached matrices on a grid, by the costs of its kind of device. Not a collective.

    Raises:
        ValueError: the file of rates cannot be read.
    """
    rates = None if placement.rates is None else read_rates(placement.rates)
    if rates is not None and grid.position == 0:
        warn_of_other_device(rates, _device_of(grid.mesh), placement.ns_dtype)
    work = work_on(device_type or grid.mesh.device_type, rates)
    rows = []
    for matrix in detached:
        parameter = matrix.parameter
        dtype = placement.master_dtype or parameter.dtype
        view = getattr(parameter, "muon_view", None)
        rows.append(
            Matrix.of_parameter(
                matrix.name, parameter.shape, homes[matrix.name], view=view, element_size=dtype.itemsize, work=work
            )
        )
    dtypes = sorted({str(matrix.parameter.dtype) for matrix in detached})
    settings = f"{placement} {dtypes}" + ("" if rates is None else f" rates {rates.digest()}")
    return build_plan(rows, replicate=grid.replicate, shard=grid.shard, settings=settings, split_stacks=True)


def _own_all(
    detached: list[DetachedMatrix],
    plan: OwnershipPlan,
    comm: Communicator,
    placement: Placement,
    has_values: list[bool],
) -> tuple[list[OwnedMatrix], dict[int, OwnedDTensor]]:
    matrices, replaced = [], {}
    from_zero = has_values[0] and not all(has_values)
    parts: dict[str, list[Part]] = {}
    for matrix, owner in zip(plan.matrices, plan.owners, strict=True):
        part = Part(owner, matrix.start, matrix.start + matrix.shape[0])
        parts.setdefault(matrix.name, []).append(part)
    for row in detached:
        old = row.parameter
        layout = OwnerLayout(row.name, comm.grid, tuple(parts[row.name]), old.shape)
        dtype = placement.master_dtype or old.dtype
        if layout.is_local and not old.is_meta:
            local = old.detach()[layout.rows].to(device=comm.device, dtype=dtype).contiguous()
            if local.untyped_storage().nbytes() > local.numel() * local.element_size():
                local = local.clone()  # do not keep a file's or a stack's whole storage alive
        else:
            local = torch.empty(layout.local_shape, dtype=dtype, device=comm.device)
        new = own_parameter(own(local, layout), old.requires_grad)
        _copy_attributes(old.__dict__, new)
        if from_zero:
            from_rank_zero(new, old if comm.grid.position == 0 else None)
        for module, attribute in row.sites:
            setattr(module, attribute, new)
        matrices.append(OwnedMatrix(new, row.sites))
        replaced[id(old)] = new
    return matrices, replaced


def _copy_attributes(attributes: dict[str, object], parameter: torch.Tensor) -> None:
    """Set what `parameter` lacks: `use_muon`, `muon_view`, the user's own marks."""
    for key, value in attributes.items():
        if not key.startswith("_") and key not in parameter.__dict__:
            setattr(parameter, key, value)


def _make_units(
    model: nn.Module,
    matrices: list[OwnedMatrix],
    homes: dict[str, str],
    comm: Communicator,
    placement: Placement,
) -> list[Unit]:
    by_unit: dict[str, list[OwnedMatrix]] = {"": []}
    for matrix in matrices:
        by_unit.setdefault(homes[matrix.parameter.owner_layout.name], []).append(matrix)
    units = []
    for name, module in model.named_modules():
        if name not in by_unit:
            continue
        members = by_unit[name]
        dtypes = {matrix.parameter.dtype for matrix in members}
        if len(dtypes) > 1:
            raise ValueError(
                f"{name or 'the root module'} must hold owned matrices of one dtype; got {sorted(map(str, dtypes))}. "
                "Cast the model first."
            )
        policy_param, policy_reduce = fsdp_precision(module)
        own_dtype = dtypes.pop() if dtypes else torch.float32
        param_dtype = placement.param_dtype or policy_param or own_dtype
        units.append(
            Unit(
                name,
                module,
                members,
                comm,
                param_dtype=param_dtype,
                reduce_dtype=placement.reduce_dtype or policy_reduce or param_dtype,
                reshard_after_forward=placement.reshard_after_forward,
            )
        )
    return units


__all__ = ["DetachedMatrix", "Placement", "attach", "dedicate_params", "detach", "put_back"]
