# SPDX-License-Identifier: Apache-2.0
"""The runtime of one model: when units are gathered, freed and reduced. Knows buffers, ranks and hooks, not Muon."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .._compat import in_backward, queue_backward_callback
from ..tracing import Span, begin_span
from .collectives import Communicator
from .data_parallel import find_replica_owners
from .owned import OwnedDTensor
from .ownership import OwnershipPlan
from .unit import Unit

MAX_REDUCTIONS_IN_FLIGHT = 2

# Weak on both sides: a runtime holds its model's modules, and the hooks on them hold the runtime.
_RUNTIMES: weakref.WeakKeyDictionary[nn.Module, weakref.ref[DMuonRuntime]] = weakref.WeakKeyDictionary()


class ForwardToken:
    """Stands for one forward of a unit whose backward has not passed the unit's inputs yet."""


class UnitState:
    """Where a unit stands between forward and backward."""

    def __init__(self) -> None:
        self.outstanding: set[ForwardToken] = set()
        self.in_backward = False  # between its outputs' and its inputs' gradients
        self.is_pending = False  # ran in a forward whose gradients have not been dealt with
        self.is_ready = False  # gradients complete, waiting for its turn
        self.is_prefetched = False
        self.positions: list[int] = []  # in the order of forwards, for backward prefetch
        self.spans: list[Span] = []  # of the forward and backward under way, the innermost last; while recorded

    def begin_span(self, kind: str, name: str) -> None:
        """Begin a span inside of the one under way: recomputation runs within backward."""
        if (span := begin_span(kind, name)) is not None:
            self.spans.append(span)

    def end_span(self) -> None:
        """Note that the pass which was begun is over."""
        if self.spans:
            self.spans.pop().finish()


