# SPDX-License-Identifier: Apache-2.0
"""hf-muon: train Hugging Face models with the Muon optimizer.

Importing this package registers `optim="dmuon"` with transformers (once, and without importing transformers:
the registration runs when transformers' own modules are loaded). It starts no CUDA context and has no other effect.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .integrations.transformers.registration import register

if TYPE_CHECKING:
    from .checkpoint import dedicate_params
    from .config import MuonConfig
    from .distributed import comm_stats, ownership
    from .integrations.accelerate.plugin import DMuonPlugin
    from .integrations.transformers.factory import OptimizerFactory
    from .optim import MuonWithAuxAdam
    from .orthogonalize import newton_schulz
    from .param_groups import explain_parameters, tag_parameters
    from .planning.plan import plan

__version__ = "0.1.0"

# Public names and the modules that hold them; loaded on first use so that `import hf_muon` stays quick.
_PUBLIC = {
    "DMuonPlugin": "integrations.accelerate.plugin",
    "MuonConfig": "config",
    "MuonWithAuxAdam": "optim",
    "OptimizerFactory": "integrations.transformers.factory",
    "comm_stats": "distributed",
    "dedicate_params": "checkpoint",
    "ownership": "distributed",
    "explain_parameters": "param_groups",
    "newton_schulz": "orthogonalize",
    "plan": "planning.plan",
    "tag_parameters": "param_groups",
}

__all__ = [
    "DMuonPlugin",
    "MuonConfig",
    "MuonWithAuxAdam",
    "OptimizerFactory",
    "comm_stats",
    "dedicate_params",
    "explain_parameters",
    "newton_schulz",
    "ownership",
    "plan",
    "tag_parameters",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])


register()
