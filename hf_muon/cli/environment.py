# SPDX-License-Identifier: Apache-2.0
"""Versions and devices: for `hf-muon env`, and stored beside every result."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "peft", "trl", "deepspeed", "numpy")


def versions() -> dict[str, Any]:
    """Return the versions of this package, Python and the libraries that matter; absent ones are left out."""
    from .. import __version__

    found: dict[str, Any] = {"hf-muon": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def devices() -> list[dict[str, Any]]:
    """Return what can train here: each GPU, or the CPU with its usable cores."""
    import torch

    if torch.cuda.is_available():
        return [
            {
                "kind": "cuda",
                "name": torch.cuda.get_device_name(i),
                "memory_bytes": torch.cuda.get_device_properties(i).total_memory,
            }
            for i in range(torch.cuda.device_count())
        ]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [{"kind": "cpu", "name": _cpu_name(), "cores": cores, "threads": torch.get_num_threads()}]


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def provenance() -> dict[str, Any]:
    """Return versions and device of a run, as `results.json` stores them."""
    return {**versions(), "device": devices(), "platform": platform.platform()}
