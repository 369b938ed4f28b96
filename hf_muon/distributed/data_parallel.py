# SPDX-License-Identifier: Apache-2.0
"""Owners under DistributedDataParallel: gradients go to the owner alone, updated matrices come back from it.

DDP's own reducer decides when a bucket is complete; its public communication hook decides what is sent. So no_sync,
unused parameters, static graphs, checkpointing and the order of buckets are DDP's business.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from .._compat import foreach_copy_, in_backward, queue_backward_callback, without_dynamo
from .._compat_ddp import has_comm_hook, joins_uneven_inputs
from .collectives import Communicator, RankGrid
from .exchange import Exchange, pack_parcels
from .owned_gradient import Content, NormTable, OwnedGradient
from .ownership import Matrix, OwnershipPlan, build_plan
from .rates import read_rates, warn_of_other_device, work_on
from .streams import Pending
from .validation import compare_ranks

EVERYONE = -1  # in the place of an owner
_OWNERS: weakref.WeakKeyDictionary[nn.Module, ReplicaOwners] = weakref.WeakKeyDictionary()


class Slot:
    """What DDP keeps as the state of its one communication hook: the present owners."""

    def __init__(self, owners: ReplicaOwners) -> None:
        self.owners = owners


class ReplicaOwners:
    """Who owns which matrix of one DDP model, and the traffic between owner and replicas.

    Args:
        ddp: the model; referred to weakly.
        parameters: the matrices, in plan order.
        plan: the ownership plan; positions are ranks of the model's process group.
        comm: its communicator.
    """

    def __init__(
        self, ddp: DistributedDataParallel, parameters: Sequence[nn.Parameter], plan: OwnershipPlan, comm: Communicator
    ) -> None:
        self.plan, self.comm, self.parameters = plan, comm, list(parameters)
        self.is_active = False  # since the first forward with gradients; until then every rank has all state
        self.on_start: list[Callable[[], None]] = []
        self.slot = Slot(self)
        self._ddp = weakref.ref(ddp)
        self._owner_of = {id(p): owner for p, owner in zip(parameters, plan.owners, strict=True)}
        dtypes = [parameter.dtype for parameter in parameters]
        self._parcels = pack_parcels(plan.owners, [p.numel() for p in parameters], dtypes)
        self._norm_dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self._expects_reduction = self._has_delivered = False
        self._hidden: list[tuple[nn.Parameter, OwnedGradient]] = []
        self._carried: dict[int, Content] = {}  # gradients of earlier backward passes of the same step
        reference = weakref.ref(self)

        def on_gradient(_: Tensor) -> None:
            owners = reference()
            if owners is not None and owners._has_delivered and owners._expects_reduction:
                owners._carry()

        # On every parameter that DDP reduces: it reads the gradients of unused ones when the first other one is ready.
        reduced = [p for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore]
        self._handles = [parameter.register_hook(on_gradient) for parameter in reduced if parameter.requires_grad]
        self._handles.append(ddp.register_forward_pre_hook(without_dynamo(self._before_forward)))
        self._handles.append(ddp.register_forward_hook(without_dynamo(self._after_forward), always_call=True))

    @property
    def position(self) -> int:
        """This rank's position in the process group."""
        return self.comm.grid.position

    def owner_rank(self, parameter: Tensor) -> int | None:
        """Return the owner's rank in the whole job, None for a parameter that has none."""
        owner = self._owner_of.get(id(parameter))
        return None if owner is None else self.comm.grid.global_rank(owner)

    def is_elsewhere(self, parameter: Tensor) -> bool:
        """Return whether another rank owns `parameter`."""
        return self._owner_of.get(id(parameter), self.position) != self.position

    def retire(self) -> None:
        """Give up ownership: from now on every gradient is all-reduced, as DDP does. Not a collective."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.parameters, self.is_active = [], [], False
        self._owner_of, self._carried = {}, {}

    # ------------------------------------------------------------------ weights and state

    def send_weights(self) -> Exchange:
        """Start to send every matrix from its owner to all ranks. Collective; `finish()` ends it."""
        weights = [parameter.detach() for parameter in self.parameters]
        shapes = [weight.shape for weight in weights]
        return Exchange(
            self.comm,
            "broadcast of updated matrices",
            self._parcels,
            shapes,
            get=weights.__getitem__,
            put=lambda index, value: weights[index].copy_(value),
        ).start()

    def send_state(
        self,
        dtypes: Sequence[torch.dtype],
        get: Callable[[int], Tensor],
        put: Callable[[int, Tensor], object],
        shapes: Sequence[torch.Size] | None = None,
    ) -> None:
        """Send one tensor of every matrix from its owner to all ranks. Collective.

        Args:
            dtypes: of the tensors, in plan order.
            get: returns the tensor of a matrix by its index in the plan; called on its owner.
            put: takes one that arrived, a view of a buffer; called on all other ranks.
            shapes: of the tensors; None: those of the matrices.
        """
        shapes = shapes or [parameter.shape for parameter in self.parameters]
        parcels = pack_parcels(self.plan.owners, [shape.numel() for shape in shapes], dtypes)
        Exchange(self.comm, "gathering of optimizer state", parcels, shapes, get, put).start().finish()

    # ------------------------------------------------------------------ gradients

    def _before_forward(self, ddp: Any, _: Any) -> None:
        if not self.parameters or not torch.is_grad_enabled() or in_backward():
            return
        if joins_uneven_inputs(ddp):
            raise RuntimeError(
                "DistributedDataParallel.join() must not be used with owners: a rank that ran out of data cannot take"
                " part in the optimizer's step. Give every rank as many batches, or set dmuon=off."
            )
        if ddp.require_backward_grad_sync:
            self._expects_reduction = True
            self._carried = {}  # of a backward that raised
        if not self.is_active:
            self.is_active = True
            for callback in self.on_start:
                callback()
        if ddp.gradient_as_bucket_view:  # DDP may lay its buckets out anew here, and then writes to every `.grad`
            for parameter in self.parameters:
                if isinstance(parameter.grad, OwnedGradient):
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def _after_forward(self, *_: Any) -> None:
        hidden, self._hidden = self._hidden, []
        for parameter, gradient in hidden:
            parameter.grad = gradient

    @torch.no_grad()
    def reduce_bucket(self, bucket: Any) -> torch.futures.Future:
        """Start the reductions of one bucket of DDP: owned gradients to their owner, the others to everyone.

        Returns:
            A future of the bucket's buffer, in which this rank's share is averaged and the rest is undefined.
        """
        buffer = bucket.buffer()
        buffer.div_(self.comm.grid.size)  # first, as DDP does
        pending: list[Pending] = []
        unpack: list[tuple[list[Tensor], Tensor]] = []
        for owner, spans in self._spans(bucket).items():
            parts = [buffer[start:end] for start, end in spans]
            packed = parts[0] if len(parts) == 1 else torch.cat(parts)
            if owner == EVERYONE:
                pending.append(self.comm.all_reduce("gradient all-reduce of DDP", packed))
            else:
                pending.append(self.comm.reduce("gradient reduction to owners", [(packed, owner)]))
            if len(parts) > 1 and owner in (EVERYONE, self.position):
                unpack.append((parts, packed))
        if bucket.is_last() and self.parameters:
            # DDP queues the end of its own work when this hook has returned: ours goes behind it.
            queue_backward_callback(lambda: queue_backward_callback(self._deliver))

        def finish(done: torch.futures.Future) -> Tensor:
            done.wait()  # raises what a collective raised
            for parts, packed in unpack:
                foreach_copy_(parts, list(packed.split([part.numel() for part in parts])))
            return buffer

        return torch.futures.collect_all([f for work in pending for f in work.futures()]).then(finish)

    def _spans(self, bucket: Any) -> dict[int, list[tuple[int, int]]]:
        """Return, by owner, the parts of the bucket's buffer; neighbours are one part."""
        origin = bucket.buffer().storage_offset()
        result: dict[int, list[tuple[int, int]]] = {}
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            start = gradient.storage_offset() - origin
            spans = result.setdefault(self._owner_of.get(id(parameter), EVERYONE), [])
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, gradient.storage_offset() - origin + gradient.numel()))
        return result

    def _carry(self) -> None:
        """Put gradients of earlier backward passes aside before DDP looks at `.grad`; what no_sync added stays."""
        self._has_delivered = False
        ddp = self._ddp()
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if isinstance(gradient, OwnedGradient):
                content = gradient.content
                parameter.grad, content.unsent = content.unsent, None
                if content.local is not None and (ddp is None or ddp.gradient_as_bucket_view):
                    content.local = content.local.clone()  # DDP is about to write there
                self._carried[index] = content

    @torch.no_grad()
    def _deliver(self) -> None:
        """Put an `OwnedGradient` into every matrix's `.grad`: DDP has put the averages of this rank there.

        None stays None: no rank used the matrix (DDP's own bookkeeping is the same on all ranks).
        """
        self._expects_reduction, self._has_delivered = False, True
        table = torch.zeros((len(self.parameters), 2), dtype=self._norm_dtype, device=self.comm.device)
        locals_: dict[int, Tensor | None] = {}
        for index, (parameter, owner) in enumerate(zip(self.parameters, self.plan.owners, strict=True)):
            gradient, carried = parameter.grad, self._carried.pop(index, None)
            if gradient is None and carried is None:
                continue
            locals_[index] = None
            if owner == self.position:
                locals_[index] = local = _sum(gradient, None if carried is None else carried.local)
                table[index, 0] = torch.linalg.vector_norm(local, dtype=table.dtype)
                table[index, 1] = torch.linalg.vector_norm(local, float("inf"), dtype=table.dtype)
        norms = NormTable(table, self.comm.all_reduce("exchange of gradient norms", table, kind="control"))
        for index, values in locals_.items():
            rank = self.comm.grid.global_rank(self.plan.owners[index])
            content = Content(self.plan.matrices[index].name, rank, values, partial(norms.row, index))
            self.parameters[index].grad = OwnedGradient(self.parameters[index], content)


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor:
    present = [tensor for tensor in (second, first) if tensor is not None]
    return present[0] if len(present) == 1 else present[0].add_(present[1])


