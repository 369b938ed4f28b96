# SPDX-License-Identifier: Apache-2.0
"""The simulator of `hf-muon plan --simulate` against real gloo steps, with rates measured by the same processes.

    python benchmarks/simulate_step.py --json benchmarks/results/simulate_step.json

For each number of ranks: measure products, AdamW, Newton-Schulz and collectives while all ranks run; then the steps of
`fsdp2_step.py`; then simulate the same steps from the rates. On a CPU communication runs on the cores that compute, so
nothing overlaps in the simulation. The forward and backward of an unsharded model give the rate of the passes; every
other term is put together from rates that know nothing of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import warnings
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fsdp2_step import Model, Run, summary
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

from hf_muon.planning.calibration import KINDS, calibrate, collective_line, timed
from hf_muon.planning.census import take_census
from hf_muon.planning.designs import ADAMW_BYTES, Setting
from hf_muon.planning.devices import SimulatedDevice
from hf_muon.planning.network import MeasuredNetwork
from hf_muon.planning.simulation import simulate_step
from hf_muon.planning.workload import read_workload

DESIGNS = {"adamw z3": "adamw-fsdp2", "muon gathered": "naive", "dmuon z3": "dmuon-z3", "dmuon z2": "dmuon-z2"}
CPU = torch.device("cpu")


def slowest(seconds: float) -> float:
    """Return the largest of all ranks' values. Collective."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def measure_rates(options: argparse.Namespace) -> tuple[SimulatedDevice, MeasuredNetwork]:
    """Measure what the simulation needs, on all ranks at once. Collective."""
    rates = calibrate(CPU, seconds=options.rate_seconds)
    shared = [rates.to_dict()]
    dist.broadcast_object_list(shared)  # the clocks of ranks differ: all simulate with rank 0's
    network = MeasuredNetwork({kind: collective_line(kind, CPU, 2.0) for kind in KINDS})
    model = Model(options.vocabulary, options.hidden, options.layers)
    load = read_workload(model, None, take_census(model), micro_batch=options.batch, seq_len=options.seq)
    ids = torch.randint(options.vocabulary, (options.batch, options.seq + 1))
    optimizer = torch.optim.AdamW(model.parameters())
    dist.barrier()
    passes = slowest(timed(lambda: model(ids).backward(), CPU, options.rate_seconds / 4))
    adamw = slowest(timed(optimizer.step, CPU, options.rate_seconds / 8))
    flops = 3 * sum(unit.forward_flops for unit in (load.root, *load.layers))
    device = SimulatedDevice(
        platform.machine(),
        product_flops=rates.product_flops,
        memory_bytes=ADAMW_BYTES * (load.muon + load.rest) / adamw,
        intra_bytes=1.0,  # the measured network stands in for these
        inter_bytes=1.0,
        pass_share=flops / passes / rates.product_flops,
        device_type="cpu",
        overlaps=False,
        rates=rates,
    )
    return device, network


def measure(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Measure and simulate on this rank; rank 0 writes what it found."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # newer names of collectives that older torch lacks
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    store = dist.FileStore(os.path.join(folder, "store"), options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    try:
        load_before = os.getloadavg()
        device, network = measure_rates(options)
        steps = real_steps(options)
        model = Model(options.vocabulary, options.hidden, options.layers)
        census = take_census(model)
        load = read_workload(model, None, census, micro_batch=options.batch, seq_len=options.seq)
        setting = Setting(load, device, network, compute_bytes=4, reduce_bytes=4, checkpointing=False)
        owners = census.owners(shard=options.ranks)
        rows = []
        for variant, seconds in steps.items():
            found = simulate_step(DESIGNS[variant], setting, owners)
            error = found.step_seconds / seconds["step_seconds"] - 1
            rows.append({"ranks": options.ranks, "variant": variant, "error": error, "measured": seconds})
            rows[-1]["simulated"] = replace(found, overhead=0.0).to_dict()
        if rank == 0:
            base = {
                key: next(r[key]["step_seconds"] for r in rows if r["variant"] == "adamw z3")
                for key in ("measured", "simulated")
            }
            for row in rows:
                for key, seconds in base.items():
                    row[f"{key}_over_adamw"] = row[key]["step_seconds"] / seconds
            found = {"rows": rows, "device": device.to_dict(), "network": dict(network.lines)}
            found |= {"rates": device.rates.to_dict() if device.rates else None}
            found |= {"load_average_before": load_before, "load_average_after": os.getloadavg()}
            with open(os.path.join(folder, "result.json"), "w") as file:
                json.dump(found, file)
    finally:
        dist.destroy_process_group()


def real_steps(options: argparse.Namespace) -> dict[str, dict]:
    """Return the measured seconds of each variant; the variants take turns. Collective."""
    mesh = init_device_mesh("cpu", (options.ranks,))
    generator = torch.Generator().manual_seed(dist.get_rank())
    runs = [Run(variant, options, CPU, mesh) for variant in DESIGNS]
    for _ in range(options.steps + 2):
        ids = torch.randint(options.vocabulary, (options.batch, options.seq + 1), generator=generator)
        for run in runs:
            dist.barrier()
            run.step(ids)
    keys = ("step_seconds", "step_seconds_min_max", "forward_backward_seconds", "optimizer_seconds")
    return {run.variant: {key: summary(run, options, CPU, {})[key] for key in keys} for run in runs}


def report(options: argparse.Namespace, found: list[dict]) -> None:
    """Print the table; write the JSON."""
    table = Table("ranks", "variant", "measured ms", "simulated ms", "error", "x adamw measured", "x adamw simulated")
    for row in (row for result in found for row in result["rows"]):
        measured, simulated = (1e3 * row[key]["step_seconds"] for key in ("measured", "simulated"))
        ratios = (f"{row[f'{key}_over_adamw']:.3f}" for key in ("measured", "simulated"))
        table.add_row(
            str(row["ranks"]), row["variant"], f"{measured:.1f}", f"{simulated:.1f}", f"{row['error']:+.1%}", *ratios
        )
    Console().print(table)
    if options.json:
        machine = {"cpus": os.cpu_count(), "processor": platform.machine(), "torch": torch.__version__}
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        with open(options.json, "w") as file:
            json.dump({"settings": settings, "machine": machine, "results": found}, file, indent=1)
            file.write("\n")


def main() -> None:
    """Parse options; start the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rate-seconds", type=float, default=12.0, help="time for the rates, about half of the whole")
    parser.add_argument("--note", default="", help="what else the machine was doing, for the JSON")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    options.dtype = "float32"
    found = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (argparse.Namespace(**{**vars(options), "ranks": ranks}), folder), nprocs=ranks)
            with open(os.path.join(folder, "result.json")) as file:
                found.append(json.load(file))
    report(options, found)


if __name__ == "__main__":
    main()
