# SPDX-License-Identifier: Apache-2.0
"""Small runs through the real Trainer: a two-layer Llama, sixteen rows of random tokens, one process, CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Trainer, TrainingArguments

import hf_muon

VOCABULARY = 64
# On some CPUs `auto` is bfloat16; comparisons between runs need one dtype everywhere.
EXACT = "ns_dtype=float32"


def tiny_llama(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """Return a two-layer Llama whose weights depend on `seed` alone; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **overrides}))


def token_rows(count: int = 16, length: int = 12) -> list[dict[str, torch.Tensor]]:
    """Return rows of random tokens with labels, from the global generator."""
    rows = torch.randint(0, VOCABULARY, (count, length))
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def arguments(folder: Path, **overrides: Any) -> TrainingArguments:
    """Return quiet TrainingArguments for four steps of Muon on the CPU; `overrides` win."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "optim": "dmuon",
        "optim_args": EXACT,
        "learning_rate": 1e-3,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "log_level": "error",
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**settings, **overrides})


def make_trainer(
    folder: Path, rows: Any = None, model: PreTrainedModel | None = None, trainer: Any = None, **overrides: Any
) -> Trainer:
    """Return a Trainer; keys in `trainer` go to it, all other overrides to the arguments."""
    return Trainer(
        model=tiny_llama() if model is None else model,
        args=arguments(folder, **overrides),
        train_dataset=token_rows() if rows is None else rows,
        **(trainer or {}),
    )


def plain_optimizer(trainer: Trainer) -> hf_muon.MuonWithAuxAdam:
    """Return the optimizer inside Accelerate's wrapper."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def training_entries(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the log entries of training steps."""
    return [entry for entry in trainer.state.log_history if "learning_rate" in entry]


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
