# SPDX-License-Identifier: Apache-2.0
"""The log-likelihood of the four letters after an MMLU prompt: one forward pass, no format to get wrong."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from .generation import encode_prompts, evaluation_mode, fit_to_context, pad_left, padding_id
from .prompts import LETTERS


def letter_log_likelihoods(model: Any, tokenizer: Any, prompts: Sequence[str]) -> list[dict[str, float]]:
    """Return, per prompt, the log-probability in nats of each letter as the next token.

    Raises:
        ValueError: the tokenizer does not write each letter as one token behind the prompt.
    """
    if not prompts:
        return []
    contexts, letters = zip(*(_next_tokens(tokenizer, prompt) for prompt in prompts), strict=True)
    fitted, _ = fit_to_context(list(contexts), 1, model)
    with evaluation_mode(model) as device:
        ids, mask = pad_left(fitted, padding_id(tokenizer), device)
        known = inspect.signature(model.forward).parameters
        extra: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        if "position_ids" in known:
            extra["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **extra).logits[:, -1].float()
        scores = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(letters, device=device)).tolist()
    return [dict(zip(LETTERS, row, strict=True)) for row in scores]


def _next_tokens(tokenizer: Any, prompt: str) -> tuple[list[int], list[int]]:
    """Return the context that the four continuations share, and the token of each letter."""
    variants = encode_prompts(tokenizer, [prompt + letter for letter in LETTERS])
    context = variants[0][:-1]
    if any(len(ids) != len(context) + 1 or ids[:-1] != context for ids in variants):
        raise ValueError("the tokenizer must write each of A, B, C and D as one token; use the first letter instead.")
    return context, [ids[-1] for ids in variants]
