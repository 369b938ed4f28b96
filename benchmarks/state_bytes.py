# SPDX-License-Identifier: Apache-2.0
"""Bytes of optimizer state: AdamW, Muon, and each variant of Muon, for whole models.

    python benchmarks/state_bytes.py --json benchmarks/results/state_bytes.json

Measured: the optimizer is built over the real model (random weights) and the storage of every state tensor is added
up. Counted: the same on the meta device, where shapes and dtypes exist and memory does not; only the place of rest
is not visible there. Weights and gradients are not in these numbers.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import hf_muon
from hf_muon.planning.model_source import build_meta_model, resolve_model

MODELS = {"SmolLM2-135M": "measured", "Qwen2.5-3B": "counted"}
# Variant -> (dtype of the weights, options).
VARIANTS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "muon": (torch.float32, {}),
    "momentum_dtype=bfloat16": (torch.float32, {"momentum_dtype": "bfloat16"}),
    "normuon=true": (torch.float32, {"normuon": True}),
    "offload=cpu": (torch.float32, {"offload": "cpu"}),
    "bfloat16 weights, stochastic_rounding=true": (torch.bfloat16, {"stochastic_rounding": "true"}),
    "bfloat16 weights and momentum, stochastic_rounding=true": (
        torch.bfloat16,
        {"stochastic_rounding": "true", "momentum_dtype": "bfloat16"},
    ),
}


def build_model(name: str, how: str, dtype: torch.dtype) -> torch.nn.Module:
    """Return the model of a built-in configuration, with random weights or on the meta device."""
    config = resolve_model(name).config
    if how == "counted":
        return build_meta_model(config).to(dtype)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config).to(dtype)


def state_bytes(optimizer: torch.optim.Optimizer) -> Counter[str]:
    """Return bytes of state tensors by what they are, storage for measured tensors, arithmetic for meta ones."""
    result: Counter[str] = Counter()
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            real = not value.is_meta
            result[key] += value.untyped_storage().nbytes() if real else value.numel() * value.element_size()
            result["parameters"] += key in ("momentum_buffer", "exp_avg") and param.numel()
    return result


def measure(name: str, how: str) -> dict[str, Any]:
    """Return the state of every variant on one model."""
    rows: dict[str, Any] = {}
    for label, (dtype, options) in VARIANTS.items():
        model = build_model(name, how, dtype)
        hf_muon.tag_parameters(model)
        optimizer = hf_muon.MuonWithAuxAdam(model.named_parameters(), lr=1e-3, **options)
        if label == "muon":
            muon = sum(p.numel() for g in optimizer.param_groups if g["use_muon"] for p in g["params"])
            total = sum(p.numel() for p in model.parameters())
            adamw = 8 * total + 4 * len(list(model.parameters()))
        counts = state_bytes(optimizer)
        assert counts.pop("parameters") == total
        size = sum(counts.values())
        on_cpu = counts["momentum_buffer"] if options.get("offload") == "cpu" else 0
        rows[label] = {"bytes": size, "of_adamw": size / adamw, "resting_on_cpu": on_cpu, "by_kind": dict(counts)}
        del model, optimizer
    return {"how": how, "elements": total, "muon_elements": muon, "adamw_bytes": adamw, "variants": rows}


def show(results: dict[str, Any]) -> None:
    """Print one table."""
    table = Table(title="Optimizer state, GiB (share of AdamW's)")
    table.add_column("variant")
    for name, found in results.items():
        table.add_column(f"{name} ({found['how']})", justify="right")
    table.add_row("AdamW, float32", *(f"{found['adamw_bytes'] / 2**30:.3f} (100 %)" for found in results.values()))
    for label in VARIANTS:
        cells = []
        for found in results.values():
            row = found["variants"][label]
            cell = f"{row['bytes'] / 2**30:.3f} ({row['of_adamw']:.0%})"
            if row["resting_on_cpu"]:
                here = row["bytes"] - row["resting_on_cpu"]
                cell += f", on the device {here / 2**30:.3f} ({here / found['adamw_bytes']:.0%})"
            cells.append(cell)
        table.add_row(label, *cells)
    Console().print(table)


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    results = {name: measure(name, how) for name, how in MODELS.items()}
    show(results)
    if arguments.json:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "models": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
