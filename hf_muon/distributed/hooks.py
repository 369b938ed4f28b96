# SPDX-License-Identifier: Apache-2.0
"""Connect a runtime to a model: forward hooks on every unit, autograd hooks on what goes in and comes out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .._compat import without_dynamo
from .owned import OwnedDTensor
from .runtime import DMuonRuntime, ForwardToken
from .structures import grad_tensors, replace_grad_tensors
from .unit import Unit


class UnitInputs(torch.autograd.Function):
    """Identity on a unit's inputs whose backward says that the unit's own backward is complete.

    Autograd runs later-made nodes first, so every gradient of the unit's parameters has been computed by then.
    """

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the inputs."""
        ctx.done = done
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Report, and pass the gradients through."""
        ctx.done()
        return (None, *gradients)


def attach_hooks(runtime: DMuonRuntime) -> None:
    """Register the hooks of every unit and let `set_requires_gradient_sync` reach the runtime.

    Ours run outside FSDP2's (before its pre-forward, after its post-forward), which sees ordinary modules.
    """
    for unit in runtime.units:
        # The root's outputs are always watched: with reentrant checkpointing the end-of-backward callback must be
        # queued by the outermost backward, not by one nested in it.
        if unit.matrices or unit is runtime.root:
            _attach_unit(runtime, unit)
    for module in runtime.root.module.modules():
        if isinstance(module, FSDPModule):
            _follow_gradient_sync(runtime, module)
    _count_optimizer_steps()


def _attach_unit(runtime: DMuonRuntime, unit: Unit) -> None:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        token = runtime.start_forward(unit)
        return (args, kwargs) if token is None else _watch_inputs(runtime, unit, token, args, kwargs)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        runtime.finish_forward(unit)
        if torch.is_grad_enabled():
            for tensor in grad_tensors(output):
                tensor.register_hook(functools.partial(_on_output_gradient, runtime, unit))

    unit.module.register_forward_pre_hook(without_dynamo(before), prepend=True, with_kwargs=True)
    unit.module.register_forward_hook(without_dynamo(after))


def _watch_inputs(
    runtime: DMuonRuntime, unit: Unit, token: ForwardToken, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inputs = grad_tensors((args, kwargs))
    if not inputs:
        return args, kwargs  # the end of backward will take care of this unit
    runtime.watch(unit, token)
    outputs = UnitInputs.apply(functools.partial(runtime.finish_backward, unit, token), *inputs)
    return replace_grad_tensors((args, kwargs), list(outputs))


@without_dynamo
def _on_output_gradient(runtime: DMuonRuntime, unit: Unit, gradient: torch.Tensor) -> None:
    runtime.start_backward(unit)


def _follow_gradient_sync(runtime: DMuonRuntime, module: Any) -> None:
    """FSDP2 keeps the flag in its own parameter groups, which an all-owned module does not have."""
    original = module.set_requires_gradient_sync

    @functools.wraps(original)
    def set_requires_gradient_sync(requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        original(requires_gradient_sync, recurse=recurse)
        if module is runtime.root.module or not recurse:
            runtime.requires_gradient_sync = requires_gradient_sync

    module.set_requires_gradient_sync = set_requires_gradient_sync


@functools.cache
def _count_optimizer_steps() -> None:
    register_optimizer_step_post_hook(_after_optimizer_step)


def _after_optimizer_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Gathered copies of stepped weights are out of date, on every rank: only the owner's local tensor changed."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, OwnedDTensor):
                parameter.owner_layout.version += 1
