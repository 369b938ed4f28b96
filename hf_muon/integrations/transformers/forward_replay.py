# SPDX-License-Identifier: Apache-2.0
"""Runs the forward passes of a step once more, without gradients, for `qk_clip_exact`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


class ForwardReplay:
    """Keeps what each forward pass with gradients of one model was given, until it is asked.

    The batches of a step stay in memory until its end; activations do not.

    Args:
        model: the model whose calls count; referred to weakly.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any], tuple[str, torch.dtype, bool]]] = []
        present = weakref.ref(self)

        @torch.compiler.disable
        def note(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            replay = present()
            if replay is not None and torch.is_grad_enabled():
                replay._calls.append((args, options, _autocast(next(module.parameters()).device.type)))

        weakref.finalize(self, model.register_forward_pre_hook(note, with_kwargs=True).remove)

    def take(self) -> Sequence[Callable[[], None]]:
        """Return functions that run the passes since the last call again, in order, and forget them.

        In evaluation mode: no dropout, no checkpointing, and buffers stay as they are. Under autocast where it was on
        when the model was called.
        """
        calls, self._calls = self._calls, []

        def run(args: tuple[Any, ...], options: dict[str, Any], autocast: tuple[str, torch.dtype, bool]) -> None:
            model, (kind, dtype, enabled) = self._model(), autocast
            if model is not None:
                eager = torch.compiler.set_stance("force_eager")  # another mode would be compiled for this alone
                with eager, torch.no_grad(), _evaluating(model), torch.autocast(kind, dtype, enabled):
                    model(*args, **options)
                for module in model.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()  # where FSDP2 keeps gathered weights after forward, they would go stale

        return [lambda call=call: run(*call) for call in calls]  # type: ignore[misc]


def _autocast(kind: str) -> tuple[str, torch.dtype, bool]:
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
