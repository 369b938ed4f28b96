# SPDX-License-Identifier: Apache-2.0
"""Fused projections, attention heads and experts of transformers on 2 ranks against one process."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hf_muon
from hf_muon.param_groups import build_param_groups, explain_parameters
from hf_muon.param_groups.tagging import apply_tags
from tests.distributed import models
from tests.support.tiny_models import tiny_model
from tests.support.worker_pool import run_on_ranks

STEPS = 4
TIGHT = 2e-6  # of the largest movement; sums of two gradients have one order
OPTIONS = {"ns_dtype": "float32", "fused_adam": "false"}
# eps: with 1e-10 an element whose gradient cancels to nothing turns its rounding into a whole step of AdamW
GROUPS = {"muon": {"lr": 0.01, "weight_decay": 0.1}, "adamw": {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6}}
MANY = {"num_experts": 12, "num_local_experts": 12, "n_routed_experts": 12}  # more than ten tokens can reach


def make(model_type, seed, split, conv="adamw"):
    torch.manual_seed(seed)
    if model_type == "convolutions":
        net = Convolutions()
    else:
        net = tiny_model(model_type, **(MANY if model_type in EXPERTS else {}))
    rows = explain_parameters(net, matrix_split=split, conv=conv)
    apply_tags(net, rows)
    return net.eval(), rows  # no dropout: one process and two draw differently


class Convolutions(nn.Module):
    """A kernel, a transposed kernel and a grouped one between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(16, 24, 3, padding=1),
                nn.Tanh(),
                nn.Conv1d(24, 24, 3, padding=1, groups=3),
                nn.ConvTranspose1d(24, 16, 3, padding=1),
            )
            for _ in range(2)
        )
        self.lm_head = nn.Linear(16, 64)

    def forward(self, ids):
        x = self.embed(ids).mT
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(x.mT)


def loss_of(net, seed, rank, step):
    """One row of six tokens per rank."""
    generator = torch.Generator().manual_seed(seed * 1000003 + step * 1009 + rank)
    ids = torch.randint(3, 64, (1, 6), generator=generator)
    logits = net(ids)
    logits = getattr(logits, "logits", logits)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def layers_of(net):
    return next(module for name, module in net.named_modules() if isinstance(module, nn.ModuleList))


def one_process(model_type, seed, split, conv, **options):
    net, rows = make(model_type, seed, split, conv)
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = hf_muon.MuonWithAuxAdam(build_param_groups(rows, net, **GROUPS), **OPTIONS, **options)
    unreached = 0
    for step in range(STEPS):
        gradients = []
        for rank in range(2):
            net.zero_grad()
            loss_of(net, seed, rank, step).backward()
            gradients.append({name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None})
        for name, p in net.named_parameters():
            found = [gradient[name] for gradient in gradients if name in gradient]
            p.grad = functools.reduce(torch.add, found) / 2 if found else None
            if name.endswith("down_proj") and p.ndim == 3:
                unreached += int((p.grad.flatten(1) == 0).all(1).sum())
        optimizer.step()
    return start, {name: p.detach().clone() for name, p in net.named_parameters()}, unreached


def two_ranks(model_type, seed, split, conv, dedicated, options):
    net, rows = make(model_type, seed, split, conv)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))

    def wrap():
        for layer in layers_of(net):
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)

    if dedicated:
        with hf_muon.dedicate_params(net, mesh):
            wrap()
    else:
        wrap()
    optimizer = hf_muon.MuonWithAuxAdam(build_param_groups(rows, net, **GROUPS), **OPTIONS, **options)
    for step in range(STEPS):
        loss_of(net, seed, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return models.whole_state(net)


def two_replicas(model_type, seed, split, conv, options):
    """Under DDP with owners: whole weights everywhere, and on this rank which momenta it has."""
    net, rows = make(model_type, seed, split, conv)
    optimizer = hf_muon.MuonWithAuxAdam(build_param_groups(rows, net, **GROUPS), **OPTIONS, **options)
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    owned = optimizer.dedicate_matrices(ddp)
    for step in range(STEPS):
        loss_of(ddp, seed, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    held = {n for n, p in net.named_parameters() if optimizer.state[p].get("momentum_buffer", p[:0]).numel()}
    return {name: p.detach().clone() for name, p in net.named_parameters()}, owned, held


EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "dbrx")
CASES = [
    ("llama", "per_head", "adamw", True),  # grouped queries
    ("gpt2", "per_head", "adamw", True),  # Conv1D, one above the other
    ("gpt_neox", "per_head", "adamw", True),  # by head
    ("phi3", "fused", "adamw", True),
    ("deepseek_v3", "per_head", "adamw", True),  # latent attention, routed and shared experts
    ("mixtral", "fused", "adamw", True),
    ("qwen3_moe", "fused", "adamw", True),
    ("gpt_oss", "fused", "adamw", True),  # transposed, alternating rows, biases per expert
    ("olmoe", "fused", "adamw", True),
    ("convolutions", "fused", "flatten", True),
    ("phi3", "per_head", "adamw", False),  # sharded by FSDP2 alone, gathered in the step
    ("gpt_oss", "fused", "adamw", False),
]
ROWS = {
    "normuon": True
}  # statistics of experts without a token rest too, whole on every rank where shards are gathered
CASES = [(*case, {}) for case in CASES] + [("gpt_oss", "fused", "adamw", owned, ROWS) for owned in (True, False)]


@pytest.mark.parametrize(("model_type", "split", "conv", "dedicated", "options"), CASES)
def test_two_ranks_equal_one_process(seed, model_type, split, conv, dedicated, options):
    start, end, unreached = one_process(model_type, seed, split, conv, **options)
    results = run_on_ranks(2, two_ranks, model_type, seed, split, conv, dedicated, options)
    assert model_type not in EXPERTS or unreached, "every expert had a token: the test would be too easy"
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name])
    gap = models.distance(start, end, results[0])
    print(f"{model_type} {split}: {gap:.2e} of the movement, {unreached} experts without a token")
    assert gap <= TIGHT


REPLICAS = [
    ("llama", "per_head", {}),
    ("gpt_neox", "per_head", {}),
    ("gpt_oss", "fused", {}),
    ("deepseek_v3", "per_head", ROWS),
]


@pytest.mark.parametrize(("model_type", "split", "options"), REPLICAS)
def test_two_replicas_equal_one_process(seed, model_type, split, options):
    start, end, _ = one_process(model_type, seed, split, "adamw", **options)
    (first, owned, mine), (second, _, theirs) = run_on_ranks(
        2, two_replicas, model_type, seed, split, "adamw", options
    )
    assert owned and mine and theirs and not mine & theirs
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    gap = models.distance(start, end, first)
    print(f"{model_type} {split} {options}: {gap:.2e} of the movement")
    assert gap <= TIGHT
