# SPDX-License-Identifier: Apache-2.0
"""The AdamW half: torch's own functional AdamW, so that it equals `torch.optim.AdamW` bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .notices import inform_once, warn_once
from .tensor_layout import local_tensor

STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")


@functools.cache
def has_fused_adamw(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether fused AdamW runs on this device and dtype; found out by running it on one element."""
    try:
        tensors = [torch.zeros(1, dtype=dtype, device=device_type) for _ in range(4)]
        step = torch.zeros((), dtype=torch.float32, device=device_type)
        adamw_update_(
            tensors[:1], tensors[1:2], [dict(zip(STATE_KEYS, (step, *tensors[2:]), strict=True))], fused=True
        )
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def use_fused(choice: str, param: Tensor) -> bool:
    """Return whether `param` is updated by fused AdamW.

    Args:
        choice: `fused_adam` of the configuration. `auto` means fused on accelerators that have it; on a CPU it
            means torch's default implementation, so that results equal `torch.optim.AdamW(params)` to the bit.
            `true` asks for fused everywhere and falls back with one log line where torch has none.
        param: decides device and dtype.
    """
    device = param.device.type
    if choice == "false" or device == "meta" or (choice == "auto" and device == "cpu"):
        return False
    if has_fused_adamw(device, param.dtype):
        return True
    message = f"fused AdamW is not available for {param.dtype} on {device}; foreach AdamW is used instead."
    (warn_once if choice == "true" else inform_once)(message)
    return False


def new_adam_state(param: Tensor, fused: bool, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return zero AdamW state of `param`; without `dtype` in the dtypes that `torch.optim.AdamW` gives it."""
    keep = torch.preserve_format
    return {
        "step": new_step(param, fused),
        "exp_avg": torch.zeros_like(param, dtype=dtype, memory_format=keep, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(param, dtype=dtype, memory_format=keep, requires_grad=False),
    }


def new_step(param: Tensor, fused: bool, value: float = 0.0) -> Tensor:
    """Return a step counter: on the device for fused AdamW, else on the CPU, where reading it costs nothing."""
    if fused:
        return torch.full((), value, dtype=torch.float32, device=param.device)
    wide = torch.get_default_dtype() == torch.float64
    return torch.tensor(value, dtype=torch.float64 if wide else torch.float32, device="cpu")


@torch.no_grad()
def adamw_update_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    *,
    lr: float | Tensor = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    fused: bool = False,
    found_inf: Tensor | None = None,
) -> None:
    """Run one AdamW step in place on parameters of one kind.

    Args:
        params: parameters, plain or DTensor.
        grads: their gradients.
        states: their `step`, `exp_avg` and `exp_avg_sq`.
        lr: learning rate; a one-element tensor is passed on to torch.
        betas: decay rates of the two averages.
        eps: added to the denominator.
        weight_decay: decoupled.
        fused: use torch's fused kernel.
        found_inf: 0-dim float32 tensor, 1 to leave everything as it is; only with `fused`.
    """
    if not params:
        return
    adamw(
        list(params),
        list(grads),
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        # None lets torch choose between foreach and a plain loop as torch.optim.AdamW does.
        foreach=False if fused else None,
        fused=fused or None,
        found_inf=found_inf,
        amsgrad=False,
        beta1=float(betas[0]),
        beta2=float(betas[1]),
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )


@torch.no_grad()
def applied_square_sum(state: dict[str, Any], group: dict[str, Any], lr: float) -> Tensor | None:
    """Return the sum of squares of the step AdamW last made on this rank's part of a parameter, from its state."""
    exp_avg, exp_avg_sq = local_tensor(state["exp_avg"]), local_tensor(state["exp_avg_sq"])
    if exp_avg.numel() == 0:
        return None
    step = state["step"].to(device=exp_avg.device, dtype=torch.float32).clamp(min=1.0)
    first = exp_avg.float() / (1.0 - group["betas"][0] ** step)
    second = exp_avg_sq.float() / (1.0 - group["betas"][1] ** step)
    return (first / (second.sqrt() + group["eps"])).mul_(lr).square().sum()
