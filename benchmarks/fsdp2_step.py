# SPDX-License-Identifier: Apache-2.0
"""Step time under FSDP2: AdamW, Muon that gathers everywhere, and dedicated owners (Z3, Z2), in one run.

    python benchmarks/fsdp2_step.py --ranks 2 --json fsdp2_step.json       # starts its own processes
    torchrun --nproc-per-node 8 benchmarks/fsdp2_step.py --hidden 2048     # or uses those of torchrun

Gloo on the CPU, NCCL where every rank has a GPU. The variants take turns, step by step, so that a machine that others
use slows all of them alike.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_muon

VARIANTS = ("adamw z3", "adamw z2", "muon gathered", "dmuon z3", "dmuon z2")
CPU = torch.device("cpu")
NO_PAYLOAD = ("wait_tensor", "wrap_tensor_autograd", "barrier")


class Block(torch.nn.Module):
    """Attention and gated MLP of a Llama layer, without positions: the matrices are what is measured."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        inner, self.heads = 8 * hidden // 3 // 16 * 16, max(1, hidden // 64)
        self.norm1, self.norm2 = torch.nn.RMSNorm(hidden), torch.nn.RMSNorm(hidden)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (torch.nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x of shape (batch, seq, hidden)."""
        normed = self.norm1(x)
        q, k, v = (f(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        normed = self.norm2(x)
        return x + self.down(torch.nn.functional.silu(self.gate(normed)) * self.up(normed))


class Model(torch.nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, vocabulary: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, hidden)
        self.layers = torch.nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm = torch.nn.RMSNorm(hidden)
        self.head = torch.nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting the next of `ids`, shape (batch, seq + 1)."""
        x = self.embed(ids[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Traffic(TorchDispatchMode):
    """Bytes of one step, counted where collectives reach the dispatcher: those of FSDP2, DTensor and hf-muon alike.

    `payload` is the size of the buffers; `wire` what a rank sends on average with ring or pipelined algorithms:
    (N-1)/N of a buffer, twice that for an all-reduce.
    """

    def __init__(self) -> None:
        super().__init__()
        self.payload: dict[str, int] = {}
        self.wire = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.strip("_")
        if func.namespace in ("c10d", "_c10d_functional") and name not in NO_PAYLOAD:
            leaves = [x for x in tree_leaves([args, kwargs, result]) if isinstance(x, torch.Tensor)]
            # The whole buffer is an argument or the result; each other side is N times smaller.
            size = max((x.numel() * x.element_size() for x in leaves), default=0)
            self.payload[name] = self.payload.get(name, 0) + size
            ranks = dist.get_world_size()
            self.wire += size * (ranks - 1) / ranks * (2 if name.startswith(("allreduce", "all_reduce")) else 1)
        return result


class Clock:
    """Marks in time: CUDA events on a GPU (nothing waits), the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.marks = device, []

    def mark(self) -> None:
        """Remember now."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def spans(self) -> list[float]:
        """Return seconds between neighbouring marks, and forget them."""
        marks, self.marks = self.marks, []
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(marks)]
        return [b - a for a, b in itertools.pairwise(marks)]


class Run:
    """One variant: its model, optimizer and measured steps."""

    def __init__(self, variant: str, options: argparse.Namespace, device: torch.device, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        model = Model(options.vocabulary, options.hidden, options.layers).to(device)
        tags = hf_muon.tag_parameters(model)
        self.muon_elements = sum(p.numel() for n, p in model.named_parameters() if tags[n] == "muon")
        self.elements = sum(p.numel() for p in model.parameters())
        z3 = not variant.endswith("z2")
        owned = variant.startswith("dmuon")
        policy = MixedPrecisionPolicy()
        if options.dtype == "bfloat16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        wrap = hf_muon.dedicate_params(model, mesh, reshard_after_forward=z3) if owned else contextlib.nullcontext()
        with wrap:
            for layer in model.layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=z3, mp_policy=policy)
            fully_shard(model, mesh=mesh, reshard_after_forward=z3, mp_policy=policy)
        if not owned:  # fully_shard made new parameters
            hf_muon.tag_parameters(model)
        if variant.startswith("adamw"):
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device.type == "cuda")
        else:
            self.optimizer = hf_muon.MuonWithAuxAdam(model.named_parameters(), lr=1e-3)
        self.variant, self.model, self.clock, self.rows = variant, model, Clock(device), []

    def step(self, ids: torch.Tensor) -> None:
        """Forward, backward and optimizer step; times are kept."""
        self.clock.mark()
        self.model(ids).backward()
        self.clock.mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.clock.mark()
        self.rows.append(self.clock.spans())


def measure(options: argparse.Namespace) -> None:
    """Run every variant on this rank; rank 0 prints and writes."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if options.backend == "nccl" else CPU
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    load_before = os.getloadavg()
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (options.batch, options.seq + 1)
    runs = [Run(variant, options, device, mesh) for variant in options.variants]
    traffic = {}
    for step in range(options.steps + 2):  # one to warm up, one to count
        ids = torch.randint(options.vocabulary, shape, generator=generator).to(device)
        for run in runs:
            dist.barrier()
            with Traffic() if step == 1 else contextlib.nullcontext() as counted:
                run.step(ids)
            if step == 1:
                traffic[run.variant] = {"payload_bytes": counted.payload, "wire_bytes_per_rank": int(counted.wire)}
                if run.variant.startswith("dmuon"):
                    hf_muon.comm_stats(run.model, reset=True)
    rows = [summary(run, options, device, traffic[run.variant]) for run in runs]
    if dist.get_rank() == 0:
        report(options, runs[0], rows, load_before, device)


def summary(run: Run, options: argparse.Namespace, device: torch.device, traffic: dict) -> dict:
    """Return the row of one variant; a step lasts as long as on its slowest rank. Collective."""
    spans = torch.tensor(run.rows[2:], dtype=torch.float64, device=device)  # (steps, 2)
    times = torch.cat([spans, spans.sum(1, keepdim=True)], 1)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    passes, optimizer, whole = times.T.tolist()
    seconds = statistics.median(whole)
    row = {
        "variant": run.variant,
        "step_seconds": seconds,
        "step_seconds_min_max": [min(whole), max(whole)],
        "forward_backward_seconds": statistics.median(passes),
        "optimizer_seconds": statistics.median(optimizer),
        "tokens_per_second": options.batch * options.seq * dist.get_world_size() / seconds,
        **traffic,
    }
    if run.variant.startswith("dmuon"):
        stats = hf_muon.comm_stats(run.model)
        row["comm_stats_bytes_per_step"] = {kind: count / options.steps for kind, count in stats.items()}
    return row


def report(options: argparse.Namespace, run: Run, rows: list[dict], load_before: tuple, device: torch.device) -> None:
    """Print the table; write the JSON."""
    base = next((row["step_seconds"] for row in rows if row["variant"] == "adamw z3"), None)
    names = ("step s", "fwd+bwd s", "optimizer s", "tokens/s", "wire MB/rank", "x adamw z3")
    table = Table("variant", *names)
    for row in rows:
        row["ratio_to_adamw_z3"] = row["step_seconds"] / base if base else None
        values = [row["step_seconds"], row["forward_backward_seconds"], row["optimizer_seconds"]]
        values += [row["tokens_per_second"], row["wire_bytes_per_rank"] / 1e6, row["ratio_to_adamw_z3"]]
        table.add_row(row["variant"], *(f"{value:.4g}" if value is not None else "-" for value in values))
    Console().print(table)
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    result = {
        "settings": {**settings, "ranks": dist.get_world_size(), "threads_per_rank": torch.get_num_threads()},
        "tokens_per_step": options.batch * options.seq * dist.get_world_size(),
        "elements": run.elements,
        "muon_elements": run.muon_elements,
        "machine": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "cpus": os.cpu_count(),
            "torch": torch.__version__,
            "load_average_before": load_before,
            "load_average_after": os.getloadavg(),
            "note": options.note,
        },
        "rows": rows,
    }
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


def worker(rank: int, options: argparse.Namespace, store: str | None) -> None:
    """Join the process group and measure."""
    if store is not None:
        os.environ["LOCAL_RANK"] = str(rank)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
        init = {"store": dist.FileStore(store, options.ranks), "rank": rank, "world_size": options.ranks}
        dist.init_process_group(options.backend, **init)
    else:
        dist.init_process_group(options.backend)
    try:
        measure(options)
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Parse options; start the processes unless torchrun did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (without torchrun)")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--backend", choices=("auto", "gloo", "nccl"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of the passes")
    parser.add_argument("--note", default="", help="what else the machine was doing, for the JSON")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", options.ranks))
    if options.backend == "auto":
        options.backend = "nccl" if torch.cuda.device_count() >= ranks else "gloo"
    if options.dtype == "auto":
        options.dtype = "bfloat16" if options.backend == "nccl" else "float32"
    if "RANK" in os.environ:
        worker(int(os.environ["RANK"]), options, None)
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (options, os.path.join(folder, "store")), nprocs=options.ranks)


if __name__ == "__main__":
    main()
