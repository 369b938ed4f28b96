# SPDX-License-Identifier: Apache-2.0
"""Trainer's checkpoints across layouts: FSDP2 in either format, DDP and one process read what any of them wrote."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoint.folders import CheckpointFolder, find_checkpoint, read_model, read_optimizer, verify_checkpoint
from ...checkpoint.integrity import agree
from ...checkpoint.whole import load_whole_model, load_whole_optimizer
from .prepare import muon_optimizer

logger = logging.getLogger("hf_muon.accelerate")


def load_folder(original: Callable[..., Any], trainer: Any, folder: Any = None, *rest: Any, **options: Any) -> Any:
    """Run one of Trainer's loaders, or read the folder ourselves where it was written in another layout. Collective.

    Args:
        original: Trainer's `_load_from_checkpoint` or `_load_optimizer_and_scheduler`.
        trainer: the Trainer.
        folder: the checkpoint folder, None where nothing is resumed.
        *rest: the loader's other arguments (the model).
        **options: the same by keyword.

    Raises:
        ValueError: a file of the checkpoint is truncated or missing; it is named, on every rank.
    """
    found = find_checkpoint(folder) if folder is not None and uses_muon(trainer) else None
    if found is None or trainer.is_deepspeed_enabled:
        return original(trainer, folder, *rest, **options)
    agree(verify_checkpoint, folder)
    if found.format == _format_of(trainer):
        return original(trainer, folder, *rest, **options)
    if original.__name__ == "_load_from_checkpoint":
        model = rest[0] if rest else options.get("model")
        return _load_model(trainer, found, trainer.model if model is None else model)
    return _load_optimizer_and_scheduler(trainer, found)


def save_model(original: Callable[..., Any], trainer: Any, *args: Any, **options: Any) -> Any:
    """Run `Trainer.save_model`; under FSDP2 every rank makes the checkpoint's folder first. Collective under DDP.

    Trainer takes a checkpoint as the best one if its folder exists. With sharded state dicts no rank has made it when
    the first one looks, some later do: ranks would then load different checkpoints at the end.

    Under DDP a checkpoint's optimizer is saved next, on the ranks that save: all momentum is gathered there.
    """
    optimizer = muon_optimizer(trainer.optimizer)
    is_checkpoint = args[1] if len(args) > 1 else options.get("_internal_call", False)
    if optimizer is not None and is_checkpoint and not trainer.args.save_only_model:
        optimizer.gather_momentum(keep=trainer.args.should_save)
    if trainer.is_fsdp_enabled and uses_muon(trainer):
        folder = args[0] if args else options.get("output_dir")
        os.makedirs(trainer.args.output_dir if folder is None else folder, exist_ok=True)
    return original(trainer, *args, **options)


def uses_muon(trainer: Any) -> bool:
    """Return whether this Trainer trains with hf-muon, also before its optimizer exists."""
    from ..transformers.factory import OptimizerFactory
    from ..transformers.trainer_options import asks_for_dmuon

    optimizer_class = (getattr(trainer, "optimizer_cls_and_kwargs", None) or (None,))[0]
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, OptimizerFactory):
        return True
    return muon_optimizer(trainer.optimizer) is not None or asks_for_dmuon(trainer.args)


def _format_of(trainer: Any) -> str:
    """Return the format that Trainer's own loader expects here."""
    if not trainer.is_fsdp_enabled:
        return "plain"
    kind = str(trainer.accelerator.state.fsdp_plugin.state_dict_type)
    return "full" if "FULL" in kind else "sharded"


def _load_model(trainer: Any, found: CheckpointFolder, model: nn.Module) -> None:
    logger.info("Reading the weights of %s, which were saved as %s.", found.path, found.format)
    load_whole_model(model, read_model(found.path))


def _load_optimizer_and_scheduler(trainer: Any, found: CheckpointFolder) -> None:
    if found.optimizer is None:
        return
    optimizer = muon_optimizer(trainer.optimizer)
    if optimizer is None:
        raise ValueError(
            f"{found.path} must be resumed with the optimizer that wrote it; got {type(trainer.optimizer).__name__}."
        )
    logger.info("Reading the optimizer state of %s, which was saved as %s.", found.path, found.format)
    load_whole_optimizer(optimizer, read_optimizer(found.path))
    scheduler = Path(found.path) / "scheduler.pt"
    if scheduler.is_file():
        trainer.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))
