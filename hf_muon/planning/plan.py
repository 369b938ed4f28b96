# SPDX-License-Identifier: Apache-2.0
"""`hf_muon.plan`: what a run will cost before it starts. Numbers from shapes; no weight is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..distributed.ownership import OwnershipPlan
from ..distributed.rates import DeviceRates, read_rates
from .activations import ActivationBytes, estimate_activations
from .advice import GIB, Recommendation, recommend
from .census import Census, take_census
from .memory import COMPUTE, MASTER, LayoutMemory, gathered_elements, memory_table
from .model_source import build_meta_model, resolve_model
from .variants import variant_table
from .wire import naive_wire_elements, payload_elements, wire_elements
from .zero import MUON_STATE_BYTES, zero_table

MODES = ("z2", "z3")
STEADY_BYTES = {"muon": 4, "adamw": 8}  # optimizer state per element of the Muon matrices


@dataclass(frozen=True)
class Plan:
    """What `hf-muon plan` prints. Plain data; `to_dict()` has the documented keys.

    Attributes:
        model: its name.
        world_size: ranks of the job.
        replicate: replicas of the sharded model (1 without HSDP).
        census: routed parameters.
        ownership: the owners that the runtime would pick.
        batch: micro-batch, sequence length and whether layers are recomputed; None without a batch.
        activations: of one rank, for the batch, without and with checkpointing; None where no formula is known.
        memory: peak of the busiest rank for every layout.
        recommendation: the mode to start with.
        rates: measured rates that the owners are balanced by; None: FLOPs.
    """

    model: str
    world_size: int
    replicate: int
    census: Census
    ownership: OwnershipPlan
    batch: tuple[int, int, bool] | None
    activations: dict[str, ActivationBytes | None]
    memory: tuple[LayoutMemory, ...]
    recommendation: Recommendation
    rates: DeviceRates | None = None

    @property
    def shard(self) -> int:
        """Ranks that share one copy of the model."""
        return self.world_size // self.replicate

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-serialisable data."""
        muon, rest = self.census.muon_elements, self.census.adamw_elements
        return {
            "model": self.model,
            "world_size": self.world_size,
            "replicate": self.replicate,
            "muon_elements": muon,
            "adamw_elements": rest,
            "modes": {mode: self._mode(mode) for mode in MODES},
            "optimizer_state_bytes_per_rank": {
                "muon": STEADY_BYTES["muon"] * muon / self.world_size,
                "adamw": STEADY_BYTES["adamw"] * rest / self.shard,
            },
            "owners": self._owners(),
            "imbalance": self.ownership.imbalance,
            "zero": zero_table(muon + rest, self.world_size),
            "recommendation": {"mode": self.recommendation.mode, "why": self.recommendation.why},
            **self._more(),
        }

    def _mode(self, mode: str) -> dict[str, Any]:
        muon = self.census.muon_elements
        wire = wire_elements(muon, mode, self.shard, self.replicate)
        owned = self.ownership.elements_per_rank()
        return {
            "payload_elements_per_step": payload_elements(muon, mode),
            "wire_elements_per_rank_per_step": wire["shard"] + wire["replicate"],
            "muon_bytes_resident_per_rank": 2 * MASTER * muon / self.world_size,
            "muon_bytes_transient_per_rank": COMPUTE * gathered_elements(self.census.unit_elements(muon=True), mode),
            "shard_wire_elements_per_rank_per_step": wire["shard"],
            "replicate_wire_elements_per_rank_per_step": wire["replicate"],
            "naive_wire_elements_per_rank_per_step": naive_wire_elements(muon, mode, self.shard) + wire["replicate"],
            "muon_bytes_resident_busiest_rank": 2 * MASTER * max(owned),
        }

    def _owners(self) -> list[dict[str, Any]]:
        counts = [0] * self.world_size
        for owner in self.ownership.owners:
            counts[owner] += 1
        rows = zip(counts, self.ownership.elements_per_rank(), self._flops_per_rank(), strict=True)
        table: list[dict[str, Any]] = [
            {"rank": rank, "matrices": count, "elements": elements, "ns_flops": int(flops)}
            for rank, (count, elements, flops) in enumerate(rows)
        ]
        if self.rates is not None:
            for row, seconds in zip(table, self.ownership.ns_cost_per_rank(), strict=True):
                row["ns_seconds"] = seconds
        return table

    def _flops_per_rank(self) -> list[float]:
        if self.rates is None:
            return self.ownership.ns_cost_per_rank()
        each = {matrix.name: matrix.cost / matrix.experts for matrix in self.census.matrices()}
        flops = [0.0] * self.world_size
        for matrix, owner in zip(self.ownership.matrices, self.ownership.owners, strict=True):
            flops[owner] += each[matrix.name] * matrix.experts
        return flops

    def _more(self) -> dict[str, Any]:
        """Return what goes beyond the documented core: balance, activations, memory by part."""
        muon, rest = self.census.muon_elements, self.census.adamw_elements
        adam = zero_table(rest, self.world_size)
        momentum = zero_table(muon, self.world_size, MUON_STATE_BYTES)
        return {
            "all_adamw_state_bytes_per_rank": STEADY_BYTES["adamw"] * (muon + rest) / self.shard,
            "imbalance_lower_bound": self.ownership.imbalance_bound,
            "split_stacks": self.ownership.split_stacks,
            "idle_ranks": len(self.ownership.idle_ranks),
            "zero_muon": {stage: adam[stage] + momentum[stage] for stage in adam},
            "batch": None
            if self.batch is None
            else dict(zip(("micro_batch", "seq_len", "checkpointing"), self.batch, strict=True)),
            "activation_bytes_per_rank": {
                name: None if found is None else found.peak for name, found in self.activations.items()
            },
            "memory": [row.to_dict() for row in self.memory],
            "variants": variant_table((p.row for p in self.census.parameters), self.world_size, self.shard),
        }


