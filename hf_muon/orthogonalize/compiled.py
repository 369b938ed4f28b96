# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz as one opaque operator for torch.compile.

Traced through, every matrix shape of a model would be a graph of its own and the ninth would hit the recompile limit.
As an operator the iteration stays eager inside a compiled graph, whatever the number of shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import resolve_dtype


@torch.library.custom_op("hf_muon::newton_schulz", mutates_args=())
def newton_schulz_op(matrix: Tensor, method: str, coefficients: list[float], dtype: str, eps: float) -> Tensor:
    """Run `orthogonalize`; `coefficients` is the flat list a, b, c, a, b, c, ... of the steps."""
    from .newton_schulz import orthogonalize

    product_dtype = resolve_dtype(dtype, matrix.device, matrix.dtype)
    rows = tuple(zip(coefficients[0::3], coefficients[1::3], coefficients[2::3], strict=True))
    return orthogonalize(matrix, method, rows, product_dtype, eps).contiguous()


@newton_schulz_op.register_fake
def _(matrix: Tensor, method: str, coefficients: list[float], dtype: str, eps: float) -> Tensor:
    return matrix.new_empty(matrix.shape)
