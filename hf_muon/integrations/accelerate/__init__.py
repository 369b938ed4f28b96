# SPDX-License-Identifier: Apache-2.0
"""Dedicated owners under Accelerate's FSDP2 and DDP, for Trainer (nothing to set) and raw loops (`DMuonPlugin`)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .activation import activate, activate_data_parallel, activate_trainer
    from .plugin import DMuonPlugin

# Loaded on first use: `activate` must not import Accelerate's plugin classes before they are needed.
_NAMES = {
    "DMuonPlugin": "plugin",
    "activate": "activation",
    "activate_data_parallel": "activation",
    "activate_trainer": "activation",
}

__all__ = ["DMuonPlugin", "activate", "activate_data_parallel", "activate_trainer"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
