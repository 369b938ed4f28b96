# SPDX-License-Identifier: Apache-2.0
"""The simulator of `hf-muon plan --simulate` against real gloo steps, with rates measured by the same processes.

    python benchmarks/simulate_step.py --json benchmarks/results/simulate_step.json

For each number of ranks the steps of `fsdp2_step.py` take turns with what they are made of: forward and backward of a
plain model, AdamW, Newton-Schulz of one shape, all ranks busy alike; collectives are measured before, by size. The
simulation puts the steps together from these. On a CPU communication runs on the cores that compute, so nothing
overlaps in it. Both the wall clock and the CPU seconds of the slowest rank are compared: the second says more on a
machine that others use.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import tempfile
import time
import warnings
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fsdp2_step import Model, Run
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

from hf_muon.distributed.rates import NS_STEPS, DeviceRates, ShapeSeconds, device_name
from hf_muon.orthogonalize import newton_schulz, resolve_method
from hf_muon.planning.calibration import KINDS, collective_line
from hf_muon.planning.census import take_census
from hf_muon.planning.designs import ADAMW_BYTES, Setting
from hf_muon.planning.devices import SimulatedDevice
from hf_muon.planning.network import MeasuredNetwork
from hf_muon.planning.simulation import simulate_step
from hf_muon.planning.workload import read_workload

DESIGNS = {"adamw z3": "adamw-fsdp2", "muon gathered": "naive", "dmuon z3": "dmuon-z3", "dmuon z2": "dmuon-z2"}
CPU = torch.device("cpu")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
BATCH = 4  # matrices orthogonalized together by the probe


def time_once(run) -> tuple[float, ...]:
    """Return the seconds of one call by each of the clocks, the ranks starting together. Collective."""
    dist.barrier()
    begin = [clock() for clock in CLOCKS.values()]
    run()
    return tuple(clock() - start for clock, start in zip(CLOCKS.values(), begin, strict=True))


def medians(times: list[tuple[float, ...]]) -> dict[str, float]:
    """Return the median by clock, each step as long as on its slowest rank, without the first two. Collective."""
    table = torch.tensor(times[2:], dtype=torch.float64)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return dict(zip(CLOCKS, table.median(0).values.tolist(), strict=True))


class Probe:
    """What the steps are made of, timed in turn with them: passes of a plain model, AdamW, Newton-Schulz by shape."""

    def __init__(self, options: argparse.Namespace) -> None:
        model = Model(options.vocabulary, options.hidden, options.layers)
        self.census = take_census(model)
        self.load = read_workload(model, None, self.census, micro_batch=options.batch, seq_len=options.seq)
        ids = torch.randint(options.vocabulary, (options.batch, options.seq + 1))
        optimizer = torch.optim.AdamW(model.parameters())
        self.runs: dict = {"passes": lambda: model(ids).backward(), "adamw": optimizer.step}
        for _, m, n in sorted({shape for parts in self.load.parts.values() for shape in parts}):
            matrices = torch.randn(BATCH, m, n)
            self.runs[m, n] = partial(newton_schulz, matrices)
        self.times: dict = {name: [] for name in self.runs}

    def turn(self) -> None:
        """Time everything once. Every rank is busy with the same meanwhile."""
        for name, run in self.runs.items():
            self.times[name].append(time_once(run))

    def device(self, clock: str) -> SimulatedDevice:
        """Return the rates of the slowest rank by one of the clocks. Collective."""
        found = {name: medians(times)[clock] for name, times in self.times.items()}
        rows = []
        for m, n in (name for name in found if not isinstance(name, str)):
            sides = sorted((m, n))
            rows.append(ShapeSeconds(*sides, resolve_method("gram", m, n, NS_STEPS), found[m, n] / BATCH))
        flops = 3 * sum(unit.forward_flops for unit in (self.load.root, *self.load.layers))
        elementwise = ADAMW_BYTES * (self.load.muon + self.load.rest) / found["adamw"]
        rates = DeviceRates(device_name(CPU), "cpu", "float32", flops / found["passes"], elementwise, tuple(rows))
        return SimulatedDevice(
            platform.machine(),
            product_flops=rates.product_flops,
            memory_bytes=rates.memory_bytes,
            intra_bytes=1.0,  # the measured network stands in for these
            inter_bytes=1.0,
            pass_share=1.0,
            device_type="cpu",
            overlaps=False,
            rates=rates,
        )


def measure(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Measure and simulate on this rank; rank 0 writes what it found."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # newer names of collectives that older torch lacks
    logging.getLogger("hf_muon").setLevel(logging.ERROR)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    store = dist.FileStore(os.path.join(folder, "store"), options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    try:
        load_before = os.getloadavg()
        probe = Probe(options)
        lines = {
            name: {kind: collective_line(kind, CPU, 2.0, clock) for kind in KINDS} for name, clock in CLOCKS.items()
        }
        steps = real_steps(options, probe)
        owners = probe.census.owners(shard=options.ranks)
        rows, rates = [], {}
        for clock in CLOCKS:
            device = probe.device(clock)
            rates[clock] = device.rates.to_dict() if device.rates else None
            network = MeasuredNetwork(lines[clock])
            setting = Setting(probe.load, device, network, compute_bytes=4, reduce_bytes=4, checkpointing=False)
            base = simulate_step(DESIGNS["adamw z3"], setting, owners).step_seconds
            for variant, seconds in steps.items():
                found = simulate_step(DESIGNS[variant], setting, owners)
                found = replace(found, overhead=found.step_seconds / base - 1)
                measured = {"step_seconds": seconds[clock], "overhead": seconds[clock] / steps["adamw z3"][clock] - 1}
                error = found.step_seconds / seconds[clock] - 1
                row = {"ranks": options.ranks, "clock": clock, "variant": variant, "error": error}
                rows.append({**row, "measured": measured, "simulated": found.to_dict()})
        if rank == 0:
            result = {"rows": rows, "rates": rates, "collectives_seconds_and_seconds_per_byte": lines}
            result |= {"load_average_before": load_before, "load_average_after": os.getloadavg()}
            with open(os.path.join(folder, "result.json"), "w") as file:
                json.dump(result, file)
    finally:
        dist.destroy_process_group()


def real_steps(options: argparse.Namespace, probe: Probe) -> dict[str, dict[str, float]]:
    """Return the measured seconds of each variant by clock; the variants and the probe take turns. Collective."""
    mesh = init_device_mesh("cpu", (options.ranks,))
    generator = torch.Generator().manual_seed(dist.get_rank())
    runs = [Run(variant, options, CPU, mesh) for variant in DESIGNS]
    times: dict = {run.variant: [] for run in runs}
    for _ in range(options.steps + 2):
        ids = torch.randint(options.vocabulary, (options.batch, options.seq + 1), generator=generator)
        probe.turn()
        for run in runs:
            times[run.variant].append(time_once(partial(run.step, ids)))
    return {variant: medians(found) for variant, found in times.items()}


def report(options: argparse.Namespace, found: list[dict]) -> None:
    """Print the table; write the JSON."""
    names = ("measured ms", "simulated ms", "error", "over adamw, measured", "simulated")
    table = Table("ranks", "clock", "variant", *names)
    for row in (row for result in found for row in result["rows"]):
        measured, simulated = (f"{1e3 * row[key]['step_seconds']:.1f}" for key in ("measured", "simulated"))
        overheads = (f"{row[key]['overhead']:+.1%}" for key in ("measured", "simulated"))
        first = (str(row["ranks"]), row["clock"], row["variant"])
        table.add_row(*first, measured, simulated, f"{row['error']:+.1%}", *overheads)
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
