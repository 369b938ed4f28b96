# SPDX-License-Identifier: Apache-2.0
"""`simulate`: the step of AdamW and of every way to run Muon, for many numbers of ranks, at stated rates."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..config import nearest
from ..distributed.ownership import OwnershipPlan
from ..distributed.rates import DeviceRates, read_rates
from .census import Census, take_census
from .designs import AllToAllMuon, GatheredMuon, KeptMuon, OwnedMuon, Setting, Step
from .devices import SimulatedDevice, find_device
from .plan import find_model
from .workload import read_workload

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BASELINE, HSDP_BASELINE = "adamw-fsdp2", "adamw-hsdp"
DESIGNS: dict[str, type[Step]] = {
    BASELINE: Step,
    "naive": GatheredMuon,
    "all-to-all": AllToAllMuon,
    "dmuon-z2": KeptMuon,
    "dmuon-z3": OwnedMuon,
    HSDP_BASELINE: Step,
    "dmuon-hsdp": OwnedMuon,
}
MICRO_BATCH, SEQ_LEN = 4, 2048
_MATTERS = 0.05  # of the step: what a limit must cost to be named


@dataclass(frozen=True)
class SimulatedStep:
    """One step of one design on one number of ranks, in the steady state. Seconds are of the rank that sets the pace.

    Attributes:
        design: a key of `DESIGNS`.
        ranks: of the job.
        shard: ranks that share one copy of the model.
        replicate: copies.
        step_seconds: passes + newton_schulz + elementwise + copies + exposed communication.
        passes_seconds: forward and backward.
        newton_schulz_seconds: of the busiest owner, or of every rank under `naive`.
        elementwise_seconds: the rest of the optimizer step.
        copies_seconds: packing and unpacking of buffers.
        exposed_seconds: communication that computation waited for.
        communication_seconds: all of it.
        latency_seconds: the part of it that does not depend on bytes.
        overhead: step over that of `baseline`, minus one.
        baseline: AdamW under the same sharding.
        wire_elements: of Muon matrices per rank and step; `shard` and `replicate` as in `plan`.
        imbalance: Newton-Schulz seconds of the busiest owner over the mean; None without owners.
        idle_ranks: ranks that own nothing; None without owners.
        limits: what costs 5 % of the step or more: `latency`, `bandwidth`, `newton-schulz`; and `idle ranks`.
    """

    design: str
    ranks: int
    shard: int
    replicate: int
    step_seconds: float
    passes_seconds: float
    newton_schulz_seconds: float
    elementwise_seconds: float
    copies_seconds: float
    exposed_seconds: float
    communication_seconds: float
    latency_seconds: float
    overhead: float
    baseline: str
    wire_elements: dict[str, float]
    imbalance: float | None
    idle_ranks: int | None
    limits: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "limits": list(self.limits)}


@dataclass(frozen=True)
class Simulation:
    """What `simulate` returns; `to_dict()` is the key `simulation` of `hf-muon plan --simulate --json`.

    Attributes:
        model: its name.
        device: rates used.
        micro_batch: sequences per rank.
        seq_len: tokens per sequence.
        checkpointing: layers are computed again in backward.
        grouped: the broadcasts (and the reductions) of a unit share one latency.
        steps: rows, by ranks and then by design.
    """

    model: str
    device: SimulatedDevice
    micro_batch: int
    seq_len: int
    checkpointing: bool
    grouped: bool
    steps: tuple[SimulatedStep, ...]

    @property
    def ranks(self) -> list[int]:
        """The numbers of ranks."""
        return list(dict.fromkeys(step.ranks for step in self.steps))

    def find(self, design: str, ranks: int) -> SimulatedStep | None:
        """Return one row; None where a design does not exist, as replicas of one machine."""
        return next((step for step in self.steps if (step.design, step.ranks) == (design, ranks)), None)

    def fastest(self, ranks: int) -> SimulatedStep:
        """Return the fastest way to run Muon."""
        muon = (step for step in self.steps if step.ranks == ranks and not step.design.startswith("adamw"))
        return min(muon, key=lambda step: step.step_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-serialisable data."""
        return {
            "device": self.device.to_dict(),
            "micro_batch": self.micro_batch,
            "seq_len": self.seq_len,
            "checkpointing": self.checkpointing,
            "grouped": self.grouped,
            "steps": [step.to_dict() for step in self.steps],
            "fastest": [{"ranks": n, "design": self.fastest(n).design} for n in self.ranks],
        }


