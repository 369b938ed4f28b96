# SPDX-License-Identifier: Apache-2.0
"""The AdamW step of one group: parameters of one kind together, bfloat16 weights stochastically where asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .auxiliary_adam import adamw_update_
from .rounding import Rounding
from .tensor_layout import is_dtensor, local_tensor


@torch.no_grad()
def step_adamw_(
    group: dict[str, Any],
    states: Mapping[Tensor, dict[str, Any]],
    names: Mapping[Tensor, str],
    is_fused: Callable[[Tensor], bool],
    rounding: Rounding | None,
    mask: Tensor | None,
) -> list[Tensor]:
    """Update all parameters of an AdamW group that have a gradient, in place; return them.

    Args:
        group: its `params`, `lr`, `betas`, `eps` and `weight_decay` are read.
        states: AdamW state by parameter.
        names: by parameter, for random bits.
        is_fused: whether fused AdamW updates a parameter.
        rounding: random bits for bfloat16 weights whose averages are float32; None rounds to nearest.
        mask: 0-dim bool tensor; where true nothing changes. Needs fused AdamW.
    """
    kinds: dict[tuple[bool, bool, bool], list[Tensor]] = {}
    for param in group["params"]:
        if param.grad is not None:
            fused = is_fused(param) or mask is not None
            rounds = rounding is not None and states[param]["exp_avg"].dtype != param.dtype
            kinds.setdefault((fused, is_dtensor(param), rounds), []).append(param)
    options = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
    for (fused, _, rounds), params in kinds.items():
        options.update(fused=fused, found_inf=None if mask is None else mask.float())
        for param in params:
            state = states[param]
            if fused and state["step"].device != param.device:  # the choice changed after construction
                state["step"] = state["step"].to(param.device, torch.float32)
        if rounds and rounding is not None:
            _update_rounded_(params, states, names, rounding, options)
        else:
            grads = [param.grad for param in params if param.grad is not None]
            adamw_update_(params, grads, [states[param] for param in params], **options)
    return [param for params in kinds.values() for param in params]


def _update_rounded_(
    params: Sequence[Tensor],
    states: Mapping[Tensor, dict[str, Any]],
    names: Mapping[Tensor, str],
    rounding: Rounding,
    options: dict[str, Any],
) -> None:
    """Update in float32 and store the weights stochastically; one parameter at a time, so that few copies exist."""
    for param in params:
        weight, grad = local_tensor(param), param.grad
        if grad is None:
            continue
        wide = weight.float()
        state = {key: local_tensor(value) for key, value in states[param].items()}
        adamw_update_([wide], [local_tensor(grad).float()], [state], **options)
        rounding.store_(weight, wide, names[param], param)
