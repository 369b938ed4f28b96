# SPDX-License-Identifier: Apache-2.0
"""State in and out: owned parameters leave as ordinary sharded tensors, and checkpoints of any layout come back."""

from .dedicated import dedicate_params
from .folders import CheckpointFolder, find_checkpoint, read_model, read_optimizer, verify_checkpoint
from .model_doors import install_model_doors, remove_model_doors
from .optimizer_doors import install_optimizer_doors
from .whole import load_whole_model, load_whole_optimizer

__all__ = [
    "CheckpointFolder",
    "dedicate_params",
    "find_checkpoint",
    "install_model_doors",
    "install_optimizer_doors",
    "load_whole_model",
    "load_whole_optimizer",
    "read_model",
    "read_optimizer",
    "remove_model_doors",
    "verify_checkpoint",
]
