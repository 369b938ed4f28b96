# SPDX-License-Identifier: Apache-2.0
"""The state of one parameter: made at construction, carried along when the parameter is replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .auxiliary_adam import STATE_KEYS, new_adam_state, new_step
from .tensor_layout import copy_into_layout, local_tensor, same_layout, zeros_in_layout

MUON_STATE_KEYS = ("momentum_buffer",)
State = dict[str, Any]


def state_keys(use_muon: bool) -> tuple[str, ...]:
    """Return the state keys of a parameter of this half."""
    return MUON_STATE_KEYS if use_muon else STATE_KEYS


def momentum_dtype(param: Tensor) -> torch.dtype:
    """Return float32, or float64 for a float64 parameter."""
    return torch.promote_types(param.dtype, torch.float32)


def new_state(param: Tensor, use_muon: bool, fused: bool, elsewhere: bool = False) -> State:
    """Return zero state in the layout and on the device of `param`; without rows where a replica owns it."""
    if not use_muon:
        return new_adam_state(param, fused)
    if elsewhere:
        return {"momentum_buffer": param.new_empty((0, *param.shape[1:]), dtype=momentum_dtype(param))}
    return {"momentum_buffer": zeros_in_layout(param, momentum_dtype(param))}


def fits(param: Tensor, state: State, use_muon: bool, elsewhere: bool = False) -> bool:
    """Return whether `state` has every key, on the device, in the shape and in the dtype that `param` asks for."""
    dtype = momentum_dtype(param) if use_muon else param.dtype
    shape = (0, *param.shape[1:]) if use_muon and elsewhere else param.shape
    for key in state_keys(use_muon):
        value = state.get(key)
        if value is None:
            return False
        if key == "step":
            continue
        if value.device != param.device or value.shape != shape or value.dtype != dtype:
            return False
    return True


def adapt_state(param: Tensor, state: State, use_muon: bool, fused: bool, elsewhere: bool = False) -> State | None:
    """Return the old state for a replaced or moved parameter, or None where it cannot be carried over.

    It is carried when shape and layout are the same and the values exist; another device is fine.
    """
    if use_muon and elsewhere:
        return new_state(param, use_muon, fused, elsewhere)
    values = {key: state.get(key) for key in state_keys(use_muon)}
    for key, value in values.items():
        if not isinstance(value, Tensor) or value.is_meta:
            return None
        if key != "step" and not same_layout(value, param):
            return None
    return saved_state(param, values, use_muon, fused)


def saved_state(param: Tensor, saved: State, use_muon: bool, fused: bool, elsewhere: bool = False) -> State:
    """Return new state that holds the values of `saved`, cast and moved; never an alias of them."""
    if use_muon and elsewhere:
        return new_state(param, use_muon, fused, elsewhere)
    if use_muon:
        return {"momentum_buffer": copy_into_layout(saved["momentum_buffer"], param, momentum_dtype(param))}
    return {
        "step": new_step(param, fused, float(saved["step"])),
        "exp_avg": copy_into_layout(saved["exp_avg"], param, param.dtype),
        "exp_avg_sq": copy_into_layout(saved["exp_avg_sq"], param, param.dtype),
    }


def has_values(state: State) -> bool:
    """Return whether any tensor of `state` is not zero on this rank; reads them on the host."""
    tensors = [local_tensor(value) for value in state.values() if isinstance(value, Tensor)]
    return any(bool(tensor.any()) for tensor in tensors if tensor.numel() and not tensor.is_meta)
