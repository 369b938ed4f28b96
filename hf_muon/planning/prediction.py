# SPDX-License-Identifier: Apache-2.0
"""Peak memory of one rank, predicted by running the real model code on tensors without memory.

The modeling code of transformers, FSDP2, the DMuon runtime and the Muon update run as they are, under fake tensors
and a process group that moves nothing; torch's FSDP2 memory tracker counts what would be allocated.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from .. import distributed
from .._compat_planning import MemoryTimeline, fake_mode, fake_process_group
from ..distributed.collectives import Communicator, RankGrid
from ..distributed.dedicate import Placement, assign_units, make_plan, start_runtime
from ..optim.auxiliary_adam import adamw_update_
from ..optim.functional import MAX_BATCH_BYTES, MuonEntry, MuonOptions, muon_update_
from ..param_groups import MatrixView, tag_parameters
from .allocations import AllocationCounter
from .census import take_census
from .fake_attention import use_flash_attention
from .memory import busiest_rank
from .model_source import build_meta_model, resolve_model
from .units import unit_names

# Newton-Schulz as a GPU runs it: products in bfloat16.
STEP = MuonOptions(
    lr=1e-3,
    weight_decay=0.0,
    momentum=0.95,
    nesterov=True,
    ns_method="gram",
    ns_steps=5,
    ns_coefficients="keller",
    ns_dtype="bfloat16",
    adjust_lr_fn="match_rms_adamw",
)


def predict_peak(
    model: Any,
    world_size: int,
    micro_batch: int,
    seq_len: int,
    optimizer: str = "muon",
    checkpointing: bool = True,
    *,
    mode: str = "z3",
) -> dict[str, Any]:
    """Run one training step of the busiest rank on fake tensors and return its memory.

    Weights in float32, computation and gradients on the wire in bfloat16, one unit per layer, the second step of a
    run (states exist, gradients were set to None). The optimizer is fused AdamW, or Muon with dedicated owners.

    Args:
        model: a built-in name, a folder, a hub id, or a transformers configuration.
        world_size: ranks that shard the model.
        micro_batch: sequences per rank.
        seq_len: tokens per sequence.
        optimizer: `muon` or `adamw`.
        checkpointing: whether each layer is recomputed in backward.
        mode: `z3` or `z2`, of FSDP2 and of the owned matrices alike.

    Returns:
        `peak_bytes`; `parts` at the moment of the peak (weights, gathered, gradients, states, activations,
        temporaries); `phase` of the peak; `phases`, the peak of each in bytes; the settings.

    Raises:
        ValueError: an unknown optimizer or mode, a number below 1, or a model that cannot run without data.
        RuntimeError: this process is in a process group.

    Note:
        Seconds on one core, no memory to speak of. What a caching allocator wastes and what libraries keep (CUDA
        context, communication buffers, cuBLAS workspaces) is not in it.
    """
    _check(world_size, micro_batch, seq_len, optimizer, mode)
    config = resolve_model(model).config if isinstance(model, str) else model
    rank = 0
    if optimizer == "muon":
        rank = busiest_rank(take_census(build_meta_model(config)).owners(shard=world_size))
    with fake_process_group(world_size, rank), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (world_size,))
        communicator = Communicator(RankGrid(mesh), torch.device("cpu"))
        with fake_mode():
            run = _FakeRun(config, mesh, communicator, optimizer, checkpointing, mode == "z3")
            phases = run.step(micro_batch, seq_len)
    # A step on matrices never overlaps with what else the step allocates.
    phases["step"]["temporaries"] += step_temporaries(run.owned_views)
    settings = {
        "world_size": world_size,
        "rank": rank,
        "micro_batch": micro_batch,
        "seq_len": seq_len,
        "optimizer": optimizer,
        "mode": mode,
        "checkpointing": checkpointing,
    }
    return _report(phases) | settings


def _report(phases: dict[str, dict[str, int]]) -> dict[str, Any]:
    sums = {name: sum(parts.values()) for name, parts in phases.items()}
    phase = max(sums, key=lambda name: sums[name])
    return {"peak_bytes": sums[phase], "parts": phases[phase], "phase": phase, "phases": sums}


class _FakeRun:
    """One rank's model and optimizer state; everything inside the fake mode."""

    def __init__(
        self, config: Any, mesh: Any, comm: Communicator, optimizer: str, checkpointing: bool, reshard: bool
    ) -> None:
        config = copy.deepcopy(config)
        config.dtype = torch.float32  # master weights
        self.model = build_meta_model(config, "cpu").train()
        use_flash_attention(self.model)
        if checkpointing:
            getattr(self.model, "activation_checkpointing_enable", self.model.gradient_checkpointing_enable)()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        units = dict.fromkeys(unit_names(self.model))

        def shard() -> None:
            for name, module in reversed(list(self.model.named_modules())):
                if name in units:
                    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
            fully_shard(self.model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)

        self.runtime = None
        if optimizer == "muon":
            tag_parameters(self.model)
            detached = distributed.detach(self.model)
            shard()
            placement = Placement(reshard_after_forward=reshard)
            homes = assign_units(self.model, detached)
            plan = make_plan(detached, homes, comm.grid, placement, "cuda")
            everywhere = [True] * comm.grid.size
            self.runtime = start_runtime(self.model, detached, plan, homes, comm, placement, everywhere)
        else:
            shard()
        owned = {} if self.runtime is None else {id(p): p for p in self.runtime.parameters}
        self.owned = [p for p in owned.values() if p.is_local]
        self.rest = [p for p in self.model.parameters() if p.requires_grad and id(p) not in owned]
        self.momenta = [torch.zeros_like(p.to_local()) for p in self.owned]
        self.adam = [_adam_state(p.to_local()) for p in self.rest]

    def step(self, micro_batch: int, seq_len: int) -> dict[str, dict[str, int]]:
        """Run forward, backward and optimizer step; return the parts at each one's peak."""
        timeline = MemoryTimeline(self.model)
        timeline.track("weights", *(p.to_local() for p in self.owned))
        timeline.track("states", *self.momenta, *(t for row in self.adam for t in row.values()))
        if self.runtime is not None:
            for unit in self.runtime.units:
                timeline.track("gathered", *(matrix.view for matrix in unit.matrices))
                _watch_gradients(unit, timeline)
        ids = torch.zeros((micro_batch, seq_len), dtype=torch.int64)
        timeline.track("activations", ids)
        phases = {}
        with timeline:
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
            phases["forward"] = timeline.peak()
            timeline.restart_peak()
            loss.backward()
            phases["backward"] = timeline.peak()
            timeline.restart_peak()
            with timeline.optimizer_step():
                local = [p.to_local() for p in self.rest]
                adamw_update_(local, [p.grad.to_local() for p in self.rest], self.adam, fused=True)
            phases["step"] = timeline.peak()
        return phases

    @property
    def owned_views(self) -> list[tuple[tuple[int, ...], MatrixView]]:
        """Shape and view of every matrix that this rank updates."""
        return [(tuple(p.to_local().shape), getattr(p, "muon_view", MatrixView())) for p in self.owned]


