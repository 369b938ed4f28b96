# SPDX-License-Identifier: Apache-2.0
"""Numbers about a run before it starts: published configurations and models without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .simulation import Simulation, simulate

__all__ = ["Simulation", "simulate"]


def __getattr__(name: str) -> Any:  # on first use: most of this package needs no simulation
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import simulation

    return getattr(simulation, name)
