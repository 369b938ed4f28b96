# SPDX-License-Identifier: Apache-2.0
"""Time whole optimizer steps on the shapes of SmolLM2-135M beside other Muon optimizers of the registry.

Peers: torch.optim.Muon with torch.optim.AdamW; DeepSpeed's MuonWithAuxAdam (its own gram form, compiled); and, where
they are installed, the packages muon-optimizer, pytorch-optimizer and timm
(`pip install --no-deps muon-optimizer pytorch-optimizer timm`; timm needs torchvision as well). All get the same
gradients, momentum 0.95 with nesterov, five steps with Keller's coefficients, and AdamW for embedding and norms.

Two tables from one run each, optimizers in turn, again and again: in float32, where every cast of a peer to bfloat16
or float16 becomes one to float32, so that the ratio is one of algorithms; and as shipped, on few layers, because most
peers iterate in those types, which a processor without instructions for them emulates. Beside the medians: the most
bytes that a step allocates beyond parameters, gradients and states, counted by operator.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_muon import MuonWithAuxAdam
from hf_muon.planning.allocations import AllocationCounter

WIDTH, INTERMEDIATE, KEY_VALUE, VOCABULARY, LAYERS = 576, 1536, 192, 49152, 30
LAYER = [(WIDTH, WIDTH)] * 2 + [(KEY_VALUE, WIDTH)] * 2 + [(INTERMEDIATE, WIDTH)] * 2 + [(WIDTH, INTERMEDIATE)]
OURS = "hf_muon"
Step = Callable[[], object]


class KeepFloat32(TorchFunctionMode):
    """Turns casts to bfloat16 and float16 into casts to float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, with float32 in place of the narrow types."""
        if func in (torch.Tensor.bfloat16, torch.Tensor.half):
            return args[0].float()
        swapped = {key: _wide(value) for key, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **swapped)


def _wide(value: Any) -> Any:
    narrow = isinstance(value, torch.dtype) and value in (torch.bfloat16, torch.float16)
    return torch.float32 if narrow else value


def parameters(layers: int) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the hidden matrices, and the tied embedding with the norms; all with a gradient."""
    torch.manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape) * 0.02) for _ in range(layers) for shape in LAYER]
    rest = [nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.02)]
    rest += [nn.Parameter(torch.ones(WIDTH)) for _ in range(2 * layers + 1)]
    for param in matrices + rest:
        param.grad = torch.randn_like(param) * 1e-3
    return matrices, rest


def our_step(matrices: list[nn.Parameter], rest: list[nn.Parameter]) -> Step:
    """Return the step of hf_muon."""
    groups = [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]
    return MuonWithAuxAdam(groups, lr=1e-3).step


def torch_step(matrices: list[nn.Parameter], rest: list[nn.Parameter]) -> Step:
    """Return the step of torch.optim.Muon and torch.optim.AdamW."""
    muon = torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=1e-3)
    return lambda: (muon.step(), adamw.step())


def deepspeed_step(matrices: list[nn.Parameter], rest: list[nn.Parameter]) -> Step:
    """Return the step of DeepSpeed's optimizer, outside of its engine."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam as DeepSpeedMuon

    aux = {"adam_optimizer": torch.optim.AdamW, "adam_optimizer_kwargs": {"lr": 1e-3}}
    groups = [
        {"params": matrices, "use_muon": True, "lr": 1e-3, "momentum": 0.95, "weight_decay": 0.0},
        {"params": rest, "use_muon": False, "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0},
    ]
    return DeepSpeedMuon(groups, **aux).step


def keller_step(matrices: list[nn.Parameter], rest: list[nn.Parameter]) -> Step:
    """Return the step of the package muon-optimizer."""
    from muon import SingleDeviceMuonWithAuxAdam

    groups = [
        {"params": matrices, "use_muon": True, "lr": 1e-3},
        {"params": rest, "use_muon": False, "lr": 1e-3},
    ]
    return SingleDeviceMuonWithAuxAdam(groups).step


def pytorch_optimizer_step(matrices: list[nn.Parameter], rest: list[nn.Parameter]) -> Step:
    """Return the step of the package pytorch-optimizer, in its gram form."""
    from pytorch_optimizer import Muon

    groups = [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]
    return Muon(groups, lr=1e-3, use_adjusted_lr=True, ns_method="gram_newton_schulz").step


def timm_step(matrices: list[nn.Parameter], rest: list[nn.Parameter]) -> Step:
    """Return the step of timm's optimizer."""
    from timm.optim import Muon

    groups = [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]
    return Muon(groups, lr=1e-3, nesterov=True, ns_coefficients="original").step


