# SPDX-License-Identifier: Apache-2.0
"""Connect hf-muon to Accelerate's FSDP2 preparation and to Trainer's checkpoints, once per process."""

from __future__ import annotations

import functools
import sys

from ..._compat import wrap_prepare_fsdp2, wrap_trainer_loading, wrap_trainer_saving


@functools.cache
def activate() -> None:
    """Dedicate owners whenever Accelerate prepares a `MuonWithAuxAdam` under FSDP2. Idempotent.

    Trainer's loading and saving are connected where transformers is in use. A preparation or a checkpoint of another
    optimizer goes through untouched.
    """
    from .prepare import prepare_fsdp2

    wrap_prepare_fsdp2(prepare_fsdp2)
    if "transformers" in sys.modules:
        activate_trainer()


@functools.cache
def activate_trainer() -> None:
    """Let Trainer resume across numbers of processes, and agree on the best checkpoint. Idempotent."""
    from .trainer_checkpoints import load_folder, save_model

    wrap_trainer_loading(load_folder)
    wrap_trainer_saving(save_model)
