# SPDX-License-Identifier: Apache-2.0
"""Bytes of optimizer state: AdamW, Muon, and each variant of Muon, for whole models.

    python benchmarks/state_bytes.py --json benchmarks/results/state_bytes.json

Counted: the plan's numbers (`hf_muon.planning.variants`), from state made on the meta device. Measured: the optimizer
is built over the real model (random weights), the storage of every state tensor is added up and must equal the count.
Weights and gradients are not in these numbers.
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
from hf_muon.param_groups import explain_parameters
from hf_muon.planning.model_source import build_meta_model, resolve_model
from hf_muon.planning.variants import MOMENTUM, VARIANTS, Variant, adamw_state, count_state

MODELS = {"SmolLM2-135M": "measured", "Qwen2.5-3B": "counted"}


def measured_state(name: str, variant: Variant) -> Counter[str]:
    """Return the storage of every state tensor of an optimizer over the real model with random weights, by key."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(resolve_model(name).config).to(variant.weights)
    hf_muon.tag_parameters(model)
    optimizer = hf_muon.MuonWithAuxAdam(model.named_parameters(), lr=1e-3, **variant.options)
    result: Counter[str] = Counter()
    for state in optimizer.state.values():
        for key, value in state.items():
            result[key] += value.untyped_storage().nbytes()
    return result


def measure(name: str, how: str) -> dict[str, Any]:
    """Return the state of every variant on one model.

    Raises:
        RuntimeError: what is measured differs from what the plan counts.
    """
    rows = explain_parameters(build_meta_model(resolve_model(name).config))
    adamw, found = sum(adamw_state(rows).values()), {}
    for label, variant in VARIANTS.items():
        counts = count_state(rows, variant)
        if how == "measured" and (real := measured_state(name, variant)) != counts:
            raise RuntimeError(f"{name}, {label}: the plan counts {dict(counts)}; allocated are {dict(real)}.")
        size = sum(counts.values())
        on_cpu = sum(counts[key] for key in MOMENTUM) if variant.spec.offload else 0
        by_kind = {key: count for key, count in counts.items() if count}
        found[label] = {"bytes": size, "of_adamw": size / adamw, "resting_on_cpu": on_cpu, "by_kind": by_kind}
    muon = sum(row.count for row in rows if row.is_muon)
    elements = sum(row.count for row in rows)
    return {"how": how, "elements": elements, "muon_elements": muon, "adamw_bytes": adamw, "variants": found}


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
