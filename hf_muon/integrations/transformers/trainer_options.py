# SPDX-License-Identifier: Apache-2.0
"""From `TrainingArguments` to typed optimizer options: what was given, what Trainer supplies, what is the default."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..._compat import OPTIMIZER_NAME
from ...config import MuonConfig, coerce_options, parse_key_values


def options_from_arguments(args: Any, optim_args: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return options for `OptimizerFactory` as plain typed values.

    `optim_args` win; then `learning_rate`, `weight_decay`, `adam_beta1`, `adam_beta2`, `adam_epsilon` of `args`.
    A given 0.0 counts as given.

    Args:
        args: `TrainingArguments`.
        optim_args: key-value pairs as Trainer parsed them. Where `args.optim_args` is a string that is read instead:
            Trainer's own parser keeps the last of two equal keys and drops blanks.

    Raises:
        ValueError, TypeError, NotImplementedError: see `MuonConfig`.
    """
    text = getattr(args, "optim_args", None)
    pairs = dict(parse_key_values(text) if isinstance(text, str) else optim_args or {})
    if deepspeed := getattr(args, "hf_deepspeed_config", None):
        from ..deepspeed.trainer_start import options_from_block

        pairs = options_from_block(deepspeed.config, pairs)
    config = config_from_options(pairs, args)
    return {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(MuonConfig)
        if deepspeed or getattr(config, field.name) != field.default
    }


def config_from_options(options: Mapping[str, Any], args: Any, base: MuonConfig | None = None) -> MuonConfig:
    """Return `base` with `options` on top and the values of `args` underneath.

    Args:
        options: keys of `MuonConfig`, values typed or strings.
        args: `TrainingArguments`, or None.
        base: default `MuonConfig()`.
    """
    given = dict(options)
    if args is not None:
        for one, other in (("adam_beta1", "adam_beta2"), ("adam_beta2", "adam_beta1")):
            if one in given and other not in given and "betas" not in given:
                given[other] = getattr(args, other)  # the half that was not given is Trainer's, not our default
    config = dataclasses.replace(base or MuonConfig(), **coerce_options(given))
    if args is None:
        return config
    return config.with_fallbacks(
        lr=args.learning_rate,
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
    )


def asks_for_dmuon(args: Any) -> bool:
    """Return whether `args.optim_args` are meant for this optimizer."""
    return getattr(args, "optim", None) == OPTIMIZER_NAME
