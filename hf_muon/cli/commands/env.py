# SPDX-License-Identifier: Apache-2.0
"""`hf-muon env`: versions, devices, back ends, and which kernels are used and why."""

from __future__ import annotations

from typing import Any

from ..console import print_json, results
from ..environment import devices, versions
from .options import Debug, Json


def env(json: Json = False, debug: Debug = False) -> None:
    """Show versions, devices, back ends, and which kernels are used and why."""
    document = describe_environment()
    if json:
        print_json(document)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, version in document["versions"].items():
        table.add_row(name, version)
    for device in document["devices"]:
        table.add_row(
            device["kind"],
            ", ".join(
                f"{value}" if key == "name" else f"{key} {value}" for key, value in device.items() if key != "kind"
            ),
        )
    for name, value in document["backends"].items():
        table.add_row(name, "yes" if value is True else "no" if value is False else str(value))
    for name, choice in document["kernels"].items():
        table.add_row(name, f"{choice['used']}: {choice['why']}")
    results.print(table)


def describe_environment() -> dict[str, Any]:
    """Return the document of `hf-muon env --json`."""
    import torch

    from ...orthogonalize import resolve_dtype

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    distributed = torch.distributed.is_available()
    return {
        "versions": versions(),
        "devices": devices(),
        "backends": {
            "optim=dmuon registered": _registered(),
            "gloo": distributed and torch.distributed.is_gloo_available(),
            "nccl": distributed and torch.distributed.is_nccl_available(),
        },
        "kernels": {
            "newton-schulz": {"used": "torch", "why": "this version has no kernels of its own; products go to torch"},
            "newton-schulz dtype": {
                "used": str(resolve_dtype("auto", device, torch.float32)).removeprefix("torch."),
                "why": f"what ns_dtype=auto chooses for float32 gradients on {device.type}",
            },
            "adamw half": {
                "used": "fused" if cuda else "foreach",
                "why": "fused_adam=auto: fused where the device has it, else torch's default",
            },
        },
    }


def _registered() -> bool:
    from transformers.training_args import OptimizerNames

    try:
        OptimizerNames("dmuon")
    except ValueError:
        return False
    return True
