# SPDX-License-Identifier: Apache-2.0
"""Generated sums: `17+5=` is answered `22` with the digits reversed; whole pairs are held out by hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from ..recipe.schema import Recipe
from ..resources import load_evaluation
from .tasks import plain_collate, stack_batches

CHARACTERS = "0123456789+="
END = len(CHARACTERS)
PAD = END + 1
VOCABULARY = PAD + 1
IGNORED = -100
SPLITS = ("train", "validation", "test")


def split_of(a: int, b: int) -> str:
    """Return the split of a pair; `a+b` and `b+a` always fall together, so neither gives the other away.

    A tenth of the pairs is for validation, a tenth for the test; the hash does not depend on seed or platform.
    """
    low, high = sorted((a, b))
    bucket = hashlib.sha256(f"{low}+{high}".encode()).digest()[0] * 10 // 256
    return {0: "test", 1: "validation"}.get(bucket, "train")


def encode(text: str) -> list[int]:
    """Return one id per character."""
    return [CHARACTERS.index(character) for character in text]


def decode(ids: list[int]) -> str:
    """Return the characters of ids; padding and end are dropped."""
    return "".join(CHARACTERS[i] for i in ids if i < len(CHARACTERS))


def question_and_answer(a: int, b: int) -> tuple[str, str]:
    """Return the prompt and the answer, lowest digit first: the order in which carries are known."""
    return f"{a}+{b}=", str(a + b)[::-1]


class AdditionTask:
    """Sums of two numbers from 0 to `max_operand`; only the answer counts in the loss."""

    processing_class = None
    model_source = ""
    collate = staticmethod(plain_collate)

    def __init__(self, recipe: Recipe) -> None:
        from datasets import Dataset

        self.benchmark_rows: dict[str, Any] = {}
        top = recipe.task.max_operand
        self._limit = recipe.task.eval_rows
        self._length = 2 * len(str(top)) + 2 + len(str(2 * top)) + 1
        self._answer_tokens = len(str(2 * top)) + 1
        self.pairs: dict[str, list[tuple[int, int]]] = {name: [] for name in SPLITS}
        for a in range(top + 1):
            for b in range(top + 1):
                self.pairs[split_of(a, b)].append((a, b))
        for name in ("validation", "test"):  # a fixed order that a limit does not bias towards small numbers
            self.pairs[name].sort(key=lambda pair: hashlib.sha256(f"order {pair}".encode()).digest())
            self.pairs[name] = self.pairs[name][: self._limit or None]
        self._sets = {name: Dataset.from_list([self._row(*pair) for pair in self.pairs[name]]) for name in SPLITS}
        self.train = self._sets["train"]
        self.facts = {f"{name}_pairs": len(self.pairs[name]) for name in SPLITS} | {"vocabulary": VOCABULARY}

    def _row(self, a: int, b: int) -> dict[str, list[int]]:
        question, answer = question_and_answer(a, b)
        prompt, target = encode(question), [*encode(answer), END]
        padding = self._length - len(prompt) - len(target)
        return {
            "input_ids": prompt + target + [PAD] * padding,
            "labels": [IGNORED] * len(prompt) + target + [IGNORED] * padding,
        }

    def model_config(self) -> dict[str, Any]:
        """Return the vocabulary, the positions and the special tokens."""
        return {
            "vocab_size": VOCABULARY,
            "max_position_embeddings": max(32, self._length),
            "bos_token_id": None,
            "eos_token_id": END,
            "pad_token_id": PAD,
        }

    def batches(self, split: str) -> Iterator[dict[str, Any]]:
        """Yield batches of a held-out split."""
        return stack_batches(self._sets[split], 256)

    def scores(self, model: Any, split: str) -> dict[str, float]:
        """Return exact match by greedy decoding from the question alone."""
        metrics = load_evaluation("exact_match")
        wanted = [question_and_answer(*pair) for pair in self.pairs[split]]
        answers = metrics.greedy_continuations(
            model, [encode(question) for question, _ in wanted], max_new_tokens=self._answer_tokens, end=END
        )
        return {"exact_match": metrics.exact_match([decode(ids) for ids in answers], [right for _, right in wanted])}
