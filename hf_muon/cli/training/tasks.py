# SPDX-License-Identifier: Apache-2.0
"""What a task gives to the driver, and which task a recipe names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ..errors import UsageError
from ..recipe.schema import Recipe


class Task(Protocol):
    """Data, model and metrics of one kind of training; the same for every run of a recipe."""

    train: Any  # datasets.Dataset with input_ids and labels of one length
    processing_class: Any  # saved beside each checkpoint, or None
    facts: dict[str, Any]  # sizes for results.json
    benchmark_rows: dict[str, Any]  # rows of each benchmark that is scored after training
    model_source: str  # what from_pretrained takes; empty for a Llama from random weights

    @property
    def collate(self) -> Callable[[Any], dict[str, Any]]:
        """Return the function that makes a batch of rows."""
        ...

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
    if recipe.task.kind == "instruct":
        from .instruct import InstructTask

        return InstructTask(recipe)
    from .text import TextTask

    return TextTask(recipe)


SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)


def build_model(recipe: Recipe, task: Task, seed: int) -> Any:
    """Return the model before training, in float32: pretrained, or a Llama whose weights depend on the seed alone."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(seed)
    if task.model_source:
        return _with_adapters(load_model(task.model_source), recipe.model.lora_rank)
    sizes = {key: getattr(recipe.model, key) for key in SIZES}
    return LlamaForCausalLM(LlamaConfig(**sizes, **task.model_config(), use_cache=True))


def load_model(source: str) -> Any:
    """Return a causal language model from a folder or the hub, in float32.

    Raises:
        UsageError: transformers cannot load it; its first sentence is quoted.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(f"model.name must be a causal language model; {source} cannot be loaded: {reason}") from None


def meta_model(recipe: Recipe, task: Task) -> Any:
    """Return the model of a recipe without weights: names and shapes, for the routing."""
    from transformers import AutoConfig

    from ...planning.model_source import build_meta_model

    if not task.model_source:
        return build_model(recipe, task, recipe.search.seeds[0])
    try:
        config = AutoConfig.from_pretrained(task.model_source)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(f"model.name must have a readable configuration; {task.model_source}: {reason}") from None
    return _with_adapters(build_meta_model(config), recipe.model.lora_rank)


def _with_adapters(model: Any, rank: int) -> Any:
    """Return `model` with LoRA adapters of `rank` on its linear layers, everything else frozen; as it is for rank 0.

    Raises:
        UsageError: peft is not installed.
    """
    if not rank:
        return model
    try:
        from peft import LoraConfig, TaskType, get_peft_model
    except ImportError:
        raise UsageError('model.lora_rank needs peft. Run: pip install "hf-muon[peft]"') from None
    adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type=TaskType.CAUSAL_LM)
    return get_peft_model(model, adapters)


def plain_collate(rows: Any) -> dict[str, Any]:
    """Return rows of one length as tensors."""
    from transformers import default_data_collator

    return default_data_collator(rows)


def stack_batches(dataset: Any, batch_size: int, limit: int = 0) -> Iterator[dict[str, Any]]:
    """Yield `{"input_ids", "labels"}` tensors of at most `batch_size` rows, `limit` rows in all (0 = all)."""
    import torch

    rows = min(limit, len(dataset)) if limit else len(dataset)
    for start in range(0, rows, batch_size):
        part = dataset[start : min(start + batch_size, rows)]
        yield {key: torch.tensor(part[key]) for key in ("input_ids", "labels")}
