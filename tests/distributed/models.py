# SPDX-License-Identifier: Apache-2.0
"""Tiny models with awkward sizes, a one-process reference, and a plain Muon step for tests of the runtime.

The step here is written out on whole matrices so that these tests depend on the runtime alone, not on the optimizer.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from hf_muon.distributed import dedicate_params
from hf_muon.param_groups import MatrixView

VOCAB, HIDDEN, INTER = 131, 60, 77  # divisible by no rank count above 2; INTER by none


class Block(nn.Module):
    """Gated MLP with a small extra matrix that has fewer rows than ranks."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate = nn.Linear(HIDDEN, INTER)
        self.up = nn.Linear(HIDDEN, INTER, bias=False)
        self.down = nn.Linear(INTER, HIDDEN, bias=False)
        self.few_rows = nn.Linear(HIDDEN, 3, bias=False)
        self.widen = nn.Linear(3, HIDDEN, bias=False)

    def forward(self, x):
        h = self.norm(x)
        h = self.down(torch.tanh(self.gate(h)) * self.up(h))
        return x + h + self.widen(self.few_rows(x))


class MoeBlock(nn.Module):
    """Experts in 3-D parameters, mixed by a softmax, as Mixtral (fused gate and up) and GPT-OSS (in, out) store them.

    The two stacks differ in number, so that both an odd one and one of fewer experts than ranks can be split.
    """

    def __init__(self, first=5, second=3):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.router = nn.Linear(HIDDEN, first, bias=False)
        self.gate_up = nn.Parameter(torch.randn(first, 34, HIDDEN) / 8)
        self.down = nn.Parameter(torch.randn(second, 17, HIDDEN) / 8)
        self.gate_up.muon_view = MatrixView(parts=(17, 17))
        self.down.muon_view = MatrixView(transposed=True)

    def forward(self, x):
        h = self.norm(x)
        weight = torch.softmax(self.router(h), -1)
        gate, up = torch.einsum("bth,eih->beti", h, self.gate_up).chunk(2, -1)
        mixed = torch.einsum("beti,bte->bti", torch.tanh(gate) * up, weight)
        return x + torch.einsum("bti,eih->bth", mixed, torch.tanh(self.down))


class TinyModel(nn.Module):
    def __init__(self, layers=3, ckpt=None, block=Block):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.ckpt = ckpt

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x) if self.ckpt is None else checkpoint(layer, x, use_reentrant=self.ckpt == "reentrant")
        return self.head(x)


def is_matrix(name, parameter):
    """Hidden matrices: what the router of parameters would tag."""
    return parameter.ndim in (2, 3) and name.startswith("layers.")


def make_model(seed, **options):
    torch.manual_seed(seed)
    return TinyModel(**options)


def batch(seed, rank, step, rows=2, length=5):
    generator = torch.Generator().manual_seed(seed * 1000003 + step * 1009 + rank)
    return torch.randint(0, VOCAB, (rows, length + 1), generator=generator)


def loss_of(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def shard(model, *, mesh=None, mesh_shape=None, reshard_after_forward=True, predicate=is_matrix, mp=None, **options):
    """Dedicate the hidden matrices and wrap every layer and the root with FSDP2."""
    world = dist.get_world_size()
    shape = mesh_shape or (world,)
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    mesh = mesh or init_device_mesh("cpu", shape, mesh_dim_names=names)
    extra = {} if mp is None else {"mp_policy": mp}
    with dedicate_params(model, mesh, reshard_after_forward=reshard_after_forward, predicate=predicate, **options):
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward, **extra)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward, **extra)
    return model


def orthogonalize(matrix):
    """Quintic Newton-Schulz, counted, for the tests' own step."""
    orthogonalize.calls.append(tuple(matrix.shape))
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (torch.linalg.matrix_norm(matrix, keepdim=True) + 1e-12)
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = x.mT if tall else x
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


orthogonalize.calls = []


class Stepper(torch.optim.Optimizer):
    """Muon on matrices, plain momentum SGD on the rest; runs on owners only."""

    def __init__(self, model, lr=0.02):
        named = list(model.named_parameters())
        super().__init__([p for _, p in named], {"lr": lr})
        self.matrices = {id(p) for n, p in named if is_matrix(n, p)}

    @torch.no_grad()
    def step(self, closure=None):
        lr = self.param_groups[0]["lr"]
        for p in self.param_groups[0]["params"]:
            if p.grad is None or not getattr(p, "has_gradient", True):
                continue
            weight, grad = (p.to_local(), p.grad.to_local()) if hasattr(p, "to_local") else (p, p.grad)
            if grad.numel() == 0:
                continue
            state = self.state[p]
            buffer = state.setdefault("momentum_buffer", torch.zeros_like(grad))
            buffer.lerp_(grad, 0.05)
            if id(p) not in self.matrices:
                weight.add_(buffer, alpha=-lr)
            else:
                update = orthogonalize(grad.lerp(buffer, 0.95))
                weight.mul_(1 - lr * 0.1).add_(update, alpha=-lr)


def whole_state(model):
    """Every parameter as a whole plain tensor. Collective."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def reference(seed, world, steps, *, micro_batches=1, lr=0.02, order=None, sum_dtype=torch.float32, **options):
    """Train in one process on the ranks' batches; add per-rank gradients in a stated order, then average.

    Args:
        order: rows of ranks; each row is summed from the left, then the rows (HSDP). None: 0, 1, 2, ...
    """
    model = make_model(seed, **options)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Stepper(model, lr)
    norms = []
    for step in range(steps):
        gradients = []
        for rank in range(world):
            model.zero_grad()
            for micro in range(micro_batches):
                (loss_of(model, batch(seed, rank, step * micro_batches + micro)) / micro_batches).backward()
            gradients.append({n: p.grad.to(sum_dtype) for n, p in model.named_parameters() if p.grad is not None})
        for name, p in model.named_parameters():
            rows = [[gradients[rank][name] for rank in row] for row in order or [range(world)]]
            sums = [functools.reduce(torch.add, row) for row in rows]
            p.grad = (functools.reduce(torch.add, sums) / world).to(p.dtype)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
        optimizer.step()
    return start, {name: p.detach().clone() for name, p in model.named_parameters()}, norms


def train(model, seed, steps, *, micro_batches=1, lr=0.02, sync_each=True):
    rank = dist.get_rank()
    optimizer = Stepper(model, lr)
    norms = []
    for step in range(steps):
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            model.set_requires_gradient_sync(sync_each or last)
            (loss_of(model, batch(seed, rank, step * micro_batches + micro)) / micro_batches).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
        optimizer.step()
        model.zero_grad()
    return norms


def distance(start, reference_end, end):
    """Return the largest weight difference relative to the largest movement, over all parameters."""
    moved = max((reference_end[n] - start[n]).abs().max().item() for n in start)
    return max((reference_end[n] - end[n]).abs().max().item() for n in start) / moved
