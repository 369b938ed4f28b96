# SPDX-License-Identifier: Apache-2.0
"""Exact match: whole answers, right or wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .significance import standard_error as standard_error


def exact_match(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Return the share of predictions that equal their reference, after stripping white space.

    Raises:
        ValueError: the lengths differ, or there is nothing to score.
    """
    if len(predictions) != len(references) or not references:
        raise ValueError(
            f"predictions must match the references one to one; got {len(predictions)} and {len(references)}."
        )
    return sum(p.strip() == r.strip() for p, r in zip(predictions, references, strict=True)) / len(references)


@torch.no_grad()
def greedy_continuations(
    model: torch.nn.Module, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, end: int, batch_size: int = 256
) -> list[list[int]]:
    """Decode greedily, one continuation per prompt, cut before the first `end` token.

    Prompts of equal length are decoded together, so that no padding can leak into an answer.

    Args:
        model: a causal language model with `generate`.
        prompts: token ids of each prompt.
        max_new_tokens: at most this many tokens each.
        end: id of the token that ends an answer.
        batch_size: prompts decoded together.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    answers: list[list[int]] = [[] for _ in prompts]
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    try:
        for length, indices in sorted(by_length.items()):
            for start in range(0, len(indices), batch_size):
                chosen = indices[start : start + batch_size]
                ids = torch.tensor([list(prompts[i]) for i in chosen], device=device)
                out = model.generate(  # type: ignore[operator]
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=max_new_tokens,
                    eos_token_id=end,
                    pad_token_id=end,
                )
                for i, row in zip(chosen, out[:, length:].tolist(), strict=True):
                    answers[i] = row[: row.index(end)] if end in row else row
    finally:
        model.train(was_training)
    return answers
