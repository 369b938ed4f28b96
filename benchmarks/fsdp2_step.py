# SPDX-License-Identifier: Apache-2.0
"""Step time under FSDP2: AdamW, Muon that gathers everywhere, and dedicated owners (Z3, Z2), in one run.

    python benchmarks/fsdp2_step.py --json fsdp2_step.json       # two processes, 8,192 tokens per step over both
    python benchmarks/fsdp2_step.py --scaling --json out.json    # 1, 2 and 4 processes with equal tokens each
    torchrun --nproc-per-node 8 benchmarks/fsdp2_step.py --hidden 2048     # or uses the processes of torchrun

Gloo on the CPU, NCCL where every rank has a GPU. The designs take turns, step by step on the same data, so that a
machine that others use slows all of them alike; ratios are medians of those within one turn. Beside the seconds of the
clock stand those of the CPU, of all threads of the busiest rank: waiting costs none of them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gathered_muon import GatheredMuon
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_muon

VARIANTS = ("adamw z3", "muon gathered", "dmuon z3", "dmuon z2", "adamw z2")
DEFAULT_VARIANTS = VARIANTS[:4]
SCALING_VARIANTS = VARIANTS[:3]
SCALING_RANKS = (1, 2, 4)
SCALING_TOKENS = 1024  # per rank
WARM_UP_TOKENS = 64
PHASES = ("forward_backward", "optimizer", "step")
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
        self.lm_head = torch.nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting the next of `ids`, shape (batch, seq + 1)."""
        x = self.embed(ids[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x)).float()
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
    """Marks in time: CUDA events on a GPU (nothing waits), the host's clock elsewhere; and CPU seconds so far."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.marks, self.cpu_marks = device, [], []

    def mark(self) -> None:
        """Remember now."""
        self.cpu_marks.append(time.process_time())
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

    def cpu_spans(self) -> list[float]:
        """Return CPU seconds of this process (all threads) between neighbouring marks, and forget them."""
        marks, self.cpu_marks = self.cpu_marks, []
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
        is_cuda = device.type == "cuda"
        if variant.startswith("adamw"):
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=is_cuda)
        elif variant == "muon gathered":
            self.optimizer = GatheredMuon(model.named_parameters(), hf_muon.MuonConfig(lr=1e-3), fused=is_cuda)
        else:
            self.optimizer = hf_muon.MuonWithAuxAdam(model.named_parameters(), lr=1e-3)
        self.variant, self.model, self.clock = variant, model, Clock(device)
        self.rows: list[list[float]] = []  # seconds of each step: passes, optimizer
        self.cpu_rows: list[list[float]] = []

    def step(self, ids: torch.Tensor) -> None:
        """Forward, backward and optimizer step; times are kept."""
        self.clock.mark()
        self.model(ids).backward()
        self.clock.mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.clock.mark()
        self.rows.append(self.clock.spans())
        self.cpu_rows.append(self.clock.cpu_spans())


def measure(options: argparse.Namespace) -> None:
    """Run every variant on this rank; rank 0 prints and writes."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if options.backend == "nccl" else CPU
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    load_before = os.getloadavg()
    generator = torch.Generator().manual_seed(dist.get_rank())
    runs = [Run(variant, options, device, mesh) for variant in options.variants]
    traffic: dict[str, dict] = {}
    for step in range(-2, options.steps):  # one to warm up, one to count: few tokens do for both
        shape = (options.batch, options.seq + 1) if step >= 0 else (1, min(options.seq, WARM_UP_TOKENS) + 1)
        ids = torch.randint(options.vocabulary, shape, generator=generator).to(device)
        for run in runs:
            dist.barrier()
            with Traffic() if step == -1 else contextlib.nullcontext() as counted:
                run.step(ids)
            if step == -1:
                traffic[run.variant] = {"payload_bytes": counted.payload, "wire_bytes_per_rank": int(counted.wire)}
                run.rows, run.cpu_rows = [], []
                if run.variant.startswith("dmuon"):
                    hf_muon.comm_stats(run.model, reset=True)
    rows = [summary(run, options, device, traffic[run.variant]) for run in runs]
    add_ratios(rows)
    if dist.get_rank() == 0:
        report(options, runs[0], rows, load_before, device)


