# SPDX-License-Identifier: Apache-2.0
"""Held-out loss: the mean over tokens, not over batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

IGNORED = -100  # label of a position that does not count


@torch.no_grad()
def mean_token_loss(model: torch.nn.Module, batches: Iterable[dict[str, Any]]) -> float:
    """Return the mean cross-entropy per counted token, in nats.

    Args:
        model: a causal language model; its training mode is restored afterwards.
        batches: dicts with `input_ids` and `labels` of shape (batch, length); labels of -100 do not count.

    Raises:
        ValueError: no token counts.

    Note:
        One forward pass per batch; batches of different sizes weigh by their tokens.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    total, counted = 0.0, 0
    try:
        for batch in batches:
            labels = batch["labels"].to(device)
            logits = model(input_ids=batch["input_ids"].to(device)).logits[:, :-1]
            targets = labels[:, 1:]
            loss = torch.nn.functional.cross_entropy(
                logits.reshape(-1, logits.shape[-1]).float(),
                targets.reshape(-1),
                ignore_index=IGNORED,
                reduction="sum",
            )
            total += loss.item()
            counted += int((targets != IGNORED).sum())
    finally:
        model.train(was_training)
    if not counted:
        raise ValueError("batches must hold at least one counted token; got none. Give rows with labels.")
    return total / counted
