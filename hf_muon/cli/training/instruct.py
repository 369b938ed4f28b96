# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning on prompts and answers: only the answer counts in the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..console import notes, say
from ..errors import UsageError
from ..recipe.schema import Recipe
from .benchmarks import load_benchmark_rows
from .hub import locate_data, locate_model
from .rows import SUFFIXES, layout_of, read_pairs, shipped_data, split_files

IGNORED = -100
SPLITS = ("train", "validation", "test")


class InstructTask:
    """Rows of prompt and answer for a pretrained model, or for a small Llama with a tokenizer of its own."""

    def __init__(self, recipe: Recipe) -> None:
        self._task = recipe.task
        self._recipe = recipe
        self.model_source = locate_model(recipe.model.name) if recipe.model.name else ""
        self.benchmark_rows = load_benchmark_rows(recipe)
        pairs = load_splits(recipe)
        self.processing_class = self._tokenizer(pairs["train"])
        self._pad = pad_token(self.processing_class)
        self._sets, rows, dropped = {}, {}, 0
        for name in SPLITS:
            encoded = self._encode(pairs[name])
            rows[f"{name}_rows"] = len(encoded)
            dropped += len(pairs[name]) - len(encoded)
            self._sets[name] = encoded
        if not rows["train_rows"] * rows["validation_rows"] * rows["test_rows"]:
            raise UsageError(
                f"task.max_length must leave room for an answer in every split; got {self._task.max_length}. Raise it."
            )
        self.train = self._sets["train"]
        self.facts = {**rows, "rows_without_answer_in_max_length": dropped, "vocabulary": len(self.processing_class)}

    def _tokenizer(self, train: Any) -> Any:
        if self.model_source:
            from transformers import AutoTokenizer

            model = self._recipe.model
            tokenizer = AutoTokenizer.from_pretrained(
                self.model_source, trust_remote_code=model.trust_tokenizer_code, padding_side="right"
            )
            if tokenizer.eos_token_id is None:
                raise UsageError(f"model.name must have a tokenizer with an end token; {model.name} has none.")
            return tokenizer
        from .text import train_tokenizer

        return train_tokenizer([row["prompt"] + row["answer"] for row in train], self._task.vocab_size)

    def _encode(self, pairs: Any) -> Any:
        """Tokenize a split; rows whose answer is cut away whole would count nothing and are left out."""
        encoded = pairs.map(
            encode_pair,
            fn_kwargs={
                "tokenizer": self.processing_class,
                "max_length": self._task.max_length,
                "append_eos": self._task.append_eos,
            },
            remove_columns=pairs.column_names,
            desc="tokenizing",
        )
        return encoded.filter(has_target, input_columns="labels", desc="dropping rows without an answer")

    def model_config(self) -> dict[str, Any]:
        """Return the vocabulary, the positions and the special tokens of a Llama from random weights."""
        end = self.processing_class.eos_token_id
        positions = 2 * self._task.max_length + self._task.max_new_tokens
        return {
            "vocab_size": len(self.processing_class),
            "max_position_embeddings": max(positions, 2048),
            "bos_token_id": end,
            "eos_token_id": end,
            "pad_token_id": end,
        }

    def collate(self, rows: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
        """Pad rows on the right into `input_ids`, `labels`, `attention_mask` of shape (rows, length)."""
        import torch

        longest = max(len(row["input_ids"]) for row in rows)
        length = self._task.max_length if self._task.padding == "max_length" else longest

        def padded(key: str, value: int) -> Any:
            return torch.tensor([[*row[key], *[value] * (length - len(row[key]))] for row in rows])

        mask = [[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows]
        return {
            "input_ids": padded("input_ids", self._pad),
            "labels": padded("labels", IGNORED),
            "attention_mask": torch.tensor(mask),
        }

    def batches(self, split: str) -> Iterator[dict[str, Any]]:
        """Yield batches of a held-out split."""
        rows = self._sets[split]
        count = min(len(rows), self._task.loss_rows or len(rows))
        size = self._task.eval_batch_size
        for start in range(0, count, size):
            yield self.collate([rows[k] for k in range(start, min(start + size, count))])

    def scores(self, model: Any, split: str) -> dict[str, float]:
        """Return nothing: benchmarks are scored after training, from the saved model."""
        return {}


def pad_token(tokenizer: Any) -> int:
    """Return the id that fills short rows; it is masked, so the end token serves where there is no other."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def encode_pair(row: dict[str, str], tokenizer: Any, max_length: int, append_eos: bool) -> dict[str, list[int]]:
    """Return the ids of prompt and answer, cut to `max_length`, and labels that mask the prompt.

    The prompt is as long as the tokenizer itself makes it, special tokens in front included. A token that joins the
    prompt's last character with the answer's first holds part of the answer: it counts.
    """
    prompt = tokenizer(row["prompt"])["input_ids"]
    ids = list(tokenizer(row["prompt"] + row["answer"])["input_ids"])
    masked = 0
    while masked < min(len(prompt), len(ids)) and prompt[masked] == ids[masked]:
        masked += 1
    if append_eos and (not ids or ids[-1] != tokenizer.eos_token_id):
        ids.append(tokenizer.eos_token_id)
    ids = ids[:max_length]
    return {"input_ids": ids, "labels": [IGNORED] * min(masked, len(ids)) + ids[masked:]}


def has_target(labels: list[int]) -> bool:
    """Return whether any position counts: the first label is never predicted."""
    return any(label != IGNORED for label in labels[1:])


def load_splits(recipe: Recipe) -> dict[str, Any]:
    """Return `datasets.Dataset` of prompt and answer for train, validation and test.

    Raises:
        UsageError: the data is not there, has no known layout, or does not parse.
    """
    from datasets import Dataset

    files = data_files(recipe.task.data)
    if {"validation", "test"} <= set(files):
        return {name: Dataset.from_list(read_pairs(files[name], recipe.task.max_rows)) for name in SPLITS}
    if files:
        return split_off(recipe, shuffled(recipe, Dataset.from_list(read_pairs(files["train"]))))
    return split_off(recipe, _hub_pairs(recipe))


def data_files(name: str) -> dict[str, Path]:
    """Return the local files that `task.data` means, by split; nothing for a hub id.

    Raises:
        UsageError: a folder or file that cannot be read as rows.
    """
    path = shipped_data().get(name) or Path(name).expanduser()
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise UsageError(f"task.data must be a file of {', '.join(SUFFIXES)}; got {name!r}.")
        return {"train": path}
    if path.is_dir():
        files = split_files(path)
        if files and "train" not in files:
            raise UsageError(f"{path} must hold train.jsonl (or .json, .csv, .parquet); it has none.")
        return files
    if path.suffix in SUFFIXES or name.count("/") > 1 or name.startswith((".", "~")):
        known = ", ".join(shipped_data())
        raise UsageError(
            f"task.data must be a shipped data set ({known}), a file, a folder or a hub id; {name!r} does not exist."
        )
    return {}


def shuffled(recipe: Recipe, rows: Any) -> Any:
    """Return the part of the rows that the recipe uses: shuffle, share, limit."""
    task = recipe.task
    if task.shuffle_seed >= 0:
        rows = rows.shuffle(seed=task.shuffle_seed)
    count = int(len(rows) * task.share)
    return rows.select(range(min(count, task.max_rows) if task.max_rows else count))


def split_off(recipe: Recipe, pairs: Any) -> dict[str, Any]:
    """Split held-out rows off; their first half chooses learning rates, the second is reported."""
    task = recipe.task
    held_out = int(len(pairs) * task.held_out_share)
    if held_out < 2 or held_out >= len(pairs):
        raise UsageError(
            f"task.data must leave rows to train on and at least two held-out ones; got {len(pairs)} rows with "
            f"task.held_out_share={task.held_out_share}. Give more rows or another share."
        )
    parts = pairs.train_test_split(test_size=task.held_out_share, seed=task.held_out_seed)
    held, middle = parts["test"], len(parts["test"]) // 2
    return {
        "train": parts["train"],
        "validation": held.select(range(middle)),
        "test": held.select(range(middle, len(held))),
    }


def _hub_pairs(recipe: Recipe) -> Any:
    """Load a hub data set, or a local copy of one, and turn its rows into prompt and answer."""
    import datasets

    task = recipe.task
    source = task.data if Path(task.data).expanduser().is_dir() else locate_data(task.data)
    say(f"Reading {task.data} ...")
    try:
        if notes.is_terminal:
            datasets.enable_progress_bars()
        rows = datasets.load_dataset(source, task.data_config or None, split=task.data_split)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(f"task.data must be a data set with split {task.data_split!r}; got: {reason}") from None
    rows = shuffled(recipe, rows)
    columns = rows.column_names
    if columns == ["train"]:  # one configuration of cais/mmlu keeps its rows one level down
        rows = rows.flatten().rename_columns({f"train.{key}": key for key in rows.features["train"]})
        columns = rows.column_names
    convert = layout_of(columns, task.data)

    def pair(row: dict[str, Any], index: int) -> dict[str, str]:
        try:
            prompt, answer = convert(row)
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{task.data} row {index} must hold {error}.") from None
        return {"prompt": prompt, "answer": answer}

    return rows.map(pair, with_indices=True, remove_columns=columns, desc="reading rows").select_columns(
        ["prompt", "answer"]
    )
