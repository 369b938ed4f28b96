# SPDX-License-Identifier: Apache-2.0
"""One training run: a fresh model, the stock Trainer, one optimizer, one learning rate, one seed."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config import MuonConfig, coerce_options
from ..recipe.schema import Recipe
from ..resources import load_evaluation
from .checkpoints import MODEL_FOLDER, drop_cut_checkpoints, last_whole_checkpoint
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
    saves = training.keep_checkpoints != "none" or training.save_steps > 0
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
        save_steps=training.save_steps or training.steps,
        save_total_limit=2 if training.save_steps else None,
        gradient_checkpointing=recipe.model.gradient_checkpointing,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )


def eval_steps(steps: int, points: int) -> set[int]:
    """Return evenly spaced steps after which held-out loss is taken; the last step is one of them."""
    return {max(1, round(steps * k / points)) for k in range(1, points + 1)}


def train_once(
    recipe: Recipe,
    task: Task,
    spec: RunSpec,
    folder: Path,
    on_step: Callable[[int, float], None],
    callbacks: Sequence[Any] = (),
) -> dict[str, Any]:
    """Train once, from the last whole checkpoint if there is one, and return the run's entry of `results.json`.

    In a launched run every process calls this; each returns the same numbers.

    Raises:
        RuntimeError: the loss became non-finite in every step, or Trainer failed.
    """
    import transformers

    from .measurement import RunWatch, weights_digest

    held_out = load_evaluation("held_out")
    # Before the model: under DeepSpeed and FSDP they decide how it is loaded.
    arguments = training_arguments(recipe, spec, folder)
    model = build_model(recipe, task, spec.seed)
    digest = weights_digest(model) if arguments.process_index == 0 else ""  # others may hold no weights yet
    watch = RunWatch(
        eval_steps(recipe.training.steps, recipe.training.eval_points),
        lambda current: {"loss": held_out.mean_token_loss(current, task.batches("test"))},
        on_step,
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=task.train,
        data_collator=task.collate,
        processing_class=task.processing_class,
        callbacks=[watch, *callbacks],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=_continue(trainer, watch, folder))
    if recipe.task.benchmarks:
        save_whole_model(trainer, folder / MODEL_FOLDER)
    # The last point of the curve is the test loss after the last step: not taken twice.
    losses = {
        "validation": held_out.mean_token_loss(trainer.model, task.batches("validation")),
        "test": watch.curve[-1]["loss"],
    }
    scores = {split: {"loss": loss, **task.scores(trainer.model, split)} for split, loss in losses.items()}
    result = {**_identity(recipe, spec), **_measured(watch, scores), "initial_weights": digest}
    if watch.diagnostics:
        result["diagnostics"] = watch.diagnostics
    del trainer, model
    gc.collect()
    return result


def _continue(trainer: Any, watch: Any, folder: Path) -> str | None:
    """Return the checkpoint to continue from, after the record of the run was taken over."""
    checkpoint = last_whole_checkpoint(folder)
    if trainer.is_world_process_zero():
        drop_cut_checkpoints(folder)
    trainer.accelerator.wait_for_everyone()
    if checkpoint is None:
        return None
    watch.restore(checkpoint)
    return str(checkpoint)


def save_whole_model(trainer: Any, folder: Path) -> None:
    """Save weights and tokenizer as an ordinary folder, on whatever backend the model was trained."""
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(folder))


def _measured(watch: Any, scores: dict[str, dict[str, float]]) -> dict[str, Any]:
    return {
        "steps": len(watch.loss),
        "loss": watch.loss,
        "step_seconds": [round(value, 4) for value in watch.step_seconds],
        "eval": {**scores["test"], "validation": scores["validation"], "curve": watch.curve},
        "seconds": watch.step_seconds[-1],
        "optimizer_seconds": watch.optimizer_seconds,
        "peak_memory_bytes": watch.peak_memory_bytes,
        "optimizer_state_bytes": watch.state_bytes,
    }


def _identity(recipe: Recipe, spec: RunSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "optimizer": spec.optimizer,
        "seed": spec.seed,
        "config": {"learning_rate": spec.learning_rate, **_options(recipe, spec)},
    }


def _options(recipe: Recipe, spec: RunSpec) -> dict[str, Any]:
    return dict(recipe.optimizer) if spec.optimizer == "muon" else dataclasses.asdict(recipe.adamw)
