# SPDX-License-Identifier: Apache-2.0
"""Measure speed and memory on one GPU in a few minutes. A table; exit status 1 where a stated bound is missed.

    python benchmarks/gpu_speed.py --json gpu_speed.json
    python benchmarks/gpu_speed.py --dry-run                # CPU and gloo, tiny sizes; says what needs a device

1. Newton-Schulz in bfloat16 beside torch.optim.Muon's iteration, for large shapes, alone and eight in a stack: TFLOP/s
   of the products that are run, as a share of the measured rate of a large product.
2. A training step of 32k tokens under FSDP2 with one rank, bfloat16, recomputed layers: Muon with owners beside fused
   AdamW, steps in turn; the step's overhead, and its optimizer alone.
3. No host synchronization inside `optimizer.step()`, seen by the profiler.
4. Peak memory beside `hf_muon.plan` (within 5 %).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim._muon import _zeropower_via_newtonschulz as torch_iteration

import hf_muon
from hf_muon.orthogonalize import COEFFICIENTS, newton_schulz, ns_flops
from hf_muon.planning.model_source import build_meta_model, resolve_model

SHAPES = [(2048, 2048), (2048, 11008), (4096, 14336)]
KELLER = COEFFICIENTS["keller"][0]
MEMORY_LIMIT = 0.05
SYNCHRONIZATIONS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


class Report:
    """Rows of (what, value, unit, limit, passed)."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, what: str, value: Any, unit: str = "", limit: str = "", passed: bool | None = None) -> None:
        """Note one figure, with a verdict where there is a bound."""
        self.rows.append({"what": what, "value": value, "unit": unit, "limit": limit, "passed": passed})


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Return the median time of a call, the device waited for; one more call warms up."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def orthogonalization(report: Report, device: torch.device, scale: int) -> None:
    """Measure Newton-Schulz against the rate of a large product."""
    side = 8192 // scale
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    ceiling = 2 * side**3 / seconds_of(lambda: a @ a, device)
    report.add(f"bfloat16 product of {side} x {side}", ceiling / 1e12, "TFLOP/s")
    for m, n in ((m // scale, n // scale) for m, n in SHAPES):
        for batch in (1, 8):
            x = torch.randn(batch, m, n, device=device)
            ours = seconds_of(lambda x=x: newton_schulz(x, dtype="bfloat16"), device)
            theirs = seconds_of(lambda x=x: [torch_iteration(one, KELLER, 5, 1e-7) for one in x], device)
            rate = ns_flops(m, n, batch=batch, device_type=device.type) / ours
            name = f"Newton-Schulz {batch} x ({m}, {n})"
            report.add(name, rate / 1e12, "TFLOP/s")
            report.add(f"{name}, share of the ceiling", rate / ceiling)
            report.add(f"{name}, faster than torch.optim.Muon's", theirs / ours, "x")


class Training:
    """One model under FSDP2 with its optimizer."""

    def __init__(self, options: argparse.Namespace, device: torch.device, optimizer: str) -> None:
        torch.manual_seed(0)
        self.options, self.device = options, device
        config = resolve_model(options.model).config
        if options.dry_run:
            config.update({"num_hidden_layers": 2, "vocab_size": 1024})
        config.dtype = torch.float32
        self.config = config
        self.model = build_meta_model(config, "cpu").to(device).train()
        getattr(self.model, "activation_checkpointing_enable", self.model.gradient_checkpointing_enable)()
        mesh = init_device_mesh(device.type, (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        owners: Any = contextlib.nullcontext()
        if optimizer == "muon":
            hf_muon.tag_parameters(self.model)
            owners = hf_muon.dedicate_params(self.model, mesh)
        with owners:
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(self.model, mesh=mesh, mp_policy=policy)
        if optimizer == "muon":
            self.optimizer: torch.optim.Optimizer = hf_muon.MuonWithAuxAdam(self.model.named_parameters(), lr=1e-3)
        else:
            fused = device.type == "cuda"
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=fused)
        shape = (options.micro_batch, options.seq_len)
        self.ids = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(1)).to(device)

    def gradients(self, micro_steps: int) -> None:
        """Run forward and backward of some micro-batches."""
        for _ in range(micro_steps):
            self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss.backward()

    def step(self) -> None:
        """Update and forget the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def overhead(report: Report, options: argparse.Namespace, device: torch.device) -> None:
    """Time whole steps of Muon and fused AdamW in turn."""
    runs = {name: Training(options, device, name) for name in ("adamw", "muon")}
    micro_steps = max(1, options.tokens // (options.micro_batch * options.seq_len))
    whole: dict[str, list[float]] = {name: [] for name in runs}
    alone: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(options.repeats + 1):
        for name, run in runs.items():
            synchronize(device)
            begin = time.perf_counter()
            run.gradients(micro_steps)
            synchronize(device)
            middle = time.perf_counter()
            run.step()
            synchronize(device)
            if turn:
                whole[name].append(time.perf_counter() - begin)
                alone[name].append(time.perf_counter() - middle)
    tokens = micro_steps * options.micro_batch * options.seq_len
    for name in runs:
        report.add(f"{name}: step of {tokens} tokens", statistics.median(whole[name]), "s")
        report.add(f"{name}: optimizer alone", statistics.median(alone[name]), "s")
    ratios = [muon / adamw for muon, adamw in zip(whole["muon"], whole["adamw"], strict=True)]
    report.add("Muon over fused AdamW, whole step", statistics.median(ratios), "x")
    if device.type == "cuda":
        found = host_synchronizations(runs["muon"])
        report.add("host synchronizations in optimizer.step()", len(found), limit="0", passed=not found)
    else:
        report.add("host synchronizations in optimizer.step()", "needs a GPU")


def host_synchronizations(run: Training) -> list[str]:
    """Return the synchronizing runtime calls that the profiler sees inside one step."""
    run.gradients(1)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile, torch.profiler.record_function("step"):
        run.step()
    events = list(profile.events())
    step = next(event for event in events if event.name == "step").time_range
    inside = [e for e in events if step.start <= e.time_range.start and e.time_range.end <= step.end]
    return [event.name for event in inside if event.name in SYNCHRONIZATIONS]


def memory(report: Report, options: argparse.Namespace, device: torch.device) -> None:
    """Compare the peak of the third step with the plan's."""
    if device.type != "cuda":
        report.add("peak memory beside the plan", "needs a GPU")
        return
    for name, layout in (("adamw", "fsdp2"), ("muon", "dmuon-z3")):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
        run = Training(options, device, name)
        batch = {"micro_batch": options.micro_batch, "seq_len": options.seq_len}
        plan = hf_muon.plan(run.config, world_size=1, **batch)
        for turn in range(3):
            if turn == 2:
                torch.cuda.reset_peak_memory_stats(device)
            run.gradients(1)
            run.step()
        peak = torch.cuda.max_memory_allocated(device) - before
        planned = next(row.peak for row in plan.memory if (row.layout, row.optimizer) == (layout, name))
        report.add(f"{layout}: peak", peak / 2**30, "GiB")
        gap = planned / peak - 1
        report.add(f"{layout}: plan over peak, minus one", gap, limit="5 %", passed=abs(gap) <= MEMORY_LIMIT)
        del run


def main() -> None:
    """Parse options, run, print and write; exit with 1 if a bound was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="CPU and gloo, tiny sizes")
    parser.add_argument("--model", default="SmolLM2-135M", help="built-in name, folder or hub id")
    parser.add_argument("--tokens", type=int, help="of one step (default 32768)")
    parser.add_argument("--micro-batch", type=int, help="rows (default 8)")
    parser.add_argument("--seq-len", type=int, help="default 2048")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    options.tokens = options.tokens or (64 if options.dry_run else 32768)
    options.micro_batch = options.micro_batch or (1 if options.dry_run else 8)
    options.seq_len = options.seq_len or (32 if options.dry_run else 2048)
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("needs a CUDA device; got none. Try --dry-run.")
    device = torch.device("cpu") if options.dry_run else torch.device("cuda", 0)
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("gloo" if options.dry_run else "nccl", store=store, rank=0, world_size=1)
        try:
            orthogonalization(report, device, 64 if options.dry_run else 1)
            memory(report, options, device)
            overhead(report, options, device)
        finally:
            dist.destroy_process_group()
    table = Table("what", "value", "unit", "limit", "passed")
    for row in report.rows:
        value = f"{row['value']:.4g}" if isinstance(row["value"], float) else str(row["value"])
        table.add_row(
            row["what"], value, row["unit"], row["limit"], "" if row["passed"] is None else str(row["passed"])
        )
    Console().print(table)
    if options.json:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        with open(options.json, "w") as file:
            json.dump({"device": name, "torch": torch.__version__, "rows": report.rows}, file, indent=1)
            file.write("\n")
    sys.exit(any(row["passed"] is False for row in report.rows))


if __name__ == "__main__":
    main()
