# SPDX-License-Identifier: Apache-2.0
"""Step time under DDP: AdamW, Muon repeated on every rank, and Muon with one owner per matrix, in one run.

    python benchmarks/ddp_step.py --ranks 2 --json benchmarks/results/ddp_step.json   # starts its own processes
    torchrun --nproc-per-node 8 benchmarks/ddp_step.py --hidden 2048                  # or uses those of torchrun

Gloo on the CPU, NCCL where every rank has a GPU. The variants take turns, step by step, so that a machine that others
use slows all of them alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fsdp2_step import CPU, Clock, Model, Traffic
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

import hf_muon

VARIANTS = ("adamw", "muon repeated", "muon owned")
WARM_UP, COUNTED = 2, 2  # DDP lays its buckets out anew after the first step; the step with this index is counted


class Run:
    """One variant: its model, optimizer and measured steps."""

    def __init__(self, variant: str, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(0)
        net = Model(options.vocabulary, options.hidden, options.layers).to(device)
        self.model = DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)
        if variant == "adamw":
            self.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=device.type == "cuda")
        else:
            mode = {} if variant == "muon owned" else {"dmuon": "off"}
            self.optimizer = hf_muon.OptimizerFactory()(self.model, lr=1e-3, **mode)
            self.muon_elements = sum(p.numel() for p in net.parameters() if p.use_muon)
        self.elements = sum(p.numel() for p in net.parameters())
        self.variant, self.clock, self.rows, self.traffic = variant, Clock(device), [], Traffic()
        self.autocast = options.dtype == "bfloat16"

    def step(self, ids: torch.Tensor) -> None:
        """Forward, backward and optimizer step; times are kept."""
        self.clock.mark()
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.autocast):
            loss = self.model(ids)
        loss.backward()
        self.clock.mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.clock.mark()
        self.rows.append(self.clock.spans())

    def state_bytes(self) -> int:
        """Return the bytes of optimizer state on this rank."""
        tensors = [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def measure(options: argparse.Namespace) -> None:
    """Run every variant on this rank; rank 0 prints and writes."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if options.backend == "nccl" else CPU
    if device.type == "cuda":
        torch.cuda.set_device(device)
    load_before = os.getloadavg()
    generator = torch.Generator().manual_seed(dist.get_rank())
    runs = [Run(variant, options, device) for variant in options.variants]
    for step in range(options.steps + WARM_UP + 1):
        ids = torch.randint(options.vocabulary, (options.batch, options.seq + 1), generator=generator).to(device)
        for run in runs:
            dist.barrier()
            with run.traffic if step == COUNTED else contextlib.nullcontext():
                run.step(ids)
    rows = [summary(run, options, device) for run in runs]
    if dist.get_rank() == 0:
        report(options, runs, rows, load_before, device)


def summary(run: Run, options: argparse.Namespace, device: torch.device) -> dict:
    """Return the row of one variant; a step lasts as long as on its slowest rank. Collective."""
    spans = torch.tensor(run.rows[WARM_UP + 1 :], dtype=torch.float64, device=device)  # (steps, 2)
    times = torch.cat([spans, spans.sum(1, keepdim=True)], 1)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    held = torch.tensor(run.state_bytes(), dtype=torch.float64, device=device)
    dist.all_reduce(held)
    passes, optimizer, whole = times.T.tolist()
    return {
        "variant": run.variant,
        "step_seconds": statistics.median(whole),
        "step_seconds_min_max": [min(whole), max(whole)],
        "forward_backward_seconds": statistics.median(passes),
        "optimizer_seconds": statistics.median(optimizer),
        "tokens_per_second": options.batch * options.seq * dist.get_world_size() / statistics.median(whole),
        "payload_bytes": run.traffic.payload,
        "wire_bytes_per_rank": int(run.traffic.wire),
        "optimizer_state_bytes_of_all_ranks": int(held),
    }


def report(options: argparse.Namespace, runs: list[Run], rows: list[dict], load_before: tuple, device) -> None:
    """Print the table; write the JSON."""
    base = next((row["step_seconds"] for row in rows if row["variant"] == "adamw"), None)
    table = Table(
        "variant", "step s", "fwd+bwd s", "optimizer s", "tokens/s", "wire MB/rank", "state MB, job", "x adamw"
    )
    for row in rows:
        row["ratio_to_adamw"] = row["step_seconds"] / base if base else None
        values = [row["step_seconds"], row["forward_backward_seconds"], row["optimizer_seconds"]]
        values += [row["tokens_per_second"], row["wire_bytes_per_rank"] / 1e6]
        values += [row["optimizer_state_bytes_of_all_ranks"] / 1e6, row["ratio_to_adamw"]]
        table.add_row(row["variant"], *(f"{value:.4g}" if value is not None else "-" for value in values))
    Console().print(table)
    if not options.json:
        return
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    result = {
        "settings": {**settings, "ranks": dist.get_world_size(), "threads_per_rank": torch.get_num_threads()},
        "elements": runs[0].elements,
        "muon_elements": next((run.muon_elements for run in runs if run.variant != "adamw"), None),
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
