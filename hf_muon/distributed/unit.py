# SPDX-License-Identifier: Apache-2.0
"""One unit (a module that FSDP2 wraps) and its owned matrices: gather, install, free, pack and reduce."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .._compat import foreach_copy_
from .buckets import BucketLayout, Piece, Slot, build_buckets
from .collectives import Communicator
from .owned import OwnedDTensor, own
from .replicate import ReplicaCopies, reduce_to_owners
from .streams import Pending


@dataclass(eq=False)
class OwnedMatrix:
    """One owned parameter, every place it is registered at, and its compute-dtype view into the packed buffer."""

    parameter: OwnedDTensor
    sites: list[tuple[nn.Module, str]]
    view: nn.Parameter = field(init=False, repr=False)
    accumulated: torch.Tensor | None = field(default=None, repr=False)
    empty_gradient: OwnedDTensor | None = field(default=None, repr=False)

    def take_gradient(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return what autograd and earlier micro-batches left, in `dtype`, and forget it."""
        gradient, self.view.grad = self.view.grad, None
        if self.accumulated is not None:
            total, self.accumulated = self.accumulated, None
            return total if gradient is None else total.add_(gradient)
        return gradient

    def accumulate_gradient(self, dtype: torch.dtype) -> None:
        """Keep the micro-batch's gradient on this rank, in `dtype`; autograd adds by itself if that is its dtype."""
        if self.view.grad is not None and self.view.dtype != dtype:
            gradient = self.take_gradient(dtype)
            assert gradient is not None
            self.accumulated = gradient.to(dtype)


