# SPDX-License-Identifier: Apache-2.0
"""The DeepSpeed configuration: what it asks of the optimizer, and which settings are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from typing import Any

from ..._compat_deepspeed import require_deepspeed
from ...config import MuonConfig
from ...optim.variants import refuse_variants

# WarmupCosineLR scales the rate of each group; the other schedulers of DeepSpeed write one rate into all of them.
_SCALING_SCHEDULERS = ("WarmupCosineLR",)


def read_config(source: Any) -> dict[str, Any]:
    """Return a DeepSpeed configuration as a dict: it may be one already, or the path of a JSON file."""
    if isinstance(source, Mapping):
        return dict(source)
    if source is None:
        return {}
    with open(source, encoding="utf-8") as file:
        return json.load(file)


def lookup(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value at a dotted path, `default` where a part of it is absent."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or value.get(key) is None:
            return default
        value = value[key]
    return value


def zero_stage(config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage, 0 where there is none."""
    return int(lookup(config, "zero_optimization.stage", 0))


def check_config(config: Mapping[str, Any], options: MuonConfig) -> None:
    """Raise for settings under which this optimizer cannot train; every message names the key and the value to set.

    Reads numbers only, so all ranks raise alike and none waits.

    Args:
        config: the DeepSpeed configuration.
        options: of the optimizer.

    Raises:
        ImportError: DeepSpeed is missing or older than 0.19.8.
        ValueError: a setting that must have another value.
        NotImplementedError: a feature or option that this version does not train.
    """
    require_deepspeed()
    refuse_variants(options, "under DeepSpeed")
    if options.dmuon in ("z2", "z3"):
        raise ValueError(
            f"dmuon must be auto or off under DeepSpeed; got {options.dmuon}, which is for FSDP2. Leave dmuon out and"
            " choose zero_optimization.stage."
        )
    if options.rates is not None:
        raise NotImplementedError(
            f"rates must be absent under DeepSpeed, whose rounds have owners of their own; got {options.rates!r}."
            " Leave it out."
        )
    _check_tensor_parallel(config)
    _check_scheduler(config, options)
    _check_offload(config)
    for key in ("zero_optimization.zenflow", "compression_training", "sparse_attention"):
        if lookup(config, key) is not None:
            raise NotImplementedError(
                f"{key} must be absent with Muon; got {lookup(config, key)!r}. Remove it from the DeepSpeed config."
            )
    accumulation = lookup(config, "data_types.grad_accum_dtype")
    if zero_stage(config) == 1 and lookup(config, "bf16.enabled") is True and accumulation in ("fp32", "float32"):
        raise NotImplementedError(
            f"data_types.grad_accum_dtype must be absent or bf16 with bf16 under ZeRO 1; got {accumulation}. Remove"
            " it, or set zero_optimization.stage to 2."
        )


def check_deepspeeds_own(config: Mapping[str, Any]) -> None:
    """Raise before training where DeepSpeed's own Muon would stop later, or silently do something else.

    Args:
        config: a configuration that names `"type": "muon"` and is left to DeepSpeed (`optim` is not "dmuon").

    Raises:
        ValueError: `reduce_scatter` is on under ZeRO 3 or with an offloaded optimizer.
    """
    stage, scatters = zero_stage(config), lookup(config, "zero_optimization.reduce_scatter", True)
    offloaded = lookup(config, "zero_optimization.offload_optimizer.device", "none") != "none"
    if scatters and (stage == 3 or (offloaded and stage > 0)):
        where = "under ZeRO 3" if stage == 3 else "with zero_optimization.offload_optimizer"
        raise ValueError(
            f"zero_optimization.reduce_scatter must be false for DeepSpeed's own Muon {where}; got true (the default)."
            ' Set it to false, or optim="dmuon", which runs with either.'
        )


def complete_config(config: MutableMapping[str, Any]) -> None:
    """Set what DeepSpeed asks of any optimizer that is not its own; changes `config` in place."""
    if lookup(config, "zero_optimization.offload_optimizer.device", "none") != "none":
        config["zero_force_ds_cpu_optimizer"] = False


def _check_tensor_parallel(config: Mapping[str, Any]) -> None:
    size = lookup(config, "tensor_parallel.autotp_size", 0)
    if size != "auto" and int(size) > 1:
        raise NotImplementedError(
            f"tensor_parallel.autotp_size must be 1 with Muon, which needs whole matrices; got {size}. Set it to 1 and"
            " use the ranks for ZeRO."
        )


def _check_scheduler(config: Mapping[str, Any], options: MuonConfig) -> None:
    kind = lookup(config, "scheduler.type")
    muon_lr, adam_lr = options.resolved_muon_lr, options.resolved_adam_lr
    if kind is None or kind in _SCALING_SCHEDULERS or muon_lr == adam_lr:
        return
    raise ValueError(
        f"scheduler.type must be WarmupCosineLR or absent with two learning rates; got {kind}, which would overwrite"
        f" muon_lr={muon_lr:g} and adam_lr={adam_lr:g} with one. Remove the scheduler block and set lr_scheduler_type"
        " of the Trainer (or give a torch scheduler)."
    )


def _check_offload(config: Mapping[str, Any]) -> None:
    offload = lookup(config, "zero_optimization.offload_optimizer", {})
    if offload.get("device") == "nvme":
        raise NotImplementedError(
            "zero_optimization.offload_optimizer.device must be cpu or none with Muon; got nvme. Set it to cpu."
        )
    if float(offload.get("ratio", 1.0)) != 1.0:
        raise NotImplementedError(
            f"zero_optimization.offload_optimizer.ratio must be 1.0 with Muon; got {offload['ratio']}, which hands the"
            " rest to an AdamW of DeepSpeed. Remove it."
        )
    if offload.get("super_offload"):
        raise NotImplementedError(
            "zero_optimization.offload_optimizer.super_offload must be false with Muon; got true. Set it to false."
        )
