# SPDX-License-Identifier: Apache-2.0
"""One training run: a fresh model, the stock Trainer, one optimizer, one learning rate, one seed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config import MuonConfig, coerce_options
from ..recipe.schema import Recipe
from ..resources import load_evaluation
from .tasks import Task, build_model

OPTIM_NAMES = {"muon": "dmuon", "adamw": "adamw_torch"}


@dataclass(frozen=True)
class RunSpec:
    """Which run: everything that distinguishes it within a recipe."""

    optimizer: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        """Return the folder name of the run."""
        return f"{self.optimizer}-lr{self.learning_rate:g}-seed{self.seed}"


def optim_args(options: dict[str, Any]) -> str:
    """Return recipe options as Trainer's `optim_args` string.

    Raises:
        ValueError: an option is unknown or out of range.
    """
    MuonConfig(**coerce_options(options))
    return ",".join(f"{key}={_as_text(key, value)}" for key, value in options.items() if value is not None)


def _as_text(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        if key in ("include", "exclude"):
            return ";".join(str(item) for item in value)
        flat = [x for item in value for x in (item if isinstance(item, (list, tuple)) else [item])]
        return ";".join(repr(float(item)) for item in flat)  # Trainer splits at every comma, also in brackets
    return str(value)


def training_arguments(recipe: Recipe, spec: RunSpec, folder: Path) -> Any:
    """Return the TrainingArguments of a run; only `optim` and the learning rate differ between optimizers."""
    from transformers import TrainingArguments

    training = recipe.training
    saves = training.keep_checkpoints != "none"
    return TrainingArguments(
        output_dir=str(folder),
        optim=OPTIM_NAMES[spec.optimizer],
        optim_args=optim_args(recipe.optimizer) or None if spec.optimizer == "muon" else None,
        learning_rate=spec.learning_rate,
        max_steps=training.steps,
        per_device_train_batch_size=training.batch_size,
        gradient_accumulation_steps=training.gradient_accumulation,
        warmup_steps=training.warmup_steps,
        lr_scheduler_type=training.scheduler,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        adam_beta1=recipe.adamw.adam_beta1,
        adam_beta2=recipe.adamw.adam_beta2,
        adam_epsilon=recipe.adamw.adam_epsilon,
        bf16=training.precision == "bfloat16",
        use_cpu=training.device == "cpu",
        seed=spec.seed,
        data_seed=spec.seed,
        logging_steps=1,
        save_strategy="steps" if saves else "no",
        save_steps=training.steps,
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )


def eval_steps(steps: int, points: int) -> set[int]:
    """Return evenly spaced steps after which held-out loss is taken; the last step is one of them."""
    return {max(1, round(steps * k / points)) for k in range(1, points + 1)}


def train_once(
    recipe: Recipe, task: Task, spec: RunSpec, folder: Path, on_step: Callable[[int, float], None]
) -> dict[str, Any]:
    """Train once and return the run's entry of `results.json`.

    Raises:
        RuntimeError: the loss became non-finite in every step, or Trainer failed.
    """
    import transformers

    from .measurement import RunWatch, weights_digest

    held_out = load_evaluation("held_out")
    model = build_model(recipe, task, spec.seed)
    digest = weights_digest(model)
    watch = RunWatch(
        eval_steps(recipe.training.steps, recipe.training.eval_points),
        lambda current: {"loss": held_out.mean_token_loss(current, task.batches("test"))},
        on_step,
    )
    trainer = transformers.Trainer(
        model=model,
        args=training_arguments(recipe, spec, folder),
        train_dataset=task.train,
        data_collator=transformers.default_data_collator,
        processing_class=task.processing_class,
        callbacks=[watch],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    # The last point of the curve is the test loss after the last step: not taken twice.
    losses = {
        "validation": held_out.mean_token_loss(model, task.batches("validation")),
        "test": watch.curve[-1]["loss"],
    }
    scores = {split: {"loss": loss, **task.scores(model, split)} for split, loss in losses.items()}
    result = {
        "name": spec.name,
        "optimizer": spec.optimizer,
        "seed": spec.seed,
        "config": {"learning_rate": spec.learning_rate, **_options(recipe, spec)},
        "steps": len(watch.loss),
        "loss": watch.loss,
        "step_seconds": [round(value, 4) for value in watch.step_seconds],
        "eval": {**scores["test"], "validation": scores["validation"], "curve": watch.curve},
        "seconds": watch.step_seconds[-1],
        "optimizer_seconds": watch.optimizer_seconds,
        "peak_memory_bytes": watch.peak_memory_bytes,
        "optimizer_state_bytes": watch.state_bytes,
        "initial_weights": digest,
    }
    if watch.diagnostics:
        result["diagnostics"] = watch.diagnostics
    del trainer, model
    gc.collect()
    return result


def _options(recipe: Recipe, spec: RunSpec) -> dict[str, Any]:
    import dataclasses

    return dict(recipe.optimizer) if spec.optimizer == "muon" else dataclasses.asdict(recipe.adamw)
