# SPDX-License-Identifier: Apache-2.0
"""Text in packed blocks, with a small byte-level BPE tokenizer trained on the training split."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..recipe.schema import Recipe
from ..resources import recipes_dir
from .tasks import plain_collate, stack_batches

END_OF_TEXT = "<|end|>"
SPLITS = ("train", "validation", "test")


class TextTask:
    """Next-token prediction on rows of question and answer (or `text`), packed into blocks of one length."""

    model_source = ""
    collate = staticmethod(plain_collate)

    def __init__(self, recipe: Recipe) -> None:
        from datasets import Dataset

        self.benchmark_rows: dict[str, Any] = {}
        task = recipe.task
        folder = find_data(task.data)
        texts = {name: read_rows(folder / f"{name}.jsonl", task.max_rows) for name in SPLITS}
        self.processing_class = train_tokenizer(texts["train"], task.vocab_size)
        self._block_size = task.block_size
        self._limit = task.eval_rows
        self._sets: dict[str, Any] = {}
        for name in SPLITS:
            blocks = self._pack(texts[name])
            if not blocks:
                raise UsageError(
                    f"{folder / name}.jsonl must fill at least one block of task.block_size={task.block_size} tokens; "
                    "got fewer. Use a smaller block_size or more rows."
                )
            self._sets[name] = Dataset.from_dict({"input_ids": blocks, "labels": blocks})
        self.train = self._sets["train"]
        self.facts = {f"{name}_blocks": len(self._sets[name]) for name in SPLITS} | {
            "vocabulary": len(self.processing_class),
            "training_tokens": len(self.train) * task.block_size,
        }

    def _pack(self, texts: list[str]) -> list[list[int]]:
        """Join all rows with an end token between them and cut; the last incomplete block is dropped."""
        end = self.processing_class.convert_tokens_to_ids(END_OF_TEXT)
        stream: list[int] = []
        for ids in self.processing_class(texts, add_special_tokens=False)["input_ids"]:
            stream += [*ids, end]
        size = self._block_size
        return [stream[start : start + size] for start in range(0, len(stream) - size + 1, size)]

    def model_config(self) -> dict[str, Any]:
        """Return the vocabulary, the positions and the special tokens."""
        end = self.processing_class.convert_tokens_to_ids(END_OF_TEXT)
        return {
            "vocab_size": len(self.processing_class),
            "max_position_embeddings": self._block_size,
            "bos_token_id": end,
            "eos_token_id": end,
            "pad_token_id": end,
        }

    def batches(self, split: str) -> Iterator[dict[str, Any]]:
        """Yield batches of a held-out split."""
        return stack_batches(self._sets[split], 16, self._limit)

    def scores(self, model: Any, split: str) -> dict[str, float]:
        """Return nothing: the loss is the metric of this task."""
        return {}


def find_data(name: str) -> Path:
    """Return the folder of a shipped data set or of a local one.

    Raises:
        UsageError: neither exists, or one of the three files is missing.
    """
    shipped = recipes_dir() / "data"
    folder = shipped / name if (shipped / name).is_dir() else Path(name)
    if not folder.is_dir():
        known = ", ".join(sorted(path.name for path in shipped.iterdir() if (path / "validation.jsonl").is_file()))
        raise UsageError(f"task.data must be a shipped data set ({known}) or a local folder; got {name!r}.")
    missing = [f"{split}.jsonl" for split in SPLITS if not (folder / f"{split}.jsonl").is_file()]
    if missing:
        raise UsageError(f"{folder} must hold train.jsonl, validation.jsonl and test.jsonl; {missing[0]} is missing.")
    return folder


def read_rows(path: Path, limit: int = 0) -> list[str]:
    """Return the texts of a JSONL file: `text`, or `question` and `answer` on two lines.

    Raises:
        UsageError: a line does not parse or has neither; the message names the line.
    """
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            texts.append(row["text"] if "text" in row else f"{row['question']}\n{row['answer']}")
        except (ValueError, KeyError, TypeError):
            raise UsageError(
                f"{path}:{number} must be a JSON object with text, or with question and answer; got {line[:60]!r}."
            ) from None
        if limit and len(texts) == limit:
            break
    if not texts:
        raise UsageError(f"{path} must hold at least one row; got none.")
    return texts


def train_tokenizer(texts: list[str], vocab_size: int) -> Any:
    """Return a byte-level BPE tokenizer trained on `texts`; deterministic, a second or so per megabyte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    # Digits stay single: numbers of any length share their pieces.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
