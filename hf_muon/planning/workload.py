# SPDX-License-Identifier: Apache-2.0
"""What one rank computes and sends in a step, unit by unit: FLOPs from shapes, packed buffers from the owner plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..distributed.buckets import BucketLayout, Piece, build_buckets
from ..distributed.ownership import OwnershipPlan
from .census import Census
from .units import unit_of


@dataclass(frozen=True)
class UnitLoad:
    """One unit; the root's name is "".

    Args:
        name: FQN of the module.
        forward_flops: of one rank's batch.
        muon: elements of Muon matrices.
        rest: elements of everything else.
    """

    name: str
    forward_flops: float
    muon: int
    rest: int


@dataclass(frozen=True)
class Workload:
    """A model and a batch.

    Args:
        root: the unit that is gathered around all others.
        layers: the other units, in the order of forward.
        parts: shapes (count, m, n) of the matrices of every owned parameter, by name.
        tokens: of one rank and step.
    """

    root: UnitLoad
    layers: tuple[UnitLoad, ...]
    parts: Mapping[str, tuple[tuple[int, int, int], ...]]
    tokens: int

    @property
    def muon(self) -> int:
        """Elements of all Muon matrices: P_M."""
        return self.root.muon + sum(unit.muon for unit in self.layers)

    @property
    def rest(self) -> int:
        """Elements of everything else."""
        return self.root.rest + sum(unit.rest for unit in self.layers)


def read_workload(model: nn.Module, config: Any, census: Census, *, micro_batch: int, seq_len: int) -> Workload:
    """Return the workload of training `model` on one batch per rank. Reads shapes only.

    Args:
        model: the module, on any device.
        config: its transformers configuration, None where there is none (attention is then not counted).
        census: its trainable tensors and units.
        micro_batch: sequences per rank.
        seq_len: tokens per sequence.
    """
    tokens = micro_batch * seq_len
    flops = forward_flops(model, config, census, tokens=tokens, seq_len=seq_len)
    muon, rest = (census.unit_elements(muon=half) for half in (True, False))
    names = ("", *census.units)
    units = [UnitLoad(name, flops[name], a, b) for name, a, b in zip(names, muon, rest, strict=True)]
    parts = {p.row.name: tuple(p.row.view.matrix_shapes(p.row.shape)) for p in census.parameters if p.row.is_muon}
    return Workload(units[0], tuple(units[1:]), parts, tokens)


def forward_flops(model: nn.Module, config: Any, census: Census, *, tokens: int, seq_len: int) -> dict[str, float]:
    """Return the FLOPs of one forward by unit: two per weight and token, and causal attention.

    Frozen weights count; a table that is only looked up does not. Of a stack of experts a token meets
    `num_experts_per_tok`. Attention: 4 * seq_len * width per token and layer, half of it masked.
    """
    units = list(census.units)
    flops = dict.fromkeys(("", *units), 0.0)
    for name, module, weight in _weights(model):
        share = 1.0
        if weight.ndim == 3 and not type(module).__name__.startswith("Conv"):
            share = min(1.0, (getattr(config, "num_experts_per_tok", None) or weight.shape[0]) / weight.shape[0])
        flops[unit_of([name], units)] += 2.0 * weight.numel() * tokens * share
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if heads and hidden:
        width = heads * (getattr(config, "head_dim", None) or hidden // heads)
        for name in units:
            flops[name] += 2.0 * seq_len * width * tokens
    return flops


def unit_buckets(owners: OwnershipPlan) -> dict[str, tuple[BucketLayout, ...]]:
    """Return the packed buffers of every unit, as the runtime lays them out."""
    rows: dict[str, dict[str, int]] = {}
    pieces: dict[str, list[Piece]] = {}
    for matrix, owner in zip(owners.matrices, owners.owners, strict=True):
        index = rows.setdefault(matrix.unit, {}).setdefault(matrix.name, len(rows[matrix.unit]))
        piece = Piece(index, matrix.start, matrix.shape, *divmod(owner, owners.shard))
        pieces.setdefault(matrix.unit, []).append(piece)
    return {unit: build_buckets(found) for unit, found in pieces.items()}


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for attribute, weight in module.named_parameters(recurse=False):
            if weight.ndim >= 2:
                yield f"{prefix}.{attribute}" if prefix else attribute, module, weight
