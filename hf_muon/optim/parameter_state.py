# SPDX-License-Identifier: Apache-2.0
"""The state of one parameter: made at construction, carried along when the parameter is replaced."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .auxiliary_adam import STATE_KEYS, new_adam_state, new_step
from .normuon import load_rows
from .quantized import plain_momentum, quantized_state, zero_scales
from .state_spec import MOMENTUM_SCALE, ROW_STATISTICS, StateSpec
from .tensor_layout import copy_into_layout, local_tensor, same_layout, zeros_in_layout

MUON_STATE_KEYS = ("momentum_buffer",)
State = dict[str, Any]


def state_keys(use_muon: bool) -> tuple[str, ...]:
    """Return the state keys of a parameter of this half."""
    return MUON_STATE_KEYS if use_muon else STATE_KEYS


def new_state(param: Tensor, use_muon: bool, fused: bool, spec: StateSpec) -> State:
    """Return zero state in the layout of `param`, where it rests; row statistics are added apart.

    Without rows where a replica owns the matrix.
    """
    if not use_muon:
        return new_adam_state(param, fused, spec.adam_dtype(param))
    dtype, device = spec.momentum_dtype(param), spec.momentum_device(param)
    scales = {MOMENTUM_SCALE: zero_scales(param, spec)} if spec.quantized else {}
    if spec.elsewhere:
        return {"momentum_buffer": param.new_empty((0, *param.shape[1:]), dtype=dtype, device=device), **scales}
    return {"momentum_buffer": zeros_in_layout(param, dtype, device), **scales}


def fits(param: Tensor, state: State, use_muon: bool, spec: StateSpec) -> bool:
    """Return whether `state` has every key, in the place, shape and dtype that `param` and the options ask for."""
    dtype = spec.momentum_dtype(param) if use_muon else spec.adam_dtype(param)
    device = spec.momentum_device(param) if use_muon else param.device
    shape = (0, *param.shape[1:]) if use_muon and spec.elsewhere else param.shape
    if use_muon and spec.row_statistics and ROW_STATISTICS not in state:
        return False
    if use_muon and spec.quantized and MOMENTUM_SCALE not in state:
        return False
    for key in state_keys(use_muon):
        value = state.get(key)
        if value is None:
            return False
        if key == "step":
            continue
        if value.device != device or value.shape != shape or value.dtype != dtype:
            return False
    return True


def adapt_state(param: Tensor, state: State, use_muon: bool, fused: bool, spec: StateSpec) -> State | None:
    """Return the old state for a replaced or moved parameter, or None where it cannot be carried over.

    It is carried when shape and layout are the same and the values exist; another device is fine.
    """
    if use_muon and spec.elsewhere:
        return new_state(param, use_muon, fused, spec)
    values = {key: state.get(key) for key in state_keys(use_muon)}
    for key, value in values.items():
        if not isinstance(value, Tensor) or value.is_meta:
            return None
        if key != "step" and not same_layout(value, param):
            return None
    if MOMENTUM_SCALE in state:
        values["momentum_buffer"] = plain_momentum(state)
    made = saved_state(param, values, {}, use_muon, fused, spec)
    if use_muon and spec.row_statistics and ROW_STATISTICS in state:
        made[ROW_STATISTICS] = state[ROW_STATISTICS].to(param.device)  # of a matrix stored the same way
    return made


def saved_state(param: Tensor, saved: State, live: State, use_muon: bool, fused: bool, spec: StateSpec) -> State:
    """Return new state that holds the values of `saved`, cast and moved; never an alias of them.

    Args:
        param: the parameter.
        saved: its state of another time or place; row statistics may be absent and start at zero.
        live: its present state, which tells the layout of row statistics.
        use_muon: its half.
        fused: whether fused AdamW updates it.
        spec: how state rests here.
    """
    if use_muon and spec.elsewhere:
        return new_state(param, use_muon, fused, spec)
    if use_muon:
        dtype, device = spec.plain_dtype(param), spec.momentum_device(param)
        made = resting_state(copy_into_layout(saved["momentum_buffer"], param, dtype, device), param, spec)
        if ROW_STATISTICS in live:
            made[ROW_STATISTICS] = load_rows(saved.get(ROW_STATISTICS), live[ROW_STATISTICS])
        return made
    dtype = spec.adam_dtype(param)
    return {
        "step": new_step(param, fused, float(saved["step"])),
        "exp_avg": copy_into_layout(saved["exp_avg"], param, dtype),
        "exp_avg_sq": copy_into_layout(saved["exp_avg_sq"], param, dtype),
    }


def resting_state(momentum: Tensor, param: Tensor, spec: StateSpec) -> State:
    """Return the state of a matrix whose plain `momentum` is at hand in its layout, dtype and place of rest."""
    return quantized_state(momentum, param, spec) if spec.quantized else {"momentum_buffer": momentum}


def has_values(state: State) -> bool:
    """Return whether any tensor of `state` is not zero on this rank; reads them on the host."""
    tensors = [local_tensor(value) for value in state.values() if isinstance(value, Tensor)]
    return any(bool(tensor.any()) for tensor in tensors if tensor.numel() and not tensor.is_meta)