def _reduce_bucket(slot, bucket):  # without annotations: DDP reads them, and here they are text
    return slot.owners.reduce_bucket(bucket)


def dedicate_replicas(
    ddp: DistributedDataParallel,
    matrices: Mapping[str, nn.Parameter],
    reason: str | None = None,
    *,
    rates: str | os.PathLike[str] | None = None,
    ns_dtype: str = "auto",
) -> ReplicaOwners | str:
    """Give every matrix an owner among the ranks of a DDP model. Collective over its process group.

    Args:
        ddp: the model, before its first backward.
        matrices: parameters of `ddp.module` by FQN, each reduced by DDP.
        reason: why owners are not wanted, None if they are; ranks must agree on it.
        rates: file of measured rates that the owners are balanced by; None: FLOPs. Ranks must agree on its contents.
        ns_dtype: dtype of the Newton-Schulz products, to tell whether the rates are those of this run.

    Returns:
        The owners, or the reason for which there are none: every rank then does all the work, as DDP does by itself.

    Raises:
        ValueError: an embedding with sparse gradients, or rates that cannot be read.
        RuntimeError: the ranks disagree or one failed (raised on all of them).
    """
    device = next(ddp.module.parameters()).device
    grid = RankGrid(DeviceMesh.from_group(ddp.process_group, device.type))
    comm = Communicator(grid, device)
    previous = _OWNERS.get(ddp)
    taken = {id(parameter) for parameter in previous.parameters} if previous else set()
    if previous is not None and taken and taken.isdisjoint(map(id, matrices.values())):
        reason = reason or "another optimizer's matrices have owners in this model"
    elif previous is None and has_comm_hook(ddp):
        reason = reason or "another communication hook is registered"
    elif ddp.mixed_precision is not None:
        reason = reason or "DistributedDataParallel(mixed_precision=...) reduces gradients in its own way"
    if grid.size == 1:
        return reason or "the process group has one rank"
    try:
        plan = _make_plan(ddp, matrices, grid, reason, rates, ns_dtype)
    except Exception as error:
        try:
            compare_ranks(comm, None, True)
        except RuntimeError:
            raise error from None
        raise
    compare_ranks(comm, plan, True)
    if reason is not None:
        return reason
    owners = ReplicaOwners(ddp, list(matrices.values()), plan, comm)
    if previous is None:
        ddp.register_comm_hook(owners.slot, _reduce_bucket)
    else:  # of an optimizer that this one follows
        previous.retire()
        owners.slot = previous.slot
        owners.slot.owners = owners
    _OWNERS[ddp] = owners
    return owners


