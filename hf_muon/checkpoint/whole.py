# SPDX-License-Identifier: Apache-2.0
"""Load whole tensors into a model and optimizer of any layout: one process, DDP, FSDP2 with or without owners."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger("hf_muon.checkpoint")


def load_whole_model(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load whole tensors by FQN; every rank passes all of them. Collective where the model is sharded.

    Wrappers (DDP, torch.compile, activation checkpointing) do not matter for the names. Keys that a PEFT adapter was
    saved under, without the adapter's name, are found too.

    Raises:
        ValueError: no name of `weights` is one of the model, or a shape differs.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    whole: dict[str, Any] = _with_adapter_names(model, dict(weights))
    options = StateDictOptions(full_state_dict=True, strict=False, broadcast_from_rank0=_is_shared())
    names = {name for name, _ in model.named_parameters()}
    if whole and not any(_plain_name(name) in whole for name in names):
        raise ValueError(
            f"weights must belong to this model; got names such as {next(iter(whole))}, none of which it has."
        )
    result = set_model_state_dict(model, whole if not _is_shared() or _is_first() else {}, options=options)
    for kind in ("missing", "unexpected"):
        keys = list(getattr(result, f"{kind}_keys"))
        if keys and not (kind == "missing" and _is_adapter(model)):
            logger.warning(
                "The checkpoint has %s keys: %s.", kind, ", ".join(keys[:3]) + (", ..." if keys[3:] else "")
            )


def load_whole_optimizer(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load whole optimizer state into a `MuonWithAuxAdam` of any layout; every rank passes all of it.

    Args:
        optimizer: it matches by parameter name.
        state_dict: keyed by number with `param_names` in the groups, or by FQN.
    """
    optimizer.load_state_dict(state_dict)


def _plain_name(name: str) -> str:
    """Return the FQN without what DDP, torch.compile and activation checkpointing put into it."""
    parts = [part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module")]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def _is_shared() -> bool:
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def _is_first() -> bool:
    return torch.distributed.get_rank() == 0


def _is_adapter(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "base_model")


def _with_adapter_names(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put the adapter's name into PEFT's keys: `...lora_A.weight` is `...lora_A.default.weight` in the model."""
    if not _is_adapter(model):
        return weights
    names = {name for name, _ in model.named_parameters()}
    adapter = getattr(model, "active_adapter", "default")
    renamed = {}
    for key, value in weights.items():
        stem, _, leaf = key.rpartition(".")
        longer = f"{stem}.{adapter}.{leaf}"
        renamed[longer if key not in names and longer in names else key] = value
    return renamed
