# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed configuration that names `"optimizer": {"type": "muon"}`: its keys become options of `MuonConfig`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

from ...config import DEFAULT_BETAS, DEFAULT_EPS, MuonConfig, coerce_options, nearest

logger = logging.getLogger("hf_muon.deepspeed")

# Where a block is kept once it is ours: DeepSpeed ignores unknown top-level keys, and copies of the dict keep it.
KEPT_AS = "hf_muon_optimizer"
# Keys that speak about DeepSpeed's own Adam: the only value under which ours is the same.
_ADAM_KEYS = {"torch_adam": None, "foreach": None, "adam_w_mode": True, "fp32_optimizer_states": True}
# What DeepSpeed takes where the block is silent, so that a published block keeps its meaning.
_DEEPSPEED_DEFAULTS: dict[str, Any] = {
    "adjust_lr_fn": "original",
    "betas": DEFAULT_BETAS,
    "eps": DEFAULT_EPS,
    "weight_decay": 0.0,
}


def names_muon(config: Mapping[str, Any]) -> bool:
    """Return whether the configuration has an optimizer block of type muon."""
    return str((config.get("optimizer") or {}).get("type", "")).lower() == "muon"


def take_block(config: MutableMapping[str, Any]) -> None:
    """Take the optimizer block out of `config`, so that DeepSpeed runs the optimizer that it is given.

    Trainer and Accelerate pass over the code's optimizer whenever the configuration names one. The block stays in the
    dict under another key, where `block_options` finds it. Idempotent.

    Raises:
        ValueError: the block is of another optimizer, or has an unknown key or a wrong value.
    """
    if "optimizer" not in config:
        return
    if not names_muon(config):
        kind = (config["optimizer"] or {}).get("type")
        raise ValueError(
            f'optimizer.type in the DeepSpeed config must be muon with optim="dmuon"; got {kind}, which would run'
            " instead. Remove the optimizer block."
        )
    params = dict(config["optimizer"].get("params") or {})
    options_of(params)
    config[KEPT_AS] = {key: value for key, value in params.items() if value != "auto"}  # Accelerate wants no auto left
    del config["optimizer"]


def block_options(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of a block that was taken out of `config`, with DeepSpeed's defaults; {} without one."""
    params = (config or {}).get(KEPT_AS)
    return {} if params is None else {**_DEEPSPEED_DEFAULTS, **options_of(params)}


def options_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of an optimizer block as checked options of `MuonConfig`; `auto` counts as not given.

    Args:
        params: `optimizer.params`: lr, muon_lr, adam_lr, momentum, weight_decay, betas, eps, ns_method, per_head_muon,
            and any other option of `MuonConfig`.

    Raises:
        ValueError: an unknown key (the nearest is named), or a value that cannot be meant here.
    """
    known = [field.name for field in dataclasses.fields(MuonConfig)]
    options: dict[str, Any] = {}
    for key, value in params.items():
        if key in _ADAM_KEYS:
            wanted = _ADAM_KEYS[key]
            if wanted is not None and value not in (wanted, "auto"):
                raise ValueError(f"optimizer.params.{key} must be {str(wanted).lower()} with Muon; got {value!r}.")
        elif key == "per_head_muon":
            if value is True and params.get("matrix_split", "per_head") != "per_head":
                raise ValueError(
                    f"optimizer.params.per_head_muon must be false with matrix_split={params['matrix_split']}; got"
                    " true. Keep one of them."
                )
            if value is True:
                options["matrix_split"] = "per_head"
        elif key not in known:
            raise ValueError(
                f"optimizer.params.{key} of the DeepSpeed config is not an option of hf-muon.{nearest(key, known)}"
            )
        elif value != "auto":
            options[key] = value
    options = coerce_options(options)
    MuonConfig(**options)
    return options
