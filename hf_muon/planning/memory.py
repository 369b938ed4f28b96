# SPDX-License-Identifier: Apache-2.0
"""Peak memory of the busiest rank by part, for every layout: arithmetic only.

FSDP2 and DMuon keep float32 weights, gradients and states and compute in bfloat16; their peak is the largest of five
moments of a step. DDP and ZeRO are counted by the convention of the ZeRO paper (half-precision weights and gradients,
float32 master weights among the states), without the buffers that their implementations add.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..distributed.ownership import OwnershipPlan
from ..distributed.runtime import MAX_REDUCTIONS_IN_FLIGHT
from ..optim.functional import MAX_BATCH_BYTES
from ..orthogonalize import stack_size
from .activations import ActivationBytes
from .census import Census
from .zero import ADAM_STATE_BYTES, MUON_STATE_BYTES, STAGES, zero_parts

MASTER, COMPUTE = 4, 2  # bytes per element
PARTS = ("weights", "gradients", "states", "buffers", "activations")
# What the Muon step holds: a float32 update per element of its batch, and of one stack two bfloat16 iterates and about
# as much in squares; around that, one parameter's masked gradient or parts put together. Counted by running it on
# tensors without memory (`prediction.step_temporaries`).
UPDATE_BYTES, STACK_BYTES = 4, 8


@dataclass(frozen=True)
class LayoutMemory:
    """Memory of the busiest rank under one layout and optimizer, in bytes, at the moment of its peak.

    Attributes:
        layout: `ddp`, `zero1`, `zero2`, `zero3`, `fsdp2`, `dmuon-z2`, `dmuon-z3`; with `hsdp-` before the last three
            when there are replicas.
        optimizer: `adamw` or `muon`.
        weights: at rest.
        gradients: those that exist at the peak.
        states: optimizer states; under DDP and ZeRO with the float32 master weights.
        buffers: gathered weights, gradients on their way, the optimizer's temporaries.
        activations: None when no batch was given or the architecture has no formula.
        peak: sum of the parts; without activations where those are None.
        phase: when: `loss`, `first backward` (of the last layer), `last backward`, `last reduction`, `step`; `states`
            under DDP and ZeRO.
    """

    layout: str
    optimizer: str
    weights: int
    gradients: int
    states: int
    buffers: int
    activations: int | None
    peak: int
    phase: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def memory_table(census: Census, owners: OwnershipPlan, activations: ActivationBytes | None) -> list[LayoutMemory]:
    """Return the memory of every layout, AdamW before Muon.

    Args:
        census: the model.
        owners: the ownership plan on the grid; its axes are those of the layouts.
        activations: of one rank's batch; None: unknown.
    """
    rows = []
    for stage in STAGES:
        for optimizer in ("adamw", "muon"):
            rows.append(_zero_memory(census, owners.num_ranks, stage, optimizer, activations))
    hsdp = "hsdp-" if owners.replicate > 1 else ""
    for optimizer in ("adamw", "muon"):
        rows.append(_sharded_memory(census, owners, f"{hsdp}fsdp2", optimizer, activations))
    for mode in ("z2", "z3"):
        rows.append(_sharded_memory(census, owners, f"{hsdp}dmuon-{mode}", "muon", activations))
    return rows


def busiest_rank(owners: OwnershipPlan) -> int:
    """Return the first of the ranks that own most elements: the one that memory is counted for."""
    elements = owners.elements_per_rank()
    return elements.index(max(elements))


def gathered_elements(units: list[int], mode: str) -> int:
    """Return the elements of packed buffers alive at once: all (Z2), or two neighbouring units' (Z3)."""
    if mode == "z2":
        return sum(units)
    root, *layers = units
    pairs = [sum(layers[k : k + 2]) for k in range(len(layers))]
    return root + max(pairs, default=0)


def _zero_memory(
    census: Census, ranks: int, stage: str, optimizer: str, activations: ActivationBytes | None
) -> LayoutMemory:
    muon = census.muon_elements if optimizer == "muon" else 0
    parts = dict.fromkeys(("weights", "gradients", "states"), 0.0)
    for elements, state_bytes in ((muon, MUON_STATE_BYTES), (census.elements - muon, ADAM_STATE_BYTES)):
        for part, size in zero_parts(elements, ranks, stage, state_bytes).items():
            parts[part] += size
    used = None if activations is None else activations.peak
    sizes = {part: round(size) for part, size in parts.items()}
    peak = sum(sizes.values()) + (used or 0)
    return LayoutMemory(stage, optimizer, **sizes, buffers=0, activations=used, peak=peak, phase="states")


