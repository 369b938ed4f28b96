# SPDX-License-Identifier: Apache-2.0
"""What the user's FSDP settings mean for dedicated owners, and which settings are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ...config import MuonConfig

MODES = ("auto", "z2", "z3", "off")


@dataclass(frozen=True)
class OwnerSettings:
    """How the Muon matrices of one model are dedicated.

    Args:
        reshard_after_forward: True is Z3 (gathered copies are freed after forward), False is Z2.
        upcast: whether owners keep float32 although the model was loaded in less (as Accelerate does for the rest).
        only_rank_zero_has_weights: the owners get the weights from rank 0 (`cpu_ram_efficient_loading`).
        rates: file of measured rates that the owners are balanced by; None: FLOPs.
        ns_dtype: dtype of the Newton-Schulz products.
    """

    reshard_after_forward: bool
    upcast: bool
    only_rank_zero_has_weights: bool
    rates: str | None = None
    ns_dtype: str = "auto"


def resolve_mode(plugin: Any, requested: str) -> str:
    """Return z2, z3 or off.

    Args:
        plugin: Accelerate's FSDP2 plugin; a `DMuonPlugin` may ask for a mode itself.
        requested: the optimizer's `dmuon` option; `auto` leaves it to the plugin, and then to
            `fsdp_reshard_after_forward`.

    Raises:
        ValueError: plugin and optimizer ask for different modes.
    """
    wish = getattr(plugin, "dmuon", "auto")
    if "auto" not in (wish, requested) and wish != requested:
        raise ValueError(
            f"dmuon must be the same in DMuonPlugin and in the optimizer; got {wish!r} and {requested!r}."
            " Set it in one place."
        )
    chosen = wish if requested == "auto" else requested
    if chosen == "auto":
        return "z3" if plugin.reshard_after_forward else "z2"
    return chosen


def read_settings(accelerator: Any, mode: str, options: MuonConfig) -> OwnerSettings:
    """Return the settings for `mode` (z2 or z3) from the Accelerator's FSDP2 plugin and the optimizer's options.

    Raises:
        ValueError: both name a file of rates, and not the same.
    """
    plugin = accelerator.state.fsdp_plugin
    wish = getattr(plugin, "rates", None)
    if None not in (wish, options.rates) and wish != options.rates:
        raise ValueError(
            f"rates must be the same in DMuonPlugin and in the optimizer; got {wish!r} and {options.rates!r}."
            " Set it in one place."
        )
    return OwnerSettings(
        reshard_after_forward=mode == "z3",
        upcast=accelerator.mixed_precision != "no",
        only_rank_zero_has_weights=bool(plugin.cpu_ram_efficient_loading),
        rates=wish or options.rates,
        ns_dtype=options.ns_dtype,
    )


def refuse_unsupported(accelerator: Any, model: nn.Module) -> None:
    """Raise where dedicated owners cannot work; every message names the way out.

    Raises:
        NotImplementedError: tensor parallelism, a model that is sharded already, or CPU offload of parameters.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
    from torch.distributed.tensor import DTensor

    parallelism = accelerator.parallelism_config
    if parallelism is not None and parallelism.tp_enabled:
        raise NotImplementedError(
            f"tp_size must be 1 with Muon under FSDP2; got {parallelism.tp_size}. Use the ranks for sharding instead."
        )
    if isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy):
        raise NotImplementedError(
            "fsdp_offload_params must be false with dedicated owners; got true. Set it to false, or use dmuon=off."
        )
    if not isinstance(model, FSDPModule) and any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise NotImplementedError(
            "model must not be sharded yet when Accelerate prepares it; got DTensor parameters. Load it without"
            " tp_plan or distributed_config and let FSDP2 shard it."
        )


def refuse_fsdp1(plugin: Any) -> None:
    """Raise for FSDP version 1.

    Raises:
        NotImplementedError: the plugin is FSDP1's, which flattens the matrices that Muon needs whole.
    """
    if plugin.fsdp_version != 2:
        raise NotImplementedError(
            f"fsdp_version must be 2 with Muon; got {plugin.fsdp_version}, which flattens matrices. "
            "Set `fsdp_version: 2` in the Accelerate configuration (`accelerate to-fsdp2` converts a file)."
        )
