# SPDX-License-Identifier: Apache-2.0
"""The peer of the FSDP2 benchmark is Muon: its weights are those of dedicated owners; and the benchmark runs."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.models import whole_state
from tests.support.worker_pool import run_on_ranks

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SIZES = {"vocabulary": 61, "hidden": 42, "layers": 2, "dtype": "float32"}
# Of the movement. Sums are made in other orders, and batches hold other matrices; Newton-Schulz and AdamW enlarge the
# rounding of small numbers (measured: 2e-5). Another rule for any matrix would give 0.1 or more.
ROUNDING = 1e-3
STEPS = 3


def train_both(seed):
    """Return weights before and after the same steps with the gathering peer and with owners."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from fsdp2_step import Run
    finally:
        sys.path.remove(str(BENCHMARKS))
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    states = []
    for variant in ("muon gathered", "dmuon z3"):
        run = Run(variant, argparse.Namespace(**SIZES), torch.device("cpu"), mesh)
        start = whole_state(run.model)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(seed + step * 1009 + rank)
            run.step(torch.randint(SIZES["vocabulary"], (2, 17), generator=generator))
        assert len(run.rows) == len(run.cpu_rows) == STEPS
        states.append(whole_state(run.model))
    matrices = [name for name in start if "layers" in name and "norm" not in name]
    return start, *states, set(matrices)


def gap(start, expected, actual, names):
    """Return the norm of the difference relative to that of the movement."""
    moved = sum((expected[name] - start[name]).square().sum() for name in names)
    return (sum((expected[name] - actual[name]).square().sum() for name in names) / moved).sqrt().item()


@pytest.mark.parametrize("world_size", [2, 4])  # 42 rows: even for two ranks, padded for four
def test_the_gathering_peer_takes_the_same_steps(seed, world_size):
    for start, gathered, owned, matrices in run_on_ranks(world_size, train_both, seed):
        assert len(matrices) == 14

        for names in (matrices, start.keys() - matrices):
            assert gap(start, owned, gathered, names) <= ROUNDING


@pytest.mark.slow
def test_the_benchmark_writes_ratios_of_every_design(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "fsdp2_step.py"), "--hidden", "32", "--layers", "1", "--steps", "2"]
    command += ["--vocabulary", "64", "--seq", "8", "--tokens", "32", "--json", str(tmp_path / "out.json")]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["tokens_per_step"] == 32
    rows = {row["variant"]: row for row in document["rows"]}
    assert list(rows) == ["adamw z3", "muon gathered", "dmuon z3", "dmuon z2"]
    assert rows["adamw z3"]["ratio_to_adamw_z3"] == rows["muon gathered"]["gathered_optimizer_over_this"] == 1
    for row in rows.values():
        assert {len(values) for clock in row["every_step"].values() for values in clock.values()} == {2}
        assert min(row["ratio_to_adamw_z3"], row["optimizer_cpu_seconds"], row["wire_bytes_per_rank"]) > 0
    assert "gathered opt. x" in done.stdout
