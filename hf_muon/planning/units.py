# SPDX-License-Identifier: Apache-2.0
"""Which modules become units: one per layer, as Accelerate's transformer wrap policy does it."""

from __future__ import annotations

from torch import nn

from .._compat_planning import wrapped_classes


def unit_names(model: nn.Module) -> list[str]:
    """Return the FQNs of the modules that get a `fully_shard` of their own, outermost first; the root is not listed.

    The classes that a transformers model names as not to be split; without any, the members of its outermost module
    lists.
    """
    classes = wrapped_classes(model)
    names = [name for name, module in model.named_modules() if name and type(module).__name__ in classes]
    if names:
        return names
    found: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{unit}.") for unit in found):
            found += [f"{name}.{index}" if name else str(index) for index in range(len(module))]
    return found


def unit_of(sites: list[str], units: list[str]) -> str:
    """Return the innermost unit that contains all places of a parameter; "" is the root.

    Args:
        sites: FQNs under which the parameter is registered (more than one when tied).
        units: what `unit_names` returned.
    """
    holding = [unit for unit in units if all(site.startswith(f"{unit}.") for site in sites)]
    return max(holding, key=len, default="")