def plan(
    model_or_config: Any,
    *,
    world_size: int,
    replicate: int = 1,
    micro_batch: int | None = None,
    seq_len: int | None = None,
    checkpointing: bool = True,
    device_gib: float | None = None,
    include: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    matrix_split: str = "auto",
    rates: DeviceRates | str | os.PathLike[str] | None = None,
) -> Plan:
    """Compute routing, owners, bytes on the wire, and memory per rank of training a model with Muon.

    Args:
        model_or_config: a built-in name, a folder, a hub id, a transformers configuration, or any module (on any
            device, meta included).
        world_size: ranks of the job.
        replicate: replicas of the sharded model (HSDP); must divide `world_size`.
        micro_batch: sequences per rank and micro-step; together with `seq_len`.
        seq_len: tokens per sequence.
        checkpointing: whether layers are recomputed in backward, for the memory table.
        device_gib: memory of one device in GiB; lets the advice see whether it fits.
        include: regexes of tensors that must be on Muon.
        exclude: regexes of tensors that must be on AdamW.
        matrix_split: as in `tag_parameters`.
        rates: what `hf-muon calibrate` measured, or the path of its file: owners are balanced by seconds, not FLOPs.

    Raises:
        ValueError: numbers that do not fit each other, a model that cannot be found or routed, or a file that is none
            of rates.
        TypeError: `model_or_config` is of another kind.

    Note:
        Under a second for the shipped models once transformers is imported, also for 4,096 ranks.
    """
    _check(world_size, replicate, micro_batch, seq_len, device_gib)
    name, config, model = find_model(model_or_config)
    census = take_census(model, include=include, exclude=exclude, matrix_split=matrix_split)
    measured = rates if rates is None or isinstance(rates, DeviceRates) else read_rates(rates)
    owners = census.owners(shard=world_size // replicate, replicate=replicate, rates=measured)
    batch, found = None, {}
    if micro_batch is not None and seq_len is not None:
        batch = (micro_batch, seq_len, checkpointing)
        for key, recompute in (("without_checkpointing", False), ("with_checkpointing", True)):
            found[key] = estimate_activations(config, micro_batch, seq_len, checkpointing=recompute)
    chosen = found.get("with_checkpointing" if checkpointing else "without_checkpointing")
    table = memory_table(census, owners, chosen)
    peaks = {row.layout[-2:]: row.peak for row in table if "dmuon" in row.layout}
    known = peaks if batch is None or chosen is not None else {}  # without activations a peak says nothing
    device_bytes = None if device_gib is None else round(device_gib * GIB)
    advice = recommend(census.elements, world_size, known, device_bytes)
    return Plan(name, world_size, replicate, census, owners, batch, found, tuple(table), advice, measured)


def find_model(source: Any) -> tuple[str, Any, nn.Module]:
    """Return name, configuration (None where there is none) and a model, on meta unless it was given."""
    if isinstance(source, nn.Module):
        config = getattr(source, "config", None)
        return getattr(config, "name_or_path", "") or type(source).__name__, config, source
    if isinstance(source, str):
        found = resolve_model(source)
        return found.name, found.config, build_meta_model(found.config)
    if hasattr(source, "model_type"):
        return getattr(source, "name_or_path", "") or source.model_type, source, build_meta_model(source)
    raise TypeError(
        f"model_or_config must be a name, a transformers configuration or a module; got {type(source).__name__}."
    )


def _check(
    world_size: int, replicate: int, micro_batch: int | None, seq_len: int | None, device_gib: float | None
) -> None:
    numbers = {"world_size": world_size, "replicate": replicate, "micro_batch": micro_batch, "seq_len": seq_len}
    for name, value in numbers.items():
        if value is None and name in ("micro_batch", "seq_len"):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1; got {value!r}.")
    if world_size % replicate:
        raise ValueError(f"replicate must divide world_size; got {replicate} and {world_size}.")
    if (micro_batch is None) != (seq_len is None):
        given, missing = ("micro_batch", "seq_len") if seq_len is None else ("seq_len", "micro_batch")
        raise ValueError(f"{given} must come together with {missing}; got it alone. Activations need both.")
    if device_gib is not None and not 0 < device_gib < float("inf"):
        raise ValueError(f"device_gib must be a number above 0; got {device_gib!r}.")