class DMuonRuntime:
    """Schedules the units of one model; its methods are called by the hooks, in the order that every rank runs them.

    Args:
        model: the root module.
        units: every unit, the root's included, in module order.
        plan: the ownership plan.
        comm: the communicator.
        replaced: owned parameter of every original one, by `id` of the original.
    """

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        plan: OwnershipPlan,
        comm: Communicator,
        replaced: dict[int, OwnedDTensor],
    ) -> None:
        self.units, self.plan, self.comm, self.replaced = units, plan, comm, replaced
        self.root = next(unit for unit in units if unit.module is model)
        self.requires_gradient_sync = True
        self._states = {unit: UnitState() for unit in units}
        self._expected: list[Unit] = []  # order of the last complete forward, for prefetch
        self._started: list[Unit] = []  # order of the forward under way
        self._finished: list[Unit] = []  # units in the order their forwards ended
        self._begun: dict[Unit, None] = {}  # units in the order of their first forwards, of all that wait for backward
        self._root_is_running = False
        self._root_wants_gradients = False
        self._callback_is_queued = False
        self._reducing: list[Unit] = []
        _RUNTIMES[model] = weakref.ref(self)

    # ------------------------------------------------------------------ forward

    def start_forward(self, unit: Unit) -> ForwardToken | None:
        """Gather and install `unit`, prefetch the next; return a token if its inputs must be watched."""
        state = self._states[unit]
        recomputing = in_backward()
        if unit is self.root and not recomputing:
            self._start_root_forward()
        if recomputing and not state.outstanding:
            self._queue_callback()  # a reentrant checkpoint runs the only forward with gradients here
        unit.start_gather()
        unit.finish_gather()
        state.is_prefetched = False
        unit.install()
        if recomputing:
            self._prefetch_backward(unit)
        elif self._root_is_running:
            self._started.append(unit)
            self._begun.setdefault(unit)
            self._prefetch_forward()
        if torch.is_grad_enabled() or (self._root_is_running and self._root_wants_gradients):
            state.is_pending = True
        state.begin_span("recomputation" if recomputing else "forward", unit.label)
        # A recomputation whose original forward is still watched must not be watched twice.
        if not torch.is_grad_enabled() or (recomputing and (state.in_backward or state.outstanding)):
            return None
        return ForwardToken()

    def watch(self, unit: Unit, token: ForwardToken) -> None:
        """Note that `token` will be returned by the backward of the unit's inputs."""
        self._states[unit].outstanding.add(token)

    def finish_forward(self, unit: Unit) -> None:
        """Put the owned parameters back; free the copies (Z3)."""
        self._states[unit].end_span()
        if in_backward():
            return  # backward needs them: the unit's inputs decide
        unit.uninstall()
        if unit.reshard_after_forward:
            unit.free()
        if self._root_is_running:
            self._states[unit].positions.append(len(self._finished))
            self._finished.append(unit)
        if unit is self.root:
            self._finish_root_forward()

    def _start_root_forward(self) -> None:
        self._callback_is_queued = False  # a backward that raised may have left it
        self._started = []
        if not any(state.outstanding for state in self._states.values()):
            self._finished, self._begun = [], {}
            for state in self._states.values():
                state.positions.clear()
                state.in_backward = False
        self._root_is_running = True
        self._root_wants_gradients = torch.is_grad_enabled()
        for unit in self.units:
            unit.publish()

    def _finish_root_forward(self) -> None:
        self._root_is_running = False
        self._expected = self._started
        for unit, state in self._states.items():
            if state.is_prefetched and unit.reshard_after_forward:
                unit.free()  # fetched, but this forward took another path
            state.is_prefetched = False

    def _prefetch_forward(self) -> None:
        done = len(self._started)
        if self._expected[done - 1 : done] == self._started[-1:] and done < len(self._expected):
            self._prefetch(self._expected[done])

    def _prefetch_backward(self, unit: Unit) -> None:
        positions = self._states[unit].positions
        if positions:
            position = positions.pop()
            if position > 0:
                self._prefetch(self._finished[position - 1])

    def _prefetch(self, unit: Unit) -> None:
        if not unit.is_resident:
            unit.start_gather()
            self._states[unit].is_prefetched = True

    # ------------------------------------------------------------------ backward

    def start_backward(self, unit: Unit) -> None:
        """Make the unit's copies valid again: the gradient of its output has arrived."""
        self._queue_callback()
        state = self._states[unit]
        if state.in_backward:
            return
        state.in_backward = True
        unit.start_gather()
        unit.finish_gather()
        state.is_prefetched = False
        unit.install()
        self._prefetch_backward(unit)
        state.begin_span("backward", unit.label)

    def finish_backward(self, unit: Unit, token: ForwardToken) -> None:
        """Deal with the unit's gradients if this was its last forward: its input's gradient has been computed."""
        state = self._states[unit]
        state.end_span()
        if token not in state.outstanding:
            return  # of an earlier iteration: the end of backward takes care, in an order all ranks share
        state.outstanding.discard(token)
        state.in_backward = False
        if state.outstanding:
            return
        self._release(unit)
        state.is_ready = True
        self._reduce_ready_units()

    def _release(self, unit: Unit) -> None:
        unit.uninstall()
        unit.free()
        if not self.requires_gradient_sync:
            unit.accumulate()

    def _reduce_ready_units(self) -> None:
        """Start reductions in the reverse order of first forwards, however autograd happened to arrive here.

        A unit around others began before them and is complete after them: it must not hold them up.
        """
        for unit in self._reduce_order():
            state = self._states[unit]
            if not state.is_ready:
                return
            self._reduce(unit)

    def _reduce_order(self) -> list[Unit]:
        return [unit for unit in reversed(self._begun) if unit.matrices and self._states[unit].is_pending]

    def _reduce(self, unit: Unit) -> None:
        state = self._states[unit]
        state.is_ready = state.is_pending = False
        if not self.requires_gradient_sync or not unit.matrices:
            return
        unit.start_reduce()
        self._reducing.append(unit)
        while len(self._reducing) > MAX_REDUCTIONS_IN_FLIGHT:
            self._reducing.pop(0).finish_reduce()

    def _queue_callback(self) -> None:
        if not self._callback_is_queued:
            self._callback_is_queued = True
            queue_backward_callback(self._finish_root_backward)

    def _finish_root_backward(self) -> None:
        """End of the outermost backward: units that no hook completed, then every reduction under way."""
        self._callback_is_queued = False
        ordered = dict.fromkeys([*reversed(self._begun), *reversed(self.units)])
        unsent = []  # ran in an earlier micro-batch only: after all others, which may have been reduced long ago
        for unit in ordered:
            state = self._states[unit]
            while state.spans:
                state.end_span()
            if state.is_pending or state.in_backward:
                if not state.is_ready:
                    self._release(unit)
                self._reduce(unit)
            else:
                unit.uninstall()
                unit.free()
                if unit.has_unsent and self.requires_gradient_sync:
                    unsent.append(unit)
            state.outstanding.clear()
            state.in_backward = state.is_prefetched = False
            state.positions.clear()
        for unit in unsent:
            self._reduce(unit)
        for unit in self._reducing:
            unit.finish_reduce()
        self._reducing = []
        self._finished, self._begun = [], {}

    # ------------------------------------------------------------------ the outside

    def reset(self) -> None:
        """Forget a forward or backward that raised: free all copies, drop its gradients. Not a collective."""
        for unit, state in self._states.items():
            unit.uninstall()
            unit.free()
            unit.abandon()
            state.__init__()  # type: ignore[misc]
        self._started, self._finished, self._begun, self._reducing = [], [], {}, []
        self._root_is_running = self._callback_is_queued = False

    def reshard(self) -> None:
        """Free every gathered copy (after evaluation under Z2, say); the next forward gathers again."""
        for unit in self.units:
            unit.uninstall()
            unit.free()

    @property
    def parameters(self) -> list[OwnedDTensor]:
        """Every owned parameter, in plan order."""
        by_name = {m.parameter.owner_layout.name: m.parameter for unit in self.units for m in unit.matrices}
        return [by_name[name] for name in dict.fromkeys(matrix.name for matrix in self.plan.matrices)]

    @property
    def num_gathered_bytes(self) -> int:
        """Bytes of gathered copies allocated now."""
        return sum(unit.num_gathered_bytes for unit in self.units)