PEERS: dict[str, Callable[[list[nn.Parameter], list[nn.Parameter]], Step]] = {
    OURS: our_step,
    "torch.optim.Muon + AdamW": torch_step,
    "deepspeed": deepspeed_step,
    "muon-optimizer": keller_step,
    "pytorch-optimizer": pytorch_optimizer_step,
    "timm": timm_step,
}


@contextlib.contextmanager
def arithmetic(float32: bool) -> Iterator[None]:
    """Keep peers in float32, or leave them as shipped."""
    with KeepFloat32() if float32 else contextlib.nullcontext():
        yield


def measure(layers: int, repeats: int, float32: bool, names: list[str]) -> list[dict[str, object]]:
    """Time the steps in turn; the first turn warms up and does not count."""
    steps: dict[str, Step] = {}
    left_out: dict[str, str] = {}
    for name in names:
        try:
            steps[name] = PEERS[name](*parameters(layers))
        except ImportError as error:
            left_out[name] = str(error)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    peaks = dict[str, int]()
    for turn in range(repeats + 1):
        for name, step in steps.items():
            with arithmetic(float32):
                begin = time.perf_counter()
                step()
                if turn:
                    seconds[name].append(time.perf_counter() - begin)
    for name, step in steps.items():
        # A compiled step allocates inside of its graphs, where operators cannot be watched.
        if name != "deepspeed":
            with arithmetic(float32), AllocationCounter() as allocations:
                step()
            peaks[name] = allocations.peak
    rows: list[dict[str, object]] = []
    for name in names:
        if name in left_out:
            rows.append({"optimizer": name, "left_out": left_out[name]})
            continue
        ratios = [theirs / ours for theirs, ours in zip(seconds[name], seconds[OURS], strict=True)]
        row = {"optimizer": name, "seconds": seconds[name], "median_seconds": statistics.median(seconds[name])}
        row |= {"ratio_to_hf_muon": statistics.median(ratios), "temporary_bytes": peaks.get(name)}
        rows.append(row)
    return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print one table."""
    table = Table("optimizer", "median s", "ratio to hf_muon", "temporaries MB", title=title)
    for row in rows:
        if "left_out" in row:
            table.add_row(row["optimizer"], "-", row["left_out"], "-")
            continue
        peak = "-" if row["temporary_bytes"] is None else f"{row['temporary_bytes'] / 1e6:.1f}"
        table.add_row(row["optimizer"], f"{row['median_seconds']:.3f}", f"{row['ratio_to_hf_muon']:.2f}", peak)
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of the float32 table (default 30)")
    parser.add_argument("--shipped-layers", type=int, default=1, help="layers of the table as shipped (default 1)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    names = list(dict.fromkeys([OURS, *options.peers]))
    equal = 4 * 2 * options.layers * INTERMEDIATE * WIDTH
    result: dict[str, object] = {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load_average": os.getloadavg(),
        "largest_batch_of_equal_matrices_bytes": equal,
    }
    for key, layers, float32 in (("float32", options.layers, True), ("as_shipped", options.shipped_layers, False)):
        rows = measure(layers, options.repeats, float32, names)
        show(f"{key.replace('_', ' ')}, {layers} layers of SmolLM2-135M", rows)
        result[key] = {"layers": layers, "rows": rows}
    result["load_average_after"] = os.getloadavg()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
