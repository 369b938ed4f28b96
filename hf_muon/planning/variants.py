# SPDX-License-Identifier: Apache-2.0
"""Bytes of optimizer state of every variant of Muon, beside AdamW's.

The optimizer's own code makes the state of every parameter on the meta device, so shapes and dtypes are those of a
run; nothing is allocated. `benchmarks/state_bytes.py` compares with what is.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config import MuonConfig
from ..optim.normuon import row_shape
from ..optim.parameter_state import new_state
from ..optim.state_spec import MOMENTUM_SCALE, ROW_STATISTICS, StateSpec, spec_of
from ..param_groups import MatrixView, ParameterRow

MOMENTUM = ("momentum_buffer", MOMENTUM_SCALE)
OWNED = (*MOMENTUM, ROW_STATISTICS)  # on the owner of a matrix alone
COUNTERS = ("step",)  # of AdamW, on every rank


@dataclass(frozen=True)
class Variant:
    """A way to keep the state: dtype of the weights, and options of `MuonConfig`."""

    weights: torch.dtype = torch.float32
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> StateSpec:
        """Return what the options ask of the state."""
        return spec_of(MuonConfig(**self.options))


VARIANTS = {
    "muon": Variant(),
    "momentum_dtype=bfloat16": Variant(options={"momentum_dtype": "bfloat16"}),
    "momentum_dtype=int8": Variant(options={"momentum_dtype": "int8"}),
    "normuon=true": Variant(options={"normuon": True}),
    "offload=cpu": Variant(options={"offload": "cpu"}),
    "momentum_dtype=int8, offload=cpu": Variant(options={"momentum_dtype": "int8", "offload": "cpu"}),
    "bfloat16 weights, stochastic_rounding=true": Variant(torch.bfloat16, {"stochastic_rounding": "true"}),
    "bfloat16 weights and momentum, stochastic_rounding=true": Variant(
        torch.bfloat16, {"stochastic_rounding": "true", "momentum_dtype": "bfloat16"}
    ),
}


def count_state(rows: Iterable[ParameterRow], variant: Variant) -> Counter[str]:
    """Return the bytes of the whole model's state by state key.

    Args:
        rows: trainable tensors, as `explain_parameters` routes them.
        variant: how state is kept.
    """
    result: Counter[str] = Counter()
    for row in rows:
        view = row.view if row.is_muon else None
        result.update(dict(_state_of(row.shape, view, variant.weights, variant.spec)))
    return result


def adamw_state(rows: Iterable[ParameterRow]) -> Counter[str]:
    """Return the bytes of AdamW's state over float32 weights by state key, for the whole model."""
    result: Counter[str] = Counter()
    for row in rows:
        result.update(dict(_state_of(row.shape, None, torch.float32, StateSpec())))
    return result


def variant_table(rows: Iterable[ParameterRow], world_size: int, shard: int) -> dict[str, dict[str, float]]:
    """Return state bytes per rank of AdamW and every variant, where matrices have owners and the rest is sharded.

    Args:
        rows: trainable tensors.
        world_size: ranks, between which matrices are divided.
        shard: ranks that share one copy of everything else.

    Returns:
        By name of the variant: `device_bytes_per_rank`, `host_bytes_per_rank`, and both as shares of AdamW's bytes per
        rank (`device_of_adamw`, `of_adamw` with the host's). Means over ranks: times `world_size` they are the sum.
    """
    rows = list(rows)
    adamw = sum(_per_rank(adamw_state(rows), world_size, shard).values())
    table = {"adamw": _entry(adamw, 0.0, adamw)}
    for label, variant in VARIANTS.items():
        sizes = _per_rank(count_state(rows, variant), world_size, shard)
        host = sum(sizes[key] for key in MOMENTUM) if variant.spec.offload else 0.0
        table[label] = _entry(sum(sizes.values()) - host, host, adamw)
    return table


def _entry(device: float, host: float, adamw: float) -> dict[str, float]:
    return {
        "device_bytes_per_rank": device,
        "host_bytes_per_rank": host,
        "device_of_adamw": device / adamw if adamw else 0.0,
        "of_adamw": (device + host) / adamw if adamw else 0.0,
    }


def _per_rank(whole: Counter[str], world_size: int, shard: int) -> dict[str, float]:
    parts = dict.fromkeys(OWNED, world_size) | dict.fromkeys(COUNTERS, 1)
    return {key: whole[key] / parts.get(key, shard) for key in (*OWNED, *whole)}


@functools.lru_cache(maxsize=4096)  # layers repeat their shapes
def _state_of(
    shape: tuple[int, ...], view: MatrixView | None, dtype: torch.dtype, spec: StateSpec
) -> tuple[tuple[str, int], ...]:
    """Return (key, bytes) of the state of one parameter; on AdamW without a `view`."""
    param = torch.empty(shape, dtype=dtype, device="meta")
    state = new_state(param, view is not None, False, spec)
    sizes = {key: value.numel() * value.element_size() for key, value in state.items()}
    if view is not None and spec.row_statistics:
        sizes[ROW_STATISTICS] = 4 * math.prod(row_shape(view, shape))
    return tuple(sizes.items())
