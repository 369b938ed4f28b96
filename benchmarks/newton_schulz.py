# SPDX-License-Identifier: Apache-2.0
"""Time Newton-Schulz beside torch.optim.Muon's iteration and the matrix-product ceiling of the same dtype."""

from __future__ import annotations

import argparse
import json
import time

import torch
from rich.console import Console
from rich.table import Table
from torch.optim._muon import _zeropower_via_newtonschulz as torch_iteration

from hf_muon.orthogonalize import COEFFICIENTS, newton_schulz, ns_flops, resolve_dtype

SHAPES = {
    "smollm2-135m": [(576, 576), (192, 576), (1536, 576), (576, 1536)],
    "qwen2.5-3b": [(2048, 2048), (256, 2048), (11008, 2048), (2048, 11008)],
    "llama-3-8b": [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)],
    "lora-16": [(16, 576), (576, 16), (16, 4096), (4096, 16)],
}


def best_seconds(call, repeats=3):
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
        if sum(times) > 5:
            break
    return min(times)


def product_rate(dtype, side):
    a = torch.randn(side, side).to(dtype)
    return 2 * side**3 / best_seconds(lambda: a @ a)


def measure(m, n, limit, rates):
    x = torch.randn(m, n)
    auto = resolve_dtype("auto", x.device, x.dtype)
    row: dict = {"shape": [m, n], "auto_dtype": str(auto)}
    calls = {
        "auto": (auto, lambda: newton_schulz(x)),
        "standard_fp32": (torch.float32, lambda: newton_schulz(x, method="standard", dtype="float32")),
        "torch_bf16": (torch.bfloat16, lambda: torch_iteration(x, COEFFICIENTS["keller"][0], 5, 1e-7)),
    }
    plain = ns_flops(m, n, method="standard", device_type="other")
    for name, (dtype, call) in calls.items():
        if plain / rates[dtype] > limit:
            row[name] = None
            row.setdefault("skipped", []).append(f"{name}: estimated above {limit} s")
        else:
            row[name] = best_seconds(call)
    if row["auto"]:
        row["share_of_ceiling"] = ns_flops(m, n) / row["auto"] / rates[auto]
        row["speedup_over_torch"] = row["torch_bf16"] / row["auto"] if row["torch_bf16"] else None
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--quick", action="store_true", help="at most one second per cell")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    limit = 1.0 if options.quick else 15.0
    rates = {torch.float32: product_rate(torch.float32, 1024), torch.bfloat16: product_rate(torch.bfloat16, 256)}
    rows = [{"model": s, **measure(m, n, limit, rates)} for s in options.shapes for m, n in SHAPES[s]]
    names = ("auto", "standard_fp32", "torch_bf16", "speedup_over_torch", "share_of_ceiling")
    table = Table("model", "shape", *names)
    for row in rows:
        cells = (f"{row[k]:.4g}" if row.get(k) is not None else "-" for k in names)
        table.add_row(row["model"], str(row["shape"]), *cells)
    Console().print(table)
    if options.json:
        result = {"threads": options.threads, "torch": torch.__version__, "rows": rows}
        result["flops_per_second"] = {str(dtype): rate for dtype, rate in rates.items()}
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
