# SPDX-License-Identifier: Apache-2.0
"""Time Newton-Schulz beside torch.optim.Muon's iteration and the matrix-product ceiling of the same dtype.

Columns, seconds per call, best of a few interleaved runs:
  auto           hf_muon.newton_schulz with its defaults (dtype and form chosen for the device and shape)
  standard fp32  the standard form in float32
  textbook fp32  the iteration of torch.optim.Muon in float32: the peer of the same dtype
  torch          torch.optim.Muon's own function, which always iterates in bfloat16
A cell that would take longer than --limit seconds is left out and says so; nothing is extrapolated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz as torch_iteration

from hf_muon.orthogonalize import COEFFICIENTS, newton_schulz, ns_flops, resolve_dtype, resolve_method

SHAPES = {
    "SmolLM2-135M": [(576, 576), (192, 576), (1536, 576), (576, 1536)],
    "Qwen2.5-3B": [(2048, 2048), (256, 2048), (11008, 2048), (2048, 11008)],
    "Llama-3-8B": [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)],
    "LoRA rank 16": [(16, 576), (576, 16), (16, 4096), (4096, 16)],
}
KELLER = COEFFICIENTS["keller"][0]
SHORT = 1.0  # seconds


def textbook(matrix: Tensor) -> Tensor:
    """Orthogonalize as torch.optim.Muon does, in the dtype of `matrix`."""
    a, b, c = KELLER
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def best_seconds(calls: dict[str, Callable[[], object]], budget: float) -> dict[str, float]:
    """Return the best time of each call: in turn, again and again until `budget` seconds are spent, twice at least.

    Short calls run three times in a row: the first one after another library's threads were at work is slow.
    """
    best = dict.fromkeys(calls, math.inf)
    start = time.perf_counter()
    for repeat in range(50):
        for name, call in calls.items():
            for _ in range(3):
                begin = time.perf_counter()
                call()
                seconds = time.perf_counter() - begin
                best[name] = min(best[name], seconds)
                if seconds > SHORT:
                    break
        spent = time.perf_counter() - start
        if spent > budget or (repeat >= 1 and spent * (repeat + 2) / (repeat + 1) > 2 * budget):
            break
    return best


def product_rate(dtype: torch.dtype, side: int) -> float:
    """Return FLOPs per second of a square product."""
    a = torch.randn(side, side).to(dtype)
    return 2 * side**3 / best_seconds({"product": lambda: a @ a}, 1.0)["product"]


def measure(m: int, n: int, limit: float, rates: dict[torch.dtype, float]) -> dict[str, object]:
    """Time one shape."""
    x = torch.randn(m, n)
    auto = resolve_dtype("auto", x.device, x.dtype)
    plain = ns_flops(m, n, method="standard", device_type="other")
    every = {
        "auto": (auto, lambda: newton_schulz(x)),
        "standard_fp32": (torch.float32, lambda: newton_schulz(x, method="standard", dtype="float32")),
        "textbook_fp32": (torch.float32, lambda: textbook(x)),
        "torch": (torch.bfloat16, lambda: torch_iteration(x, KELLER, 5, 1e-7)),
    }
    calls = {name: call for name, (dtype, call) in every.items() if plain / rates[dtype] <= limit}
    seconds = best_seconds(calls, min(limit, 2.0))
    row: dict[str, object] = {"shape": [m, n], "dtype": str(auto), "form": resolve_method("gram", m, n, 5), **seconds}
    row["left_out"] = [f"{name}: more than {limit:g} s expected" for name in every if name not in calls]
    if "auto" in seconds:
        row["share_of_ceiling"] = ns_flops(m, n) / seconds["auto"] / rates[auto]
        row["effective_share"] = plain / seconds["auto"] / rates[auto]
        for peer in ("textbook_fp32", "torch"):
            if peer in seconds:
                row[f"speedup_over_{peer}"] = seconds[peer] / seconds["auto"]
    return row


def geometric_mean(values: list[float]) -> float | None:
    """Return the geometric mean, None of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds a cell may take (default 60)")
    parser.add_argument("--quick", action="store_true", help="the same as --limit 1")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # On a processor without bfloat16 instructions a larger product would take minutes and run no faster.
    rates = {torch.float32: product_rate(torch.float32, 2048), torch.bfloat16: product_rate(torch.bfloat16, 256)}
    limit = 1.0 if options.quick else options.limit
    rows = [{"model": model, **measure(m, n, limit, rates)} for model in options.models for m, n in SHAPES[model]]
    names = ("auto", "standard_fp32", "textbook_fp32", "torch")
    names += ("speedup_over_textbook_fp32", "speedup_over_torch", "share_of_ceiling")
    table = Table("model", "shape", "form", *(name.replace("_", " ") for name in names))
    for row in rows:
        cells = (f"{row[name]:.4g}" if name in row else "-" for name in names)
        table.add_row(str(row["model"]), "x".join(map(str, row["shape"])), str(row["form"]), *cells)  # type: ignore[call-overload]
    Console(width=150).print(table)
    result = {"threads": options.threads, "load_average": os.getloadavg(), "torch": torch.__version__, "rows": rows}
    result["flops_per_second"] = {str(dtype): rate for dtype, rate in rates.items()}
    for peer in ("textbook_fp32", "torch"):
        key = f"speedup_over_{peer}"
        mean = geometric_mean([row[key] for row in rows if key in row])  # type: ignore[misc]
        result[f"geometric_mean_{key}"] = mean
        Console().print(f"geometric mean, {key.replace('_', ' ')}: {mean:.2f}" if mean else f"{key}: not measured")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
