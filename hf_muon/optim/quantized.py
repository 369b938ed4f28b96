# SPDX-License-Identifier: Apache-2.0
"""Momentum in eight bits: one code per element and one float32 scale per block, by bitsandbytes' blockwise functions.

Codes are the 255 whole numbers from -127 to 127, as unsigned bytes plus 128; a value is `code / 127 * scale`, the
scale the largest magnitude of its block. So the error of a value is at most `scale / 254`, up to the rounding of the
kernels (1 % of it). Quantising what came out of `dequantize` gives the same codes and scales to the bit. Everyone but
the step itself reads and writes plain float32 momentum.

References: Gupta et al., "Effective Quantization of Muon Optimizer States", arXiv:2509.23106 (linear codes are enough
for Muon); Dettmers et al., arXiv:2110.02861 (blocks).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .state_spec import MOMENTUM_SCALE, StateSpec
from .tensor_layout import local_tensor, zeros_in_layout

BLOCK = 256
_MOST = 2**30  # elements per call: the CUDA kernels count in 32 bits


def check_library() -> None:
    """Raise where bitsandbytes is missing.

    Raises:
        ImportError: with the command that installs it.
    """
    try:
        import bitsandbytes.functional  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"momentum_dtype=int8 needs bitsandbytes, which cannot be imported ({error}). Install it with:"
            " pip install 'hf-muon[quantized]', or use momentum_dtype=bfloat16."
        ) from error


def scale_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (slices, blocks) of the scales for a local momentum of `shape`.

    Blocks run over storage and start anew at every entry of the first axis of a stack, so that experts share none and
    a range of them has the scales it has in the whole. Experts in one 2-D matrix (LoRA's) do share.
    """
    slices = shape[0] if len(shape) > 2 else 1
    return slices, -(-math.prod(shape) // (max(1, slices) * BLOCK))


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (uint8, shape of `values`) and scales (float32, `scale_shape`).

    Args:
        values: finite, any shape; read as float32. This rank's part.

    Note:
        Where blocks do not fill a slice a padded copy is made.
    """
    from bitsandbytes.functional import quantize_blockwise

    slices, blocks = scale_shape(values.shape)
    if not values.numel():
        return torch.empty_like(values, dtype=torch.uint8), values.new_empty((slices, blocks), dtype=torch.float32)
    padded = _padded(values.float(), slices, blocks)
    pieces = [quantize_blockwise(piece, code=_levels(piece.device), blocksize=BLOCK) for piece in padded.split(_MOST)]
    codes = torch.cat([codes for codes, _ in pieces]) if len(pieces) > 1 else pieces[0][0]
    scales = torch.cat([state.absmax for _, state in pieces]) if len(pieces) > 1 else pieces[0][1].absmax
    return _unpadded(codes, values.shape, slices), scales.view(slices, blocks)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 values that `codes` and `scales` stand for, in the shape of `codes`."""
    from bitsandbytes.functional import dequantize_blockwise

    if not codes.numel():
        return torch.empty_like(codes, dtype=torch.float32)
    padded = _padded(codes, *scales.shape)
    pieces = [
        dequantize_blockwise(piece, absmax=its, code=_levels(piece.device), blocksize=BLOCK)
        for piece, its in zip(padded.split(_MOST), scales.reshape(-1).split(_MOST // BLOCK), strict=True)
    ]
    values = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return _unpadded(values, codes.shape, scales.shape[0])


def zero_scales(param: Tensor, spec: StateSpec) -> Tensor:
    """Return the scales of a zero momentum of `param`, where it rests; none where another replica owns the matrix."""
    shape = (0, *param.shape[1:]) if spec.elsewhere else local_tensor(param).shape
    device = spec.momentum_device(param)
    pinned = device.type == "cpu" and local_tensor(param).is_cuda
    return torch.zeros(scale_shape(shape), dtype=torch.float32, device=device, pin_memory=pinned)


def quantized_state(momentum: Tensor, param: Tensor, spec: StateSpec) -> dict[str, Tensor]:
    """Return codes and scales of a plain `momentum` in the layout of `param`, where they rest."""
    codes = zeros_in_layout(param, torch.uint8, spec.momentum_device(param))
    scales = zero_scales(param, spec)
    for target, source in zip((local_tensor(codes), scales), quantize(local_tensor(momentum)), strict=True):
        target.copy_(source)
    return {"momentum_buffer": codes, MOMENTUM_SCALE: scales}


def plain_momentum(state: dict[str, Any]) -> Tensor:
    """Return the momentum of a parameter's state: itself, or widened to float32 in the layout of its codes."""
    momentum: Tensor = state["momentum_buffer"]
    if MOMENTUM_SCALE not in state:
        return momentum
    result = zeros_in_layout(momentum, torch.float32)
    local_tensor(result).copy_(dequantize(local_tensor(momentum), state[MOMENTUM_SCALE]))
    return result


def with_plain_momenta(state: dict[Any, Any]) -> dict[Any, Any]:
    """Return `state` of a state dict with plain momenta; the rest is shared. One float32 copy of quantized ones."""
    return {key: _plain(values) if MOMENTUM_SCALE in values else values for key, values in state.items()}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in values.items() if key != MOMENTUM_SCALE}
    return {**rest, "momentum_buffer": plain_momentum(values)}


@functools.cache
def _levels(device: torch.device) -> Tensor:
    """Return the value of every code at scale 1.

    The lowest, -128/127, is never the nearest: it keeps the table at 256 entries without a value that stands twice,
    which kernels may resolve either way.
    """
    return torch.arange(-128, 128, dtype=torch.float32, device=device) / 127


def _padded(values: Tensor, slices: int, blocks: int) -> Tensor:
    """Return the elements in a row, every slice filled up to whole blocks."""
    rows = values.reshape(slices, -1)
    missing = blocks * BLOCK - rows.shape[1]
    return (torch.nn.functional.pad(rows, (0, missing)) if missing else rows).reshape(-1)


def _unpadded(padded: Tensor, shape: torch.Size, slices: int) -> Tensor:
    return padded.view(slices, -1)[:, : shape.numel() // slices].reshape(shape)