def step_temporaries(owned: Sequence[tuple[tuple[int, ...], MatrixView]]) -> int:
    """Return the bytes that the Muon step of these parameters allocates beyond weights, gradients and momenta.

    Runs the update itself on tensors without memory, as a GPU would (bfloat16 products, no panels).
    """
    entries = []
    for (shape, view), count in Counter(owned).items():
        numel = math.prod(shape)
        # Batches of one shape follow each other and need the same room: one is enough.
        for _ in range(min(count, max(1, MAX_BATCH_BYTES // (4 * max(1, numel))))):
            weight, grad, momentum = (torch.empty(shape, device="meta") for _ in range(3))
            entries.append(MuonEntry(weight, grad, momentum, view))
    if not entries:
        return 0
    skip = torch.empty((), dtype=torch.bool, device="meta")
    with AllocationCounter() as allocations:
        muon_update_(entries, STEP, skip=skip)
    return allocations.peak


def _adam_state(local: Tensor) -> dict[str, Tensor]:
    step = torch.zeros((), dtype=torch.float32)
    return {"step": step, "exp_avg": torch.zeros_like(local), "exp_avg_sq": torch.zeros_like(local)}


def _watch_gradients(unit: Any, timeline: MemoryTimeline) -> None:
    """Count a unit's gradients as such: torch's tracker takes them for temporaries."""

    def around(method: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            timeline.track("gradients", *(m.view.grad for m in unit.matrices if m.view.grad is not None))
            method()
            timeline.track("gradients", *unit.packed_gradients)
            for matrix in unit.matrices:
                if matrix.parameter.grad is not None:
                    timeline.track("gradients", matrix.parameter.grad.to_local())

        return call

    unit.start_reduce, unit.finish_reduce = around(unit.start_reduce), around(unit.finish_reduce)


def _check(world_size: int, micro_batch: int, seq_len: int, optimizer: str, mode: str) -> None:
    for name, value in (("world_size", world_size), ("micro_batch", micro_batch), ("seq_len", seq_len)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1; got {value!r}.")
    if optimizer not in ("muon", "adamw"):
        raise ValueError(f"optimizer must be muon or adamw; got {optimizer!r}.")
    if mode not in ("z2", "z3"):
        raise ValueError(f"mode must be z2 or z3; got {mode!r}.")
