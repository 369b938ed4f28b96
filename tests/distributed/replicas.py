# SPDX-License-Identifier: Apache-2.0
"""Training under DDP with owners, and the same training in one process; what the tests of data parallelism share."""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hf_muon
from tests.distributed import models

STEPS = 6
OPTIONS = {"lr": 0.01, "weight_decay": 0.1, "ns_dtype": "float32", "fused_adam": "false"}


class Skipping(models.TinyModel):
    """Leaves out one layer where asked to."""

    def forward(self, ids, skip=None):
        x = self.embed(ids)
        for index, layer in enumerate(self.layers):
            x = x if index == skip else layer(x)
        return self.head(x)


def only_matrices_train(net):
    """As LoRA does: everything that trains is a matrix on Muon."""
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(models.is_matrix(name, parameter))


def is_muon(parameter):
    """Whether the router put it on Muon; frozen parameters have no tag."""
    return bool(getattr(parameter, "use_muon", False))


def make(seed, ckpt=None, tied=False, lora=False):
    torch.manual_seed(seed)
    net = Skipping() if ckpt is None else models.TinyModel(ckpt=ckpt)
    if tied:
        net.head.weight = net.embed.weight
    if lora:
        only_matrices_train(net)
    return net


def loss_of(net, seed, rank, step, skips, autocast):
    options = {"skip": skips[rank]} if skips is not None and step % 2 else {}
    ids = models.batch(seed, rank, step)
    context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with context:
        logits = net(ids[:, :-1], **options)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def values(net):
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def one_process(
    seed, world, *, micro=1, sync_each=False, clip=None, order=2.0, skips=None, autocast=False, sums=None, **options
):
    """Train on all ranks' batches; gradients are added rank by rank as `world` ranks add them.

    Args:
        sums: order of the ranks in a sum; None: 0, 1, 2, ...
    """
    model_options = {key: options.pop(key) for key in ("ckpt", "tied", "lora") if key in options}
    net = make(seed, **model_options)
    start = values(net)
    optimizer = hf_muon.OptimizerFactory()(net, **OPTIONS, **options)
    norms = []
    ranks = sums or range(world)
    for step in range(STEPS):
        local = {(rank, m): {} for rank in ranks for m in range(micro)}
        for rank, m in local:
            net.zero_grad()
            (loss_of(net, seed, rank, step * micro + m, skips, autocast) / micro).backward()
            local[rank, m] = {n: p.grad / world for n, p in net.named_parameters() if p.grad is not None}
        for name, parameter in net.named_parameters():
            parameter.grad = summed(local, name, parameter, ranks, micro, sync_each)
        norms.append(clip_(net, clip, order))
        optimizer.step()
        net.zero_grad()
    momentum = {name: momentum_of(optimizer, p) for name, p in net.named_parameters() if is_muon(p)}
    return {"start": start, "end": values(net), "norms": norms, "momentum": momentum}


def summed(local, name, parameter, ranks, micro, sync_each):
    """Add gradients (already divided by the number of ranks) in the order in which the job adds them."""
    if not sync_each:
        rows = [[local[rank, m] for m in range(micro)] for rank in ranks]
    elif is_muon(parameter):
        rows = [[local[rank, m] for rank in ranks] for m in range(micro)]
    else:  # DDP averages what was already averaged once more, with each rank's new gradient added
        carried = None
        for m in range(micro):
            new = [local[rank, m].get(name) for rank in ranks]
            if all(gradient is None for gradient in new):
                continue
            old = 0.0 if carried is None else carried / len(ranks)
            carried = sum(old if gradient is None else gradient + old for gradient in new)
        return carried
    parts = [[gradients[name] for gradients in row if name in gradients] for row in rows]
    parts = [functools.reduce(torch.add, row) for row in parts if row]
    return functools.reduce(torch.add, parts) if parts else None


def clip_(net, clip, order, foreach=None):
    if clip is None:
        return None
    return torch.nn.utils.clip_grad_norm_(net.parameters(), clip, norm_type=order, foreach=foreach).item()


def momentum_of(optimizer, parameter):
    return optimizer.state[parameter]["momentum_buffer"].clone()


def wrap(net, **options):
    return DistributedDataParallel(net, **options)


def many(seed, *, micro=1, sync_each=False, clip=None, order=2.0, skips=None, autocast=False, ddp=None, **options):
    """The same on this rank of a DDP job; returns weights, norms, traffic and what this rank holds."""
    model_options = {key: options.pop(key) for key in ("ckpt", "tied", "lora") if key in options}
    foreach, set_to_none = options.pop("foreach", None), options.pop("set_to_none", True)
    net = make(seed, **model_options)
    model = wrap(net, **(ddp or {}))
    optimizer = hf_muon.OptimizerFactory()(model, **OPTIONS, **options)
    hf_muon.comm_stats(model, reset=True)
    rank, norms, bits = dist.get_rank(), [], []
    for step in range(STEPS):
        for m in range(micro):
            synced = sync_each or m == micro - 1
            with contextlib.nullcontext() if synced else model.no_sync():
                (loss_of(model, seed, rank, step * micro + m, skips, autocast) / micro).backward()
        norms.append(clip_(model, clip, order, foreach))
        optimizer.step()
        (model if step % 2 else optimizer).zero_grad(set_to_none=set_to_none)
        bits.append([parameter.detach().view(torch.int32).sum().item() for parameter in net.parameters()])
    held = {
        name: momentum_of(optimizer, p)
        for name, p in net.named_parameters()
        if is_muon(p) and optimizer.state[p]["momentum_buffer"].numel()
    }
    return {
        "end": values(net),
        "norms": norms,
        "bits": bits,
        "momentum": held,
        "stats": hf_muon.comm_stats(model),
        "plan": hf_muon.ownership(model),
    }


def assert_same_bits(results):
    """All ranks have the same weights after every step."""
    for other in results[1:]:
        assert other["bits"] == results[0]["bits"]
        assert other["norms"] == results[0]["norms"]
        assert all(torch.equal(value, other["end"][name]) for name, value in results[0]["end"].items())


def muon_sizes(seed):
    """Elements of each matrix that the router puts on Muon, and of all other parameters together."""
    net = make(seed)
    tags = hf_muon.tag_parameters(net)
    sizes = [p.numel() for name, p in net.named_parameters() if tags[name] == "muon"]
    return sizes, sum(p.numel() for p in net.parameters()) - sum(sizes)