def find_runtime(model: nn.Module) -> DMuonRuntime | None:
    """Return the runtime attached to `model` or to a module inside it (wrappers), None if there is none."""
    for module in model.modules():
        found = _RUNTIMES.get(module)
        if found is not None and (runtime := found()) is not None:
            return runtime
    return None


def runtime_of(model: nn.Module) -> DMuonRuntime:
    """Return the runtime attached to `model`.

    Raises:
        ValueError: the model has none.
    """
    runtime = find_runtime(model)
    if runtime is None:
        raise ValueError("model must have dedicated parameters; got one without. Wrap it in dedicate_params first.")
    return runtime


def reshard_units(model: nn.Module) -> None:
    """Free what forwards without a backward left gathered, in FSDP2's units and in ours. No communication."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    runtime = find_runtime(model)
    if runtime is not None:
        runtime.reshard()


def reshard_models_of(parameters: Iterable[torch.Tensor]) -> None:
    """Call `reshard_units` for every model that holds one of these owned parameters. No communication."""
    wanted = {id(parameter) for parameter in parameters}
    for model, found in list(_RUNTIMES.items()):
        if (runtime := found()) is None:
            continue
        if any(id(parameter) in wanted for parameter in runtime.parameters):
            reshard_units(model)


def ownership(model: nn.Module) -> OwnershipPlan:
    """Return who owns which matrix of `model` (FSDP2 or DDP), with the work and bytes of every rank."""
    return (find_replica_owners(model) or runtime_of(model)).plan


def comm_stats(model: nn.Module, reset: bool = False) -> dict[str, int]:
    """Return the bytes that this rank handed to collectives since the last reset, by kind.

    Kinds: `broadcast` (weights to the shard group, or to all replicas under DDP, where momentum gathered for a
    checkpoint counts too), `reduce` (gradients to their owner),
    `all_reduce` (DDP: gradients without owner), `replicate_broadcast` and `replicate_reduce` (HSDP, the replicate
    group), `control` (comparison of plans, gradient norms under DDP).
    """
    return (find_replica_owners(model) or runtime_of(model)).comm.stats(reset)