def slowest(rows: list[list[float]], device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of every step by phase: each lasts as long as on its slowest rank. Collective."""
    spans = torch.tensor(rows, dtype=torch.float64, device=device)  # (steps, 2)
    times = torch.cat([spans, spans.sum(1, keepdim=True)], 1)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return dict(zip(PHASES, times.T.tolist(), strict=True))


def summary(run: Run, options: argparse.Namespace, device: torch.device, traffic: dict) -> dict:
    """Return the row of one variant. Collective."""
    seconds, cpu = slowest(run.rows, device), slowest(run.cpu_rows, device)
    row = {"variant": run.variant}
    row.update({f"{phase}_seconds": statistics.median(seconds[phase]) for phase in PHASES})
    row.update({f"{phase}_cpu_seconds": statistics.median(cpu[phase]) for phase in PHASES})
    row["step_seconds_min_max"] = [min(seconds["step"]), max(seconds["step"])]
    row["tokens_per_second"] = options.batch * options.seq * dist.get_world_size() / row["step_seconds"]
    row["every_step"] = {"seconds": seconds, "cpu_seconds": cpu}
    row.update(traffic)
    if run.variant.startswith("dmuon"):
        stats = hf_muon.comm_stats(run.model)
        row["comm_stats_bytes_per_step"] = {kind: count / options.steps for kind, count in stats.items()}
    return row


def add_ratios(rows: list[dict]) -> None:
    """Add to each row what its step is of AdamW's, and by how much the gathering peer's optimizer step is longer."""
    by_name = {row["variant"]: row["every_step"] for row in rows}

    def median_ratio(clock: str, phase: str, over: str, under: str) -> float | None:
        if over not in by_name or under not in by_name:
            return None
        pairs = zip(by_name[over][clock][phase], by_name[under][clock][phase], strict=True)
        return statistics.median(a / b for a, b in pairs)

    for row in rows:
        name = row["variant"]
        row["ratio_to_adamw_z3"] = median_ratio("seconds", "step", name, "adamw z3")
        row["cpu_ratio_to_adamw_z3"] = median_ratio("cpu_seconds", "step", name, "adamw z3")
        row["gathered_optimizer_over_this"] = median_ratio("seconds", "optimizer", "muon gathered", name)


COLUMNS = {
    "step s": "step_seconds",
    "fwd+bwd s": "forward_backward_seconds",
    "optimizer s": "optimizer_seconds",
    "CPU s": "step_cpu_seconds",
    "opt. CPU s": "optimizer_cpu_seconds",
    "tokens/s": "tokens_per_second",
    "wire MB/rank": "wire_bytes_per_rank",
    "x adamw z3": "ratio_to_adamw_z3",
    "gathered opt. x": "gathered_optimizer_over_this",
}


def show(documents: list[dict]) -> None:
    """Print the rows of one or more measurements as a table, on lines of its own width where no terminal cuts them."""
    table = Table("ranks", "variant", *COLUMNS)
    for document in documents:
        for row in document["rows"]:
            values = [row[key] if key != "wire_bytes_per_rank" else row[key] / 1e6 for key in COLUMNS.values()]
            cells = ("-" if value is None else f"{value:.4g}" for value in values)
            table.add_row(str(document["settings"]["ranks"]), row["variant"], *cells)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def report(options: argparse.Namespace, run: Run, rows: list[dict], load_before: tuple, device: torch.device) -> None:
    """Print the table; write the JSON."""
    settings = {key: value for key, value in vars(options).items() if key not in ("json", "scaling")}
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
    if not options.scaling:
        show([result])
    write(result, options.json)


def write(document: dict, path: str | None) -> None:
    """Write JSON, if asked for."""
    if path:
        with open(path, "w") as file:
            json.dump(document, file, indent=1)
            file.write("\n")


def worker(rank: int, options: argparse.Namespace, store: str | None) -> None:
    """Join the process group and measure."""
    if store is not None:
        os.environ["LOCAL_RANK"] = str(rank)
        torch.set_num_threads(options.threads or max(1, (os.cpu_count() or 1) // options.ranks))
        init = {"store": dist.FileStore(store, options.ranks), "rank": rank, "world_size": options.ranks}
        dist.init_process_group(options.backend, **init)
    else:
        dist.init_process_group(options.backend)
    try:
        measure(options)
    finally:
        dist.destroy_process_group()


def scale(options: argparse.Namespace, folder: str) -> None:
    """Measure with more and more ranks that have equal tokens each; one thread per rank, so that they compare."""
    documents = []
    for ranks in SCALING_RANKS:
        path = os.path.join(folder, f"{ranks}.json")
        own = {**vars(options), "ranks": ranks, "threads": options.threads or 1, "json": path}
        mp.spawn(worker, (argparse.Namespace(**own), os.path.join(folder, f"store{ranks}")), nprocs=ranks)
        with open(path) as file:
            documents.append(json.load(file))
    show(documents)
    write({"scaling": documents}, options.json)


def parse() -> argparse.Namespace:
    """Return the options; sequences per rank follow from the tokens per step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (without torchrun)")
    parser.add_argument("--scaling", action="store_true", help="1, 2 and 4 ranks with equal tokens each")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=49152, help="default: that of SmolLM2")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--tokens", type=int, help="per step; default 8192 over all ranks (--scaling: 1024 per rank)")
    parser.add_argument("--batch", type=int, help="sequences per rank, instead of --tokens")
    parser.add_argument("--steps", type=int, default=2, help="measured turns")
    parser.add_argument("--threads", type=int, help="per rank; default: the cores, divided")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS)
    parser.add_argument("--backend", choices=("auto", "gloo", "nccl"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of the passes")
    parser.add_argument("--note", default="", help="what else the machine was doing, for the JSON")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    if "RANK" in os.environ:
        if options.scaling:
            parser.error("--scaling starts its own processes; got those of torchrun. Run it with python.")
        options.ranks = int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", options.ranks))
    if options.variants is None:
        options.variants = list(SCALING_VARIANTS if options.scaling else DEFAULT_VARIANTS)
    if options.backend == "auto":
        options.backend = "nccl" if torch.cuda.device_count() >= local else "gloo"
    if options.dtype == "auto":
        options.dtype = "bfloat16" if options.backend == "nccl" else "float32"
    if options.batch is None:
        per_rank = (options.tokens or SCALING_TOKENS) if options.scaling else (options.tokens or 8192) // options.ranks
        options.batch = per_rank // options.seq
        if options.batch < 1 or per_rank % options.seq:
            parser.error(f"--tokens must be whole sequences of {options.seq} on each rank; got {per_rank} per rank.")
    return options


def main() -> None:
    """Start the processes unless torchrun did."""
    options = parse()
    if "RANK" in os.environ:
        worker(int(os.environ["RANK"]), options, None)
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.scaling:
            scale(options, folder)
        else:
            mp.spawn(worker, (options, os.path.join(folder, "store")), nprocs=options.ranks)


if __name__ == "__main__":
    main()
