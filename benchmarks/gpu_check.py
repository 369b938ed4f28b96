# SPDX-License-Identifier: Apache-2.0
"""Check the runtime on one GPU: world size 1 on NCCL, with streams. One command, a table, exit status 1 on a failure.

    python benchmarks/gpu_check.py --json gpu_check.json
    python benchmarks/gpu_check.py --dry-run               # the same on CPU and gloo; skips what needs a device

With one rank nothing travels between ranks: hf-muon sends nothing then. What runs is the side stream, the packed
buffers, the hooks and the optimizer without waiting for the device; then every variant of the numbers, owned against
plain. Two ranks need `fsdp2_step.py` on two GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist
from fsdp2_step import Model
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import hf_muon
from hf_muon.distributed import runtime_of
from hf_muon.integrations.transformers.attention_logits import attach_qk_clip

OPTIONS = {"lr": 0.01, "ns_dtype": "float32", "eps": 1e-6}
Weights = dict[str, torch.Tensor]
# Variant, and how far owned may be from plain, of the movement. A rounding of bfloat16 momentum may fall on the other
# neighbour where a gradient differs in its last bit; the backward of attention may add in any order on a GPU.
VARIANTS = (
    ({"momentum_dtype": "bfloat16"}, 2e-3),
    ({"normuon": True}, 1e-5),
    ({"offload": "cpu"}, 2e-6),
    ({"offload": "cpu", "momentum_dtype": "bfloat16", "normuon": True}, 2e-3),
    ({"matrix_split": "per_head"}, 1e-3),
    ({"qk_clip": 20.0}, 1e-3),
    ({"qk_clip": 20.0, "qk_clip_exact": True}, 1e-3),
)


class Llama(torch.nn.Module):
    """A small Llama whose logits explode, called like `Model`."""

    def __init__(self, vocabulary: int, hidden: int, layers: int) -> None:
        super().__init__()
        sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": 2 * hidden}
        config = LlamaConfig(**sizes, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2)
        self.inner = LlamaForCausalLM(config)
        self.layers = self.inner.model.layers
        with torch.no_grad():
            for layer in self.layers:
                layer.self_attn.q_proj.weight.mul_(60.0)
                layer.self_attn.k_proj.weight.mul_(60.0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return self.inner(input_ids=ids, labels=ids).loss


def make(
    options: argparse.Namespace, device: torch.device, mode: str, variant: dict
) -> tuple[torch.nn.Module, hf_muon.MuonWithAuxAdam]:
    """Return the same model every time; `mode` is plain, z2 or z3."""
    torch.manual_seed(0)
    kind = Llama if {"matrix_split", "qk_clip"} & set(variant) else Model
    model = kind(options.vocabulary, options.hidden, options.layers).to(device)
    hf_muon.tag_parameters(model, matrix_split=variant.get("matrix_split", "fused"))
    if mode != "plain":
        mesh = init_device_mesh(device.type, (1,))
        with hf_muon.dedicate_params(model, mesh, reshard_after_forward=mode == "z3"):
            for layer in model.layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=mode == "z3")
            fully_shard(model, mesh=mesh, reshard_after_forward=mode == "z3")
    optimizer = hf_muon.MuonWithAuxAdam(model.named_parameters(), **OPTIONS, **variant)
    if "qk_clip" in variant:
        attach_qk_clip(model, optimizer)
    return model, optimizer


def batches(options: argparse.Namespace, device: torch.device) -> list[torch.Tensor]:
    """Return the same batches every time, on the device."""
    generator = torch.Generator().manual_seed(1)
    shape = (options.batch, options.seq + 1)
    return [torch.randint(options.vocabulary, shape, generator=generator).to(device) for _ in range(options.steps)]


@contextlib.contextmanager
def no_host_sync(device: torch.device) -> Iterator[None]:
    """Raise wherever the host would wait for the device."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def train(options: argparse.Namespace, device: torch.device, mode: str, **variant: object) -> dict:
    """Train; return weights and movement on the CPU, memory, and the message of a host synchronization if any."""
    is_cuda = device.type == "cuda"
    model, optimizer = make(options, device, mode, variant)
    watched = not variant  # some of them ask the host
    start = {name: whole(p) for name, p in model.named_parameters()}
    data = batches(options, device)
    error = None
    for index, ids in enumerate(data):
        if index == 1 and is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        try:
            with no_host_sync(device) if watched and index >= 2 and error is None else contextlib.nullcontext():
                model(ids).backward()
                optimizer.step()
                optimizer.zero_grad()
        except RuntimeError as problem:
            if "synchroniz" not in str(problem):
                raise
            error = str(problem)  # this step is lost: numerics below are then not compared
            break
    result = {"sync_error": error, "start": start, "end": {name: whole(p) for name, p in model.named_parameters()}}
    if mode != "plain":
        result["gathered_bytes"] = runtime_of(model).num_gathered_bytes
        result["muon_bytes"] = sum(p.to_local().nbytes for p in runtime_of(model).parameters)
    if is_cuda:
        result["rest_bytes"], result["peak_bytes"] = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    return result


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of the whole parameter on the CPU."""
    tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return tensor.detach().to("cpu", copy=True)


def distance(start: Weights, a: Weights, b: Weights) -> float:
    """Return the largest difference relative to the largest movement."""
    moved = max((a[name] - start[name]).abs().max().item() for name in a)
    return max((a[name] - b[name]).abs().max().item() for name in a) / moved


def check(options: argparse.Namespace, device: torch.device) -> list[dict]:
    """Run everything; return rows of (what, value, limit, verdict)."""
    on_cpu = train(options, torch.device("cpu"), "plain")
    plain, z3, z2 = (train(options, device, mode) for mode in ("plain", "z3", "z2"))
    rows: list[dict] = []

    def row(what: str, value: object, limit: object = None, passed: bool | None = None) -> None:
        rows.append({"what": what, "value": value, "limit": limit, "passed": passed})

    gap = distance(plain["start"], plain["end"], z3["end"])
    row("Z3 against the plain model on this device, of the movement", gap, 2e-6, gap <= 2e-6)
    same = all(torch.equal(z3["end"][name], z2["end"][name]) for name in z3["end"])
    row("Z2 and Z3 give the same bits", same, True, same)
    gap = distance(on_cpu["start"], on_cpu["end"], z3["end"])
    # Other kernels round otherwise; Newton-Schulz and AdamW make single elements of that visible.
    row("Z3 against the CPU in one process, of the movement", gap, options.cpu_limit, gap <= options.cpu_limit)
    for name, run in (("plain", plain), ("Z3", z3), ("Z2", z2)):
        if device.type == "cuda":
            row(f"{name}: no host synchronization from the third step", run["sync_error"], None, not run["sync_error"])
            row(f"{name}: bytes allocated at rest", run["rest_bytes"])
            row(f"{name}: peak bytes", run["peak_bytes"])
        else:
            row(f"{name}: no host synchronization, memory", "needs a GPU")
    for variant, limit in VARIANTS:
        name = ",".join(f"{key}={value}" for key, value in variant.items())
        one, owned = (train(options, device, mode, **variant) for mode in ("plain", "z3"))
        gap = distance(one["start"], one["end"], owned["end"])
        row(f"{name}: Z3 against the plain model, of the movement", gap, limit, gap <= limit)
        if variant == {"offload": "cpu"}:
            same = all(torch.equal(owned["end"][key], z3["end"][key]) for key in z3["end"])
            row("offload=cpu gives the same bits as momentum on the device", same, True, same)
    for name, run in (("Z3", z3), ("Z2", z2)):
        row(f"{name}: bytes gathered after a step", run["gathered_bytes"], 0, run["gathered_bytes"] == 0)
        row(f"{name}: bytes of owned weights", run["muon_bytes"])
    return rows


def main() -> None:
    """Parse options, run, print and write; exit with 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="CPU and gloo, tiny sizes")
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--vocabulary", type=int, default=1031)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="at least three")
    parser.add_argument("--cpu-limit", type=float, default=1e-2, help="of the movement, against the CPU")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    options.hidden = options.hidden or (64 if options.dry_run else 512)
    options.layers = options.layers or (2 if options.dry_run else 4)
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("needs a CUDA device; got none. Try --dry-run.")
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cpu") if options.dry_run else torch.device("cuda", 0)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        backend = "gloo" if options.dry_run else "nccl"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            rows = check(options, device)
        finally:
            dist.destroy_process_group()
    table = Table("check", "value", "limit", "passed")
    for row in rows:
        table.add_row(
            row["what"], *("" if row[key] is None else str(row[key]) for key in ("value", "limit", "passed"))
        )
    Console().print(table)
    if options.json:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        with open(options.json, "w") as file:
            json.dump({"device": name, "torch": torch.__version__, "rows": rows}, file, indent=1)
            file.write("\n")
    sys.exit(any(row["passed"] is False for row in rows))


if __name__ == "__main__":
    main()