def _sharded_memory(
    census: Census, owners: OwnershipPlan, layout: str, optimizer: str, activations: ActivationBytes | None
) -> LayoutMemory:
    has_owners = "dmuon" in layout
    sizes = _Sizes.of(census, owners, has_owners, optimizer)
    phases = _phases(sizes, activations or ActivationBytes(), keep=layout.endswith("z2"))
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    parts = {part: round(size) for part, size in phases[phase].items()}
    peak = sum(parts.values())
    if activations is None:
        parts["activations"] = None  # type: ignore[assignment]
    return LayoutMemory(layout, optimizer, peak=peak, phase=phase, **parts)


@dataclass(frozen=True)
class _Sizes:
    """Bytes that the phases are put together from."""

    weights: float
    states: float
    copies: float  # HSDP: compute-dtype copies of what other replicas own
    root: float  # gathered root unit, and its gradient
    unit: float  # gathered largest layer
    pair: float  # the two largest neighbouring layers
    layers: float  # all gathered layers
    in_flight: float  # gradients of earlier layers on the wire
    step: float  # temporaries of the optimizer

    @classmethod
    def of(cls, census: Census, owners: OwnershipPlan, has_owners: bool, optimizer: str) -> _Sizes:
        shard = owners.shard
        muon, rest = census.muon_elements, census.adamw_elements
        owned = max(owners.elements_per_rank()) if has_owners else 0
        held = owned + (rest if has_owners else muon + rest) / shard
        states = 4 * (owned if has_owners else muon / shard) if optimizer == "muon" else 8 * muon / shard
        replicas = owners.replicate
        copies = COMPUTE * muon / shard * (replicas - 1) / replicas if has_owners else 0.0
        muon_units, rest_units = census.unit_elements(muon=True), census.unit_elements(muon=False)
        units = [COMPUTE * (a + b) for a, b in zip(muon_units, rest_units, strict=True)]
        root, *layers = units
        unit = max(layers, default=0)
        pair = max((sum(layers[k : k + 2]) for k in range(len(layers))), default=0)
        return cls(
            weights=MASTER * held,
            states=states + 8 * rest / shard,
            copies=copies,
            root=root,
            unit=unit,
            pair=pair,
            layers=sum(layers),
            in_flight=unit * (MAX_REDUCTIONS_IN_FLIGHT if has_owners else 1),
            step=_step_bytes(census, owners, has_owners) if optimizer == "muon" else 0.0,
        )


def _step_bytes(census: Census, owners: OwnershipPlan, has_owners: bool) -> float:
    """Return the temporaries of the largest batch of equal matrices that the rank's Muon step works on."""
    matrices = owners.matrices_of(busiest_rank(owners)) if has_owners else census.matrices()
    largest = 0
    for shape, count in Counter(matrix.shape for matrix in matrices).items():
        numel = math.prod(shape)
        batch = min(count, max(1, MAX_BATCH_BYTES // (UPDATE_BYTES * max(1, numel)))) * numel
        stack = min(batch, stack_size(shape[-2], shape[-1], "cuda") * math.prod(shape[-2:]))
        largest = max(largest, UPDATE_BYTES * batch + max(STACK_BYTES * stack, UPDATE_BYTES * numel))
    return largest


def _phases(sizes: _Sizes, batch: ActivationBytes, *, keep: bool) -> Mapping[str, dict[str, float]]:
    """Return the parts at the moments that can be the peak.

    Args:
        sizes: of the model.
        batch: activations.
        keep: gathered layers stay from forward to their backward (Z2).
    """
    fixed = {"weights": sizes.weights, "states": sizes.states}
    gathered = sizes.root + sizes.copies + (sizes.layers if keep else sizes.unit)
    return {
        "loss": {
            **fixed,
            "gradients": 0.0,
            "buffers": gathered,
            "activations": batch.peak,
        },
        "first backward": {
            **fixed,
            "gradients": sizes.root,  # the layer's own come when its largest activations are gone
            "buffers": sizes.root + sizes.copies + (sizes.layers if keep else sizes.pair),
            "activations": batch.layers + batch.recomputed + batch.layer_backward,
        },
        "last backward": {
            **fixed,
            "gradients": sizes.weights + sizes.root,
            "buffers": sizes.root + sizes.copies + sizes.unit + sizes.in_flight,
            "activations": batch.layer + batch.layer_backward,
        },
        "last reduction": {
            **fixed,
            "gradients": sizes.weights + sizes.root + sizes.unit,
            "buffers": sizes.root + sizes.copies + sizes.unit + sizes.in_flight,
            "activations": 0.0,
        },
        "step": {**fixed, "gradients": sizes.weights, "buffers": sizes.copies + sizes.step, "activations": 0.0},
    }