def _make_plan(
    ddp: DistributedDataParallel,
    matrices: Mapping[str, nn.Parameter],
    grid: RankGrid,
    reason: str | None,
    rates: str | os.PathLike[str] | None,
    ns_dtype: str,
) -> OwnershipPlan:
    _check_dense(ddp)
    measured = None if rates is None else read_rates(rates)
    device = next(ddp.module.parameters()).device
    if measured is not None and grid.position == 0:
        warn_of_other_device(measured, device, ns_dtype)
    work = work_on(device.type, measured)
    rows = [
        Matrix.of_parameter(
            name,
            p.shape,
            _layer_of(name),
            view=getattr(p, "muon_view", None),
            element_size=p.element_size(),
            work=work,
        )
        for name, p in matrices.items()
    ]
    dtypes = sorted({str(parameter.dtype) for parameter in matrices.values()})
    settings = f"ddp {dtypes} {reason}" + ("" if measured is None else f" rates {measured.digest()}")
    return build_plan(rows, shard=grid.size, settings=settings)


def find_replica_owners(model: nn.Module) -> ReplicaOwners | None:
    """Return the owners of the DDP model that `model` is, holds or is held by; None if there are none."""
    inside = set(model.modules())
    for ddp, owners in list(_OWNERS.items()):
        if ddp in inside or ddp.module is model:
            return owners
    return None


def _check_dense(ddp: DistributedDataParallel) -> None:
    for name, module in ddp.module.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"{name}.weight must have dense gradients; got sparse=True. Build the embedding with sparse=False."
            )


def _layer_of(name: str) -> str:
    """Return the FQN of the numbered layer that holds a parameter, "" where there is none."""
    found = re.match(r"(.*?\.\d+)\.", f".{name}")
    return found.group(1).removeprefix(".") if found else ""
