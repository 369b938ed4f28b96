# SPDX-License-Identifier: Apache-2.0
"""From the options of a whole optimizer to what one step of one group does beyond plain Muon and AdamW."""

from __future__ import annotations

from typing import Any

from ..config import MuonConfig
from .diagnostics import StepDiagnostics
from .functional import StepVariants
from .momentum_storage import MomentumStore, RestingMomentum
from .rounding import Rounding, rounding_of
from .state_spec import spec_of

VARIANT_OPTIONS = ("momentum_dtype", "offload", "stochastic_rounding", "normuon", "qk_clip", "diagnostics")


def uses_random_bits(config: MuonConfig) -> bool:
    """Return whether steps draw random bits, so that groups count their steps."""
    return config.momentum_dtype == "bfloat16" or config.stochastic_rounding == "true"


def step_rounding(config: MuonConfig, group: dict[str, Any]) -> Rounding | None:
    """Return the random bits of the step that `group` is about to make, or None; counts the step."""
    return rounding_of(group, config.rounding_seed) if uses_random_bits(config) else None


def muon_variants(config: MuonConfig, group: dict[str, Any], diagnostics: StepDiagnostics) -> StepVariants:
    """Return what the step of a Muon group does beyond plain Muon; counts the step of `group` for random bits."""
    rounding, spec = step_rounding(config, group), spec_of(config)
    resting = spec.low_precision_momentum or spec.quantized or spec.offload
    return StepVariants(
        momentum=RestingMomentum(rounding) if resting else MomentumStore(),
        rounding=rounding if config.stochastic_rounding == "true" else None,
        normuon_beta2=config.normuon_beta2 if config.normuon else None,
        observe=diagnostics.observe if diagnostics.due else None,
    )


def refuse_variants(config: MuonConfig, where: str) -> None:
    """Raise where a backend makes the step itself and would leave an option without effect.

    Args:
        config: the options.
        where: the backend, as in "under DeepSpeed".

    Raises:
        NotImplementedError: names the option and the way out.
    """
    default = MuonConfig()
    for name in VARIANT_OPTIONS:
        value = getattr(config, name)
        if value != getattr(default, name) and value != "false":
            raise NotImplementedError(
                f"{name} must be left out {where}; got {value!r}, which this backend's own step does not know. Use"
                " FSDP2, DDP or one process for it."
            )
