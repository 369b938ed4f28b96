# SPDX-License-Identifier: Apache-2.0
"""Attention as a GPU runs it, for runs on fake tensors: a flash kernel, causal, without a mask.

Fake tensors have no values, so transformers cannot see that a mask is not needed, and builds one; on a CPU torch then
also repeats keys and values. Neither happens in a training step on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

NAME = "hf_muon_fake_attention"


def use_flash_attention(model: Any) -> None:
    """Make a transformers model attend by `attend`; a model that does not allow it keeps its own attention."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(NAME)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend causally by torch's flash kernel; shapes are (batch, heads, tokens, head size)."""
    width = value.shape[-1]
    if width < query.shape[-1]:  # latent attention: flash kernels want one size
        value = F.pad(value, (0, query.shape[-1] - width))
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out[..., :width].transpose(1, 2).contiguous(), None


def _no_mask(*arguments: Any, **options: Any) -> None:
    return None