def simulate(
    model_or_config: Any,
    *,
    ranks: Sequence[int] = RANKS,
    device: str | SimulatedDevice = "h100",
    rates: DeviceRates | str | os.PathLike[str] | None = None,
    shard: int | None = None,
    micro_batch: int = MICRO_BATCH,
    seq_len: int = SEQ_LEN,
    checkpointing: bool = True,
    grouped: bool = False,
    designs: Sequence[str] = tuple(DESIGNS),
    include: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    matrix_split: str = "auto",
) -> Simulation:
    """Simulate one training step of each design on each number of ranks.

    Args:
        model_or_config: as in `hf_muon.plan`.
        ranks: numbers of ranks.
        device: a preset of `PRESETS`, or a device of your own.
        rates: what `hf-muon calibrate` measured, or the path of its file: replaces the preset's figures, and the
            owner plans are balanced by its seconds.
        shard: ranks of one replica under HSDP; None: those of one machine.
        micro_batch: sequences per rank.
        seq_len: tokens per sequence.
        checkpointing: layers are computed again in backward.
        grouped: what if the broadcasts (and the reductions) of a unit were one launch with one latency.
        designs: keys of `DESIGNS`.
        include: as in `tag_parameters`, like the two that follow.
        exclude: regexes.
        matrix_split: how fused projections are split.

    Raises:
        ValueError: an unknown device or design, numbers below 1, or what `hf_muon.plan` raises.

    Note:
        Two owner plans per number of ranks take most of the time: seconds for 4,096 ranks of a dense model.
    """
    _check(ranks, shard, micro_batch, seq_len, designs)
    measured = rates if rates is None or isinstance(rates, DeviceRates) else read_rates(rates)
    found = find_device(device) if isinstance(device, str) else device
    if measured is not None:
        found = found.with_rates(measured)
    name, config, model = find_model(model_or_config)
    census = take_census(model, include=include, exclude=exclude, matrix_split=matrix_split)
    load = read_workload(model, config, census, micro_batch=micro_batch, seq_len=seq_len)
    setting = Setting(load, found, found.network, checkpointing=checkpointing, grouped=grouped)
    steps: list[SimulatedStep] = []
    for count in dict.fromkeys(ranks):
        steps += _simulate_ranks(setting, census, count, shard or found.ranks_per_node, designs)
    return Simulation(name, found, micro_batch, seq_len, checkpointing, grouped, tuple(steps))


def simulate_step(design: str, setting: Setting, owners: OwnershipPlan) -> SimulatedStep:
    """Simulate one design on the grid of an owner plan; `overhead` is 0 until a baseline is known.

    Args:
        design: a key of `DESIGNS`.
        setting: workload, device, network, dtypes.
        owners: the plan.
    """
    step = DESIGNS[design](setting, owners)
    step.run()  # the first step of a run has nothing to publish behind
    before = (step.time.now, step.time.exposed, step.time.on_links, step.time.latency, dict(step.time.busy))
    step.wire.clear()
    step.run()
    time = step.time
    busy = {part: seconds - before[4].get(part, 0.0) for part, seconds in time.busy.items()}
    seconds, exposed = time.now - before[0], time.exposed - before[1]
    communication, latency = time.on_links - before[2], time.latency - before[3]
    shares = step.owned_seconds if step.has_owners or design == "all-to-all" else None
    mean = 0.0 if shares is None else sum(shares) / len(shares)
    idle = None if shares is None else len(owners.idle_ranks)
    spent = busy.get("newton_schulz", 0.0)
    limits = []
    if exposed > _MATTERS * seconds:
        limits.append("latency" if latency > communication / 2 else "bandwidth")
    if spent > _MATTERS * seconds:
        limits.append("newton-schulz")
    if idle:
        limits.append("idle ranks")
    return SimulatedStep(
        design=design,
        ranks=owners.num_ranks,
        shard=owners.shard,
        replicate=owners.replicate,
        step_seconds=seconds,
        passes_seconds=busy.get("passes", 0.0),
        newton_schulz_seconds=spent,
        elementwise_seconds=busy.get("elementwise", 0.0),
        copies_seconds=busy.get("copies", 0.0),
        exposed_seconds=exposed,
        communication_seconds=communication,
        latency_seconds=latency,
        overhead=0.0,
        baseline=HSDP_BASELINE if "hsdp" in design else BASELINE,
        wire_elements={axis: step.wire.get(axis, 0.0) for axis in ("shard", "replicate")},
        imbalance=None if shares is None else max(shares) / mean if mean else 1.0,
        idle_ranks=idle,
        limits=tuple(limits),
    )


def _simulate_ranks(
    setting: Setting, census: Census, ranks: int, shard: int, designs: Sequence[str]
) -> list[SimulatedStep]:
    grids = {False: (ranks, 1)}
    if ranks % shard == 0 and ranks > shard:
        grids[True] = (shard, ranks // shard)
    steps: list[SimulatedStep] = []
    for with_replicas, (size, copies) in grids.items():
        wanted = [name for name in DESIGNS if ("hsdp" in name) == with_replicas]
        if not set(wanted) & set(designs):
            continue
        owners = census.owners(shard=size, replicate=copies, rates=setting.device.rates)
        found = {name: simulate_step(name, setting, owners) for name in wanted if name in designs or "adamw" in name}
        base = found[HSDP_BASELINE if with_replicas else BASELINE].step_seconds
        steps += [
            replace(step, overhead=step.step_seconds / base - 1) for name, step in found.items() if name in designs
        ]
    return steps


def _check(ranks: Sequence[int], shard: int | None, micro_batch: int, seq_len: int, designs: Sequence[str]) -> None:
    numbers = [("ranks", count) for count in ranks] + [("micro_batch", micro_batch), ("seq_len", seq_len)]
    numbers += [] if shard is None else [("shard", shard)]
    for name, value in numbers:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1; got {value!r}.")
    if not ranks:
        raise ValueError("ranks must name at least one number of ranks; got none.")
    for name in designs:
        if name not in DESIGNS:
            raise ValueError(f"designs must be of {', '.join(DESIGNS)}; got {name!r}.{nearest(name, tuple(DESIGNS))}")


__all__ = ["DESIGNS", "RANKS", "SimulatedStep", "Simulation", "simulate", "simulate_step"]
