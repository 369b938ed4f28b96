# SPDX-License-Identifier: Apache-2.0
"""Connect hf-muon to Accelerate's FSDP2 preparation and to Trainer's checkpoints, once per process."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ..._compat import wrap_load_state, wrap_prepare_fsdp2, wrap_trainer_loading, wrap_trainer_saving
from ..._compat_ddp import wrap_prepare, wrap_save_state


@functools.cache
def activate() -> None:
    """Dedicate owners whenever Accelerate prepares a `MuonWithAuxAdam` under FSDP2. Idempotent.

    A preparation of another optimizer goes through untouched.
    """
    from .prepare import load_state, prepare_fsdp2

    wrap_prepare_fsdp2(prepare_fsdp2)
    wrap_load_state(load_state)


def activate_data_parallel() -> None:
    """Dedicate owners whenever Accelerate wraps the model of a `MuonWithAuxAdam` for DDP. Idempotent.

    Runs whenever Accelerate is imported. A preparation without a `MuonWithAuxAdam` goes through untouched.
    """
    wrap_prepare(_around("prepare"))
    wrap_save_state(_around("save_state"))


def activate_trainer(trainer_class: type) -> None:
    """Let Trainer resume across numbers of processes, and agree on the best checkpoint. Idempotent.

    Runs whenever transformers' Trainer is imported, so nothing heavy is imported until a checkpoint is touched. A
    Trainer of another optimizer goes through untouched.
    """
    wrap_trainer_loading(trainer_class, _load_folder)
    wrap_trainer_saving(trainer_class, _save_model)


def _load_folder(original: Callable[..., Any], trainer: Any, *args: Any, **options: Any) -> Any:
    from .trainer_checkpoints import load_folder

    return load_folder(original, trainer, *args, **options)


def _save_model(original: Callable[..., Any], trainer: Any, *args: Any, **options: Any) -> Any:
    from .trainer_checkpoints import save_model

    return save_model(original, trainer, *args, **options)


def _around(name: str) -> Callable[..., Any]:
    def around(original: Callable[..., Any], accelerator: Any, *args: Any, **options: Any) -> Any:
        if "hf_muon.optim.muon" not in sys.modules:  # nobody can have made a MuonWithAuxAdam
            return original(accelerator, *args, **options)
        from . import data_parallel

        return getattr(data_parallel, name)(original, accelerator, *args, **options)

    return around
