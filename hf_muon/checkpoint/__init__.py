# SPDX-License-Identifier: Apache-2.0
"""State in and out: owned parameters leave as ordinary sharded tensors, and checkpoints of any layout come back."""

from .model_doors import install_model_doors, remove_model_doors
from .optimizer_doors import install_optimizer_doors, reshard_units

__all__ = ["install_model_doors", "install_optimizer_doors", "remove_model_doors", "reshard_units"]
