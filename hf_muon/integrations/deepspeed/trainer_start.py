# SPDX-License-Identifier: Apache-2.0
"""What is decided before training: whose Muon a DeepSpeed configuration means, with which options, at which cost."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import nn

from ..._compat import accelerate_state
from ...config import MuonConfig
from ...param_groups.sites import true_shape
from .config_block import block_options, names_muon, take_block
from .settings import check_config, check_deepspeeds_own, complete_config, lookup

logger = logging.getLogger("hf_muon.deepspeed")


def trainer_config(args: Any) -> MutableMapping[str, Any] | None:
    """Return the live DeepSpeed configuration behind `TrainingArguments`, None without DeepSpeed."""
    return getattr(getattr(args, "hf_deepspeed_config", None), "config", None)


def accelerate_config() -> MutableMapping[str, Any] | None:
    """Return the live DeepSpeed configuration of the present Accelerator, None without one."""
    return getattr(getattr(accelerate_state(), "deepspeed_plugin", None), "deepspeed_config", None)


def prepare_trainer(args: Any, model: nn.Module | None, *, ours: bool) -> None:
    """Settle a Trainer's DeepSpeed configuration at the end of its construction.

    Args:
        args: `TrainingArguments`.
        model: the model, for the numbers of a warning.
        ours: whether `optim="dmuon"`. If so a block of type muon becomes options of this optimizer, which then runs.
            Else such a block is left to DeepSpeed, whose limits are checked here and whose clipping is told.

    Raises:
        ValueError, NotImplementedError, ImportError: a setting that cannot work; names the key.
    """
    config = trainer_config(args)
    if config is None:
        return
    if ours:
        take_block(config)
        from ..transformers.trainer_options import options_from_arguments

        check_config(config, MuonConfig(**options_from_arguments(args, args.optim_args)))
    elif names_muon(config):
        check_deepspeeds_own(config)
        if model is not None and args.process_index == 0:
            _warn_about_clipping(config, model, str(args.optim))


def options_from_block(config: Mapping[str, Any] | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` with the options of a taken optimizer block underneath.

    Args:
        config: a DeepSpeed configuration, or None.
        given: options that win, under their own names or AdamW's aliases.
    """
    block = block_options(config)
    if "adam_beta1" in given or "adam_beta2" in given:
        block.pop("betas", None)
    if "adam_epsilon" in given:
        block.pop("eps", None)
    return {**block, **given}


def factory_options(given: Mapping[str, Any], base: MuonConfig | None) -> dict[str, Any]:
    """Return the options of a factory call under Accelerate's DeepSpeed; settles the configuration in place.

    Raises:
        ValueError: see `take_block`; or the factory has a `base` configuration and there is a block as well.
    """
    config = accelerate_config()
    if config is None:
        return dict(given)
    take_block(config)
    if base is not None and block_options(config):
        raise ValueError(
            "Options must stand in OptimizerFactory(config) or in the optimizer block of the DeepSpeed config; got"
            " both. Remove the block."
        )
    return options_from_block(config, given)


def settle(options: MuonConfig) -> None:
    """Check the configuration of the present Accelerator against the final options, and complete it."""
    config = accelerate_config()
    if config is not None:
        check_config(config, options)
        complete_config(config)


def update_norm(model: nn.Module) -> float:
    """Return about the norm of one update of DeepSpeed's own Muon: singular values near one, rule `original`.

    Sums min(m, n) * max(1, m/n) over the matrices that DeepSpeed's name rule routes to Muon.
    """
    total = 0.0
    for name, parameter in model.named_parameters():
        shape = true_shape(parameter)
        if not parameter.requires_grad or len(shape) < 2 or "embed" in name.lower() or "lm_head" in name.lower():
            continue
        batch = 1
        for size in shape[:-2]:
            batch *= size
        m, n = shape[-2:]
        total += batch * min(m, n) * max(1.0, m / n)
    return total**0.5


def _warn_about_clipping(config: Mapping[str, Any], model: nn.Module, optim: str) -> None:
    clip = lookup(config, "gradient_clipping", 0.0)
    clip = 0.0 if clip == "auto" else float(clip)
    norm = update_norm(model)
    shrinks = f" and shrinks every step about {norm / clip:.1f}-fold" if 0 < clip < norm else ""
    _warn_once(
        f"DeepSpeed runs its own Muon here (optimizer.type muon, optim={optim}): routing by name, adjust_lr_fn"
        f" original. gradient_clipping {clip:g} applies after Newton-Schulz, to updates of norm about"
        f' {norm:.1f}{shrinks}. Set optim="dmuon" to clip raw gradients instead.'
    )


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
