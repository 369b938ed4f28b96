# SPDX-License-Identifier: Apache-2.0
"""What a task gives to the driver, and which task a recipe names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from ..recipe.schema import Recipe


class Task(Protocol):
    """Data, model and metrics of one kind of training; the same for every run of a recipe."""

    train: Any  # datasets.Dataset with input_ids and labels of one length
    processing_class: Any  # saved beside each checkpoint, or None
    facts: dict[str, Any]  # sizes for results.json

    def model_config(self) -> dict[str, Any]:
        """Return the keys of LlamaConfig that the data decides."""
        ...

    def batches(self, split: str) -> Iterator[dict[str, Any]]:
        """Yield batches of a held-out split, `validation` or `test`."""
        ...

    def scores(self, model: Any, split: str) -> dict[str, float]:
        """Return the metrics besides the loss, on a held-out split."""
        ...


def build_task(recipe: Recipe) -> Task:
    """Return the task of a recipe; reads or generates its data.

    Raises:
        UsageError: the data is not there or does not parse.
    """
    if recipe.task.kind == "addition":
        from .addition import AdditionTask

        return AdditionTask(recipe)
    from .text import TextTask

    return TextTask(recipe)


def build_model(recipe: Recipe, task: Task, seed: int) -> Any:
    """Return a Llama with random weights that depend on the seed alone, in float32."""
    import dataclasses

    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(seed)
    config = LlamaConfig(**dataclasses.asdict(recipe.model), **task.model_config(), use_cache=True)
    return LlamaForCausalLM(config)


def stack_batches(dataset: Any, batch_size: int, limit: int = 0) -> Iterator[dict[str, Any]]:
    """Yield `{"input_ids", "labels"}` tensors of at most `batch_size` rows, `limit` rows in all (0 = all)."""
    import torch

    rows = min(limit, len(dataset)) if limit else len(dataset)
    for start in range(0, rows, batch_size):
        part = dataset[start : min(start + batch_size, rows)]
        yield {key: torch.tensor(part[key]) for key in ("input_ids", "labels")}
