# SPDX-License-Identifier: Apache-2.0
"""Around `DeepSpeedEngine`'s optimizer set-up: check, split experts off, let DeepSpeed partition, read the result."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._compat_deepspeed import wrap_configure_optimizer
from ...optim import MuonWithAuxAdam
from ...optim.parameter_state import has_values
from .groups import refresh_groups, remember_views
from .optimizer import PartitionedOptimizer
from .settings import check_config, lookup, read_config, zero_stage

logger = logging.getLogger("hf_muon.deepspeed")


def connect_engine(engine_module: ModuleType) -> None:
    """Make every `DeepSpeedEngine` that is given a `MuonWithAuxAdam` run it. Idempotent."""
    wrap_configure_optimizer(engine_module, configure_optimizer)


def configure_optimizer(original: Callable[..., Any], engine: Any, optimizer: Any, parameters: Any) -> Any:
    """Run DeepSpeed's own `_configure_optimizer` around the partitioned form of `optimizer`.

    Another optimizer goes through untouched.

    Args:
        original: the engine's method.
        engine: a `DeepSpeedEngine` in its constructor.
        optimizer: what the user gave to `deepspeed.initialize`.
        parameters: the model's parameters.

    Raises:
        ValueError, NotImplementedError, ImportError: see `check_config`; on every rank.
        RuntimeError: see `refresh_groups`.
    """
    if not isinstance(optimizer, MuonWithAuxAdam):
        return original(optimizer, parameters)
    config = read_config(engine.config)
    check_config(config, optimizer.config)
    ours = take_over(optimizer)
    refresh_groups(ours, engine.module, has_experts=bool(engine.has_moe_layers))
    ours.remember_sizes()
    _let_pass(config)
    result = original(ours, parameters)
    ours.connect(engine)
    if engine.global_rank == 0:
        logger.info("%s", describe(config, ours))
    return result


def take_over(optimizer: MuonWithAuxAdam) -> PartitionedOptimizer:
    """Return `optimizer` itself as a `PartitionedOptimizer`, so that schedulers made from it stay connected.

    Raises:
        ValueError: it has taken steps already.
    """
    if not isinstance(optimizer, PartitionedOptimizer):
        if any(has_values(state) for state in optimizer.state.values()):
            raise ValueError(
                "The optimizer given to DeepSpeed must be new; got one with state, which the partitions cannot take"
                " over. Make a new one and load a DeepSpeed checkpoint."
            )
        for group in optimizer.param_groups:
            if group["use_muon"]:
                remember_views(group)
        optimizer.state.clear()
        vars(optimizer).pop("skip_on_device", None)  # a copied optimizer carries its own; this class has decided
        # A scheduler wraps the method of the class that it saw; torch then says once that step() was overridden.
        vars(optimizer).pop("step", None)
        optimizer.__class__ = PartitionedOptimizer  # adds methods only; the state is made on the partitions
    assert isinstance(optimizer, PartitionedOptimizer)
    return optimizer


def describe(config: dict[str, Any], optimizer: MuonWithAuxAdam) -> str:
    """Return one line: whose Newton-Schulz runs, under which rule and rates, and when gradients are clipped."""
    options = optimizer.config
    clip = float(lookup(config, "gradient_clipping", 0.0) or 0.0)
    clipping = (
        f"gradients are clipped at norm {clip:g}, over both halves, before Newton-Schulz" if clip else "no clipping"
    )
    coefficients = options.ns_coefficients if isinstance(options.ns_coefficients, str) else "own"
    return (
        f"DeepSpeed ZeRO {zero_stage(config)} runs hf-muon's optimizer: {options.ns_method} Newton-Schulz,"
        f" {options.ns_steps} steps, {coefficients} coefficients, once per matrix in the job; adjust_lr_fn"
        f" {options.adjust_lr_fn}; muon_lr {options.resolved_muon_lr:g}, adam_lr {options.resolved_adam_lr:g};"
        f" {clipping}."
    )


def _let_pass(config: dict[str, Any]) -> None:
    """Name our class among those that DeepSpeed partitions without `zero_allow_untested_optimizer`."""
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    if PartitionedOptimizer not in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.append(PartitionedOptimizer)
    offloaded = lookup(config, "zero_optimization.offload_optimizer.device", "none") != "none"
    if offloaded and config.get("zero_force_ds_cpu_optimizer", True):
        raise ValueError(
            "zero_force_ds_cpu_optimizer must be false with zero_optimization.offload_optimizer and Muon; got true"
            " (the default). Set it to false."
        )