class Unit:
    """The owned matrices that one module's forward gathers together.

    Args:
        name: FQN of the module ("" is the root).
        module: the module.
        matrices: in plan order; may be empty (the root always is a unit).
        comm: the communicator.
        param_dtype: dtype of the gathered copies.
        reduce_dtype: dtype of the gradients on the wire.
        reshard_after_forward: True frees the gathered copies after forward (Z3), False keeps them for backward (Z2).
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        matrices: list[OwnedMatrix],
        comm: Communicator,
        *,
        param_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        reshard_after_forward: bool,
    ) -> None:
        self.name, self.module, self.matrices, self._comm = name, module, matrices, comm
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        self.reshard_after_forward = reshard_after_forward
        grid = comm.grid
        self.buckets = build_buckets(
            [
                Piece(index, part.start, (part.stop - part.start, *layout.shape[1:]), *grid.split(part.position))
                for index, layout in enumerate(matrix.parameter.owner_layout for matrix in matrices)
                for part in layout.parts
            ]
        )
        numel = sum(bucket.numel for bucket in self.buckets)
        self._flat = torch.empty(numel, dtype=param_dtype, device=comm.device)
        for bucket, slot in self._slots():
            if slot.start == 0:  # the other pieces of a stack follow
                matrix = matrices[slot.index]
                shape = matrix.parameter.owner_layout.shape
                start = bucket.offset + slot.offset
                view = self._flat[start : start + shape.numel()].view(shape)
                matrix.view = nn.Parameter(view, requires_grad=matrix.parameter.requires_grad)
        self._flat.untyped_storage().resize_(0)
        self.replicas = {
            bucket.offset: ReplicaCopies(self.label, bucket, param_dtype, comm)
            for bucket in self.buckets
            if grid.replicate > 1 and bucket.shard_index == grid.shard_index
        }
        self._gather: Pending | None = None
        self._filled_version: int | None = None  # None: no storage
        self._reductions: list[tuple[BucketLayout, torch.Tensor]] = []
        self._reducing: Pending | None = None
        self._installed = False
        self.local_flags: list[bool] = [False] * len(matrices)
        self.has_unsent = False

    @property
    def label(self) -> str:
        """Name for messages."""
        return self.name or "the root module"

    @property
    def version(self) -> int:
        """Version of the weights; the same on all ranks."""
        return sum(matrix.parameter.owner_layout.version for matrix in self.matrices)

    @property
    def is_resident(self) -> bool:
        """Whether the gathered copies have memory (also while they are being gathered)."""
        return self._filled_version is not None

    @property
    def num_gathered_bytes(self) -> int:
        """Bytes of gathered copies allocated now."""
        return self._flat.untyped_storage().nbytes()

    @property
    def packed_gradients(self) -> list[torch.Tensor]:
        """Buffers of the reductions under way."""
        return [packed for _, packed in self._reductions]

    # ------------------------------------------------------------------ weights

    @torch.no_grad()
    def start_gather(self) -> None:
        """Allocate, fill in what this rank has, start the broadcasts. Collective unless current copies are there."""
        version = self.version
        if not self.matrices or self._filled_version == version:
            return
        self.finish_gather()
        self.publish()
        grid = self._comm.grid
        if not self.is_resident:
            self._flat.untyped_storage().resize_(self._flat.numel() * self._flat.element_size())
        sends = []
        for bucket in self.buckets:
            # `.data` has a version counter of its own: autograd's saved views stay valid when the buffer is refilled.
            data = self._flat.data[bucket.offset : bucket.offset + bucket.numel]
            if bucket.shard_index == grid.shard_index:
                with self._comm.stream.issue():
                    self._fill(bucket, data)
            sends.append((data, bucket.shard_index))
        self._gather = self._comm.broadcast(f"broadcast of {self.label}", sends)
        self._filled_version = version

    def finish_gather(self) -> None:
        """Wait for broadcasts under way."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None

    def publish(self) -> None:
        """HSDP: start sending new weights to the replica peers. Collective in the replicate group."""
        for copies in self.replicas.values():
            copies.publish(self.version, self._fill_slot)

    def free(self) -> None:
        """Give the memory of the gathered copies back; the views stay and are valid again after the next gather."""
        if not self.is_resident:
            return
        self.finish_gather()
        self._flat.untyped_storage().resize_(0)
        self._filled_version = None

    def install(self) -> None:
        """Register the gathered copies as the module's parameters."""
        if not self._installed:
            for matrix in self.matrices:
                for module, attribute in matrix.sites:
                    setattr(module, attribute, matrix.view)
                # Freezing and unfreezing reach the parameter; autograd sees the view.
                matrix.view.requires_grad_(matrix.parameter.requires_grad)
            self._installed = True

    def uninstall(self) -> None:
        """Register the owned parameters again."""
        if self._installed:
            for matrix in self.matrices:
                for module, attribute in matrix.sites:
                    setattr(module, attribute, matrix.parameter)
            self._installed = False

    def _slots(self) -> Iterator[tuple[BucketLayout, Slot]]:
        return ((bucket, slot) for bucket in self.buckets for slot in bucket.slots)

    def _fill(self, bucket: BucketLayout, data: torch.Tensor) -> None:
        targets, sources = [], []
        for segment in bucket.segments:
            if segment.replicate_index == self._comm.grid.replicate_index:
                for slot in segment.slots:
                    targets.append(data[slot.offset : slot.end].view(slot.shape))
                    sources.append(self.matrices[slot.index].parameter.to_local())
        foreach_copy_(targets, sources)
        if bucket.offset in self.replicas:
            self.replicas[bucket.offset].copy_into(data)

    def _fill_slot(self, target: torch.Tensor, slot: Slot) -> None:
        target.view(slot.shape).copy_(self.matrices[slot.index].parameter.to_local())

    # ------------------------------------------------------------------ gradients

    @torch.no_grad()
    def accumulate(self) -> None:
        """Keep this micro-batch's gradients on this rank: no communication."""
        for index, matrix in enumerate(self.matrices):
            self.local_flags[index] |= matrix.view.grad is not None
            matrix.accumulate_gradient(self.reduce_dtype)
        self.has_unsent = True

    @torch.no_grad()
    def start_reduce(self) -> None:
        """Pack this rank's gradients per bucket and start the reductions. Collective.

        A matrix without a gradient on this rank contributes zeros; one element per slot behind the gradients counts
        the ranks that had one.
        """
        self.finish_reduce()
        taken: dict[int, torch.Tensor | None] = {}  # a stack's gradient is needed until its last piece is packed
        for bucket in self.buckets:
            slots = bucket.slots
            packed = torch.empty(bucket.numel + len(slots), dtype=self.reduce_dtype, device=self._comm.device)
            flags, targets, sources = [], [], []
            for slot in slots:
                matrix = self.matrices[slot.index]
                if slot.start == 0:
                    taken[slot.index] = matrix.take_gradient(self.reduce_dtype)
                gradient = taken[slot.index]
                if slot.rows.stop == matrix.parameter.shape[0]:
                    del taken[slot.index]
                place = packed[slot.offset : slot.end].view(slot.shape)
                if gradient is None:
                    place.zero_()
                else:
                    self.local_flags[slot.index] = True
                    targets.append(place)
                    sources.append(gradient[slot.rows])
                flags.append(self.local_flags[slot.index])
            foreach_copy_(targets, sources)
            if self.reduce_dtype == torch.float16:
                # Sums of half precision overflow: divide first there, last everywhere else.
                packed[: bucket.numel].div_(self._comm.grid.size)
            # Filled by kernels, not copied from the host: a copy would block it. Mostly all matrices have gradients.
            packed[bucket.numel :].fill_(1.0)
            for index, flag in enumerate(flags):
                if not flag:
                    packed[bucket.numel + index].zero_()
            self._reductions.append((bucket, packed))
        sends = [(packed, bucket.shard_index) for bucket, packed in self._reductions]
        self._reducing = self._comm.reduce(f"gradient reduction of {self.label}", sends)
        self.has_unsent = False

    def abandon(self) -> None:
        """Drop the gradients of a backward that raised, also those on their way. Not a collective."""
        pending, self._reducing = self._reducing, None
        if pending is not None:
            with contextlib.suppress(RuntimeError):  # the rank that raised may be gone: its sum is dropped anyway
                pending.wait()
        self._reductions = []
        self.local_flags = [False] * len(self.matrices)
        self.has_unsent = False
        for matrix in self.matrices:
            matrix.view.grad = matrix.accumulated = None

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Wait for the reductions; put the average into the owners' `.grad` (added to what is there)."""
        if self._reducing is None:
            return
        self._reducing.wait()
        self._reducing = None
        grid = self._comm.grid
        reductions, self._reductions = self._reductions, []
        for bucket, packed in reductions:
            if bucket.shard_index == grid.shard_index:
                if grid.replicate > 1:
                    reduce_to_owners(self.label, self._comm, bucket, packed).wait()
                self._deliver(bucket, packed)
        for matrix in self.matrices:
            is_elsewhere = not matrix.parameter.owner_layout.is_local
            if is_elsewhere and matrix.parameter.grad is None and matrix.parameter.requires_grad:
                matrix.parameter.grad = self._empty_gradient(matrix)
        self.local_flags = [False] * len(self.matrices)

    def _deliver(self, bucket: BucketLayout, packed: torch.Tensor) -> None:
        grid = self._comm.grid
        for segment in bucket.segments:
            if segment.replicate_index != grid.replicate_index:
                continue
            values = packed[segment.start : segment.end]
            if self.reduce_dtype != torch.float16 and grid.size > 1:
                values.div_(grid.size)
            if len(bucket.segments) > 1:
                values = values.clone()  # do not keep the other replicas' parts alive
            for slot in segment.slots:
                flag = packed[bucket.numel + bucket.slots.index(slot)]
                start = slot.offset - segment.start
                self._add_gradient(slot.index, values[start : start + slot.numel].view(slot.shape), flag)

    def _add_gradient(self, index: int, gradient: torch.Tensor, flag: torch.Tensor) -> None:
        parameter = self.matrices[index].parameter
        if not parameter.requires_grad:
            return  # frozen since the model was wrapped: it travels along as zeros
        layout = parameter.owner_layout
        arrived: bool | torch.Tensor = True if self.local_flags[index] else flag
        if parameter.grad is None:
            parameter.grad = own(gradient.to(parameter.dtype), layout)
            layout.gradient_flag = arrived
        else:
            total: Any = parameter.grad  # an OwnedDTensor, but torch types `.grad` as Tensor
            total.to_local().add_(gradient)
            if arrived is True or layout.gradient_flag is True:
                layout.gradient_flag = True
            else:
                layout.gradient_flag = flag + layout.gradient_flag

    @staticmethod
    def _empty_gradient(matrix: OwnedMatrix) -> OwnedDTensor:
        if matrix.empty_gradient is None:
            local = matrix.parameter.to_local().detach()
            matrix.empty_gradient = own(torch.zeros_like(local), matrix.parameter.owner_layout)
        return matrix.empty_gradient
