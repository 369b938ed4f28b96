# SPDX-License-Identifier: Apache-2.0
"""The memory recipe: the predicted peak of a rank, the measured one where there are GPUs, the published one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import UsageError
from ..recipe.schema import OPTIMIZERS, Recipe
from .launched import has_devices, num_processes
from .tasks import SIZES

Predict = Callable[..., dict[str, Any]]


def predicts_only(recipe: Recipe) -> bool:
    """Return whether the recipe's training cannot be measured here and its prediction stands alone."""
    return bool(recipe.memory.model) and not has_devices(recipe)


def predictions(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return the predicted peak of one rank for each optimizer; about a minute for a model of three billion.

    Raises:
        UsageError: the model has no name that the planner knows, or cannot be run without data.
    """
    from ...planning.prediction import predict_peak

    memory = recipe.memory
    model = _own_config(recipe) if memory.model == "recipe" else memory.model
    try:
        return {
            name: predict_peak(
                model,
                memory.world_size,
                memory.micro_batch,
                memory.seq_len,
                name,
                checkpointing=recipe.model.gradient_checkpointing,
            )
            for name in OPTIMIZERS
        }
    except ValueError as error:
        raise UsageError(f"memory: {error}") from None


def _own_config(recipe: Recipe) -> Any:
    """Return the configuration of the recipe's own small Llama."""
    from transformers import LlamaConfig

    sizes = {key: getattr(recipe.model, key) for key in SIZES}
    return LlamaConfig(**sizes, vocab_size=recipe.task.vocab_size)


def memory_comparison(
    recipe: Recipe, predicted: Mapping[str, dict[str, Any]], runs: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return `comparison.memory` of `results.json`.

    Args:
        recipe: the resolved recipe.
        predicted: what `predictions` returned.
        runs: the finished runs; on GPUs their largest allocation is the measurement.
    """
    import torch

    measured = {}
    if runs and torch.cuda.is_available():
        measured = {
            name: max(run["peak_memory_bytes"] for run in runs if run["optimizer"] == name) for name in OPTIMIZERS
        }
    if measured:
        note = f"Measured: the largest allocation of torch on the first of {num_processes(recipe)} ranks."
    elif runs:
        note = "Not measured: on a CPU the resident size of the process is no peak of tensors."
    else:
        note = f"Not measured: that needs {num_processes(recipe)} GPUs, and {torch.cuda.device_count()} are here."
    return {
        "model": "the recipe's own Llama" if recipe.memory.model == "recipe" else recipe.memory.model,
        "predicted": dict(predicted),
        "measured": measured,
        "measured_note": note,
        "published": recipe.published.get("memory", {}),
    }
