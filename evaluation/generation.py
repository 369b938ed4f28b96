# SPDX-License-Identifier: Apache-2.0
"""Greedy completions in batches: left padding, a KV cache, and an early end for rows that are done."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from .extraction import cut_at_stops

logger = logging.getLogger("hf_muon.evaluation")


def encode_prompts(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each prompt with the tokenizer's own special tokens at the start, none at the end."""
    encoded = [list(ids) for ids in tokenizer(list(prompts))["input_ids"]] if prompts else []
    end = getattr(tokenizer, "eos_token_id", None)
    return [ids[:-1] if end is not None and len(ids) > 1 and ids[-1] == end else ids for ids in encoded]


def pad_left(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and attention mask of shape (batch, longest prompt); padding stands on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids.to(device), mask.to(device)


def padding_id(tokenizer: Any) -> int:
    """Return a token id to pad with; padding is masked, so any valid id serves where there is none of its own."""
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        if (value := getattr(tokenizer, name, None)) is not None:
            return int(value)
    return 0


def fit_to_context(prompts: list[list[int]], max_new_tokens: int, model: Any) -> tuple[list[list[int]], int]:
    """Return prompts and new tokens that fit the model's positions; what does not fit is cut, with one log line.

    New tokens get at most half of the positions, prompts lose their beginning: neither depends on the rest of a batch.
    """
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 1:
        return prompts, max_new_tokens
    new = min(max_new_tokens, positions // 2)
    room = positions - new
    if new < max_new_tokens or any(len(prompt) > room for prompt in prompts):
        _say_once(positions, new, room)
    return [prompt[-room:] for prompt in prompts], new


@functools.cache
def _say_once(positions: int, new: int, room: int) -> None:
    logger.warning(
        "the model holds %d positions: %d new tokens at most, and a prompt keeps its last %d.", positions, new, room
    )


class _RowsAreDone(StoppingCriteria):
    """Ends each row whose text holds a stop or is decided; only the tail since the prompt is decoded."""

    def __init__(
        self, tokenizer: Any, prompt_length: int, stops: Sequence[str], decided: Callable[[str], bool] | None
    ) -> None:
        self._decode = tokenizer.decode
        self._start = prompt_length
        self._stops = tuple(stops)
        self._decided = decided
        self.ends: list[int | None] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return which rows are done; `ends` keeps after how many new tokens each was."""
        rows = input_ids[:, self._start :].tolist()
        before = self.ends or [None] * len(rows)
        self.ends = [
            end if end is not None else len(row) if self._over(row) else None
            for end, row in zip(before, rows, strict=True)
        ]
        return torch.tensor([end is not None for end in self.ends], dtype=torch.bool, device=input_ids.device)

    def _over(self, row: list[int]) -> bool:
        text = self._decode(row, skip_special_tokens=True)
        return any(stop in text for stop in self._stops) or (self._decided is not None and self._decided(text))


@contextlib.contextmanager
def evaluation_mode(model: Any) -> Iterator[torch.device]:
    """Switch off dropout and gradients and switch the KV cache on; yield the device, restore everything after."""
    was_training = model.training
    config: Any = getattr(model, "config", None)
    had_cache = getattr(config, "use_cache", None)
    model.eval()
    if had_cache is False:  # gradient checkpointing leaves it off
        config.use_cache = True
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        model.train(was_training)
        if had_cache is False:
            config.use_cache = False


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    stops: Sequence[str] = (),
    batch_size: int = 16,
    decided: Callable[[str], bool] | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Iterator[list[str]]:
    """Yield the completions of each batch, in the order of the prompts.

    Args:
        model: a causal language model with `generate`; its mode is restored after each batch.
        tokenizer: any; one without a padding token is fine.
        prompts: texts; batches are cheapest when neighbours are about as long.
        max_new_tokens: tokens generated at most.
        stops: a completion is cut before the first of these, and its row ends there.
        batch_size: prompts decoded together; changes nothing but ties of the arithmetic.
        decided: ends a row once more text cannot matter.
        on_batch: called with the number of prompts after each batch.

    Note:
        Greedy: temperatures and penalties in the model's own generation settings are left out.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be 1 or more; got {batch_size}.")
    encoded, new_tokens = fit_to_context(encode_prompts(tokenizer, prompts), max_new_tokens, model)
    for start in range(0, len(encoded), batch_size):
        batch = encoded[start : start + batch_size]
        texts = _complete(model, tokenizer, batch, new_tokens, stops, decided)
        yield [cut_at_stops(text, tuple(stops)) for text in texts]
        if on_batch is not None:
            on_batch(len(batch))


def _complete(
    model: Any,
    tokenizer: Any,
    batch: list[list[int]],
    max_new_tokens: int,
    stops: Sequence[str],
    decided: Callable[[str], bool] | None,
) -> list[str]:
    stop_tokens = _end_tokens(model, tokenizer)
    with evaluation_mode(model) as device:
        pad = padding_id(tokenizer)
        ids, mask = pad_left(batch, pad, device)
        criteria = _RowsAreDone(tokenizer, ids.shape[1], stops, decided)
        with _only_greedy(model, _greedy(model, tokenizer, max_new_tokens, pad)) as settings:
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=settings,
                stopping_criteria=StoppingCriteriaList([criteria] if stops or decided else []),
            )
    texts = []
    for index, row in enumerate(out[:, ids.shape[1] :].tolist()):
        # A row that is done goes on while others of its batch are not: what it says then must not depend on them.
        row = row[: criteria.ends[index]] if criteria.ends else row
        end = next((position for position, token in enumerate(row) if token in stop_tokens), len(row))
        texts.append(tokenizer.decode(row[:end], skip_special_tokens=True))
    return texts


@contextlib.contextmanager
def _only_greedy(model: Any, settings: Any) -> Iterator[Any]:
    """Hide the model's own generation settings: `generate` fills in penalties and the like from them."""
    own = model.generation_config
    model.generation_config = settings
    try:
        yield settings
    finally:
        model.generation_config = own


def _greedy(model: Any, tokenizer: Any, max_new_tokens: int, pad: int) -> Any:
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        use_cache=True,
        pad_token_id=pad,
        eos_token_id=sorted(_end_tokens(model, tokenizer)) or None,
    )


def _end_tokens(model: Any, tokenizer: Any) -> set[int]:
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    own = own if own is not None else getattr(getattr(model, "config", None), "eos_token_id", None)
    found = set(own) if isinstance(own, (list, tuple)) else {own}
    return {int(token) for token in found | {getattr(tokenizer, "eos_token_id", None)} if token is not None}
