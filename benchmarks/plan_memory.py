# SPDX-License-Identifier: Apache-2.0
"""The planner's peak memory beside the run of the real code on fake tensors; one JSON document.

python benchmarks/plan_memory.py [MODEL] [--world-size 8] [--micro-batch 4] [--seq-len 2048] > FILE
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
import transformers

import hf_muon
from hf_muon.planning.prediction import predict_peak

RUNS = (("adamw", "z3"), ("muon", "z3"), ("muon", "z2"))


def main() -> None:
    """Run every optimizer and mode, with checkpointing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="Qwen2.5-3B")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=2048)
    options = parser.parse_args()
    batch = {"micro_batch": options.micro_batch, "seq_len": options.seq_len}
    plan = hf_muon.plan(options.model, world_size=options.world_size, **batch)
    rows = []
    for optimizer, mode in RUNS:
        layout = "fsdp2" if optimizer == "adamw" else f"dmuon-{mode}"
        formula = next(row for row in plan.memory if (row.layout, row.optimizer) == (layout, optimizer))
        start = time.perf_counter()
        run = predict_peak(options.model, options.world_size, **batch, optimizer=optimizer, mode=mode)
        row = {"layout": layout, "formula_bytes": formula.peak, "run_bytes": run["peak_bytes"]}
        row |= {"formula_over_run": formula.peak / run["peak_bytes"], "run": run, "formula": formula.to_dict()}
        rows.append(row | {"seconds": round(time.perf_counter() - start, 1)})
        print(f"{layout}: {formula.peak / 2**30:.3f} GiB, run {run['peak_bytes'] / 2**30:.3f} GiB", file=sys.stderr)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"model": options.model, "rows": rows, "versions": versions}, indent=1))


if __name__ == "__main__":
    main()
