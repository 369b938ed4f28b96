# SPDX-License-Identifier: Apache-2.0
"""Owned tensors outside their unit: right, or an error that says what to call; and the door to standard DTensors."""

import copy
import io
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hf_muon.distributed import (
    Placement,
    attach,
    detach,
    from_standard,
    is_owned,
    owned_like,
    runtime_of,
    to_standard,
)
from hf_muon.distributed.owned import OwnedDTensor
from tests.distributed import models
from tests.support.worker_pool import run_on_ranks

MESHES = [(2, (2,)), (4, (4,)), (4, (2, 2))]


def owned_and_whole(seed, mesh_shape, **model):
    reference = models.make_model(seed, **model)
    net = models.shard(models.make_model(seed, **model), mesh_shape=mesh_shape)
    whole = dict(reference.named_parameters())
    return net, [(p, whole[p.owner_layout.name].detach()) for p in runtime_of(net).parameters]


def read_everywhere(seed, mesh_shape, **model):
    net, pairs = owned_and_whole(seed, mesh_shape, **model)
    for p, whole in pairs:
        assert is_owned(p) and p.is_owned and isinstance(p, nn.Parameter) and isinstance(p, DTensor)
        assert p.shape == whole.shape and p.numel() == whole.numel() and p.stride() == whole.stride()
        assert torch.equal(p.full_tensor(), whole)
        assert not p.full_tensor().requires_grad
        assert p.is_local == (dist.get_rank() in p.owners)
        assert p.to_local().shape == (whole[p.rows].shape if p.is_local else (0, *whole.shape[1:]))
        standard = to_standard(p)
        assert type(standard) is DTensor
        expected = (Shard(0),) if len(mesh_shape) == 1 else (Replicate(), Shard(0))
        assert tuple(standard.placements) == expected
        assert torch.equal(standard.full_tensor(), whole)
        chunks = whole.chunk(mesh_shape[-1])
        mine = runtime_of(net).comm.grid.shard_index
        assert torch.equal(standard.to_local(), chunks[mine] if mine < len(chunks) else whole[:0])
        assert str(p).startswith(f"OwnedDTensor({p.owner_layout.name}, shape=")


def write_back(seed, mesh_shape, **model):
    net, pairs = owned_and_whole(seed, mesh_shape, **model)
    mesh = runtime_of(net).comm.grid.mesh
    placements = (Shard(0),) if len(mesh_shape) == 1 else (Replicate(), Shard(0))
    odd = (Replicate(),) * len(mesh_shape)
    for p, whole in pairs:
        version = p.owner_layout.version
        for factor, layout in ((2.0, placements), (3.0, odd), (4.0, None)):
            value = whole * factor
            from_standard(p, value if layout is None else distribute_tensor(value, mesh, layout))
            assert torch.equal(p.full_tensor(), value)
        from_standard(p, to_standard(p).to(torch.float64))
        assert p.dtype == torch.float32 and torch.equal(p.full_tensor(), whole * 4)
        assert p.owner_layout.version == version + 4
        state = owned_like(p)
        assert is_owned(state) and state.full_tensor().abs().sum() == 0
        from_standard(state, to_standard(p))
        assert torch.equal(state.full_tensor(), whole * 4)
        with pytest.raises(ValueError, match="must have the shape"):
            from_standard(p, distribute_tensor(torch.zeros(whole.shape[0] + 1, *whole.shape[1:]), mesh, placements))


@pytest.mark.parametrize(("world", "mesh_shape"), MESHES)
@pytest.mark.parametrize("function", [read_everywhere, write_back])
def test_case_30_the_door_both_ways(seed, world, mesh_shape, function):
    """Fewer rows than ranks and odd rows included."""
    run_on_ranks(world, function, seed, mesh_shape)


def guard(seed):
    _, pairs = owned_and_whole(seed, (2,))
    p, whole = pairs[0]
    name = p.owner_layout.name
    with torch.no_grad():
        # Elementwise results keep the owner and are right.
        for value, expected in (
            (p + 1, whole + 1),
            (p * 2.0, whole * 2),
            (p * p, whole * whole),
            (torch.zeros_like(p), torch.zeros_like(whole)),
            (p.clone(), whole),
            (p.detach().float(), whole),
            (p.to(torch.bfloat16), whole.to(torch.bfloat16)),
            (copy.deepcopy(p), whole),
        ):
            assert type(value) is OwnedDTensor
            assert torch.equal(value.full_tensor(), expected)
        assert p.norm().full_tensor().item() == pytest.approx(whole.norm().item(), rel=1e-6)
        assert p.sum().full_tensor().item() == pytest.approx(whole.sum().item(), rel=1e-4, abs=1e-3)
    clone = copy.deepcopy(p)
    assert isinstance(clone, nn.Parameter) and clone.requires_grad and clone.owners == p.owners
    wrong = {
        "matmul": lambda: p @ torch.ones(p.shape[1], 2),
        "linear": lambda: torch.nn.functional.linear(torch.ones(1, p.shape[1]), p),
        "mean": lambda: p.mean(),
        "row sums": lambda: p.sum(1),
        "index": lambda: p[0],
        "transpose": lambda: p.t(),
        "reshape": lambda: p.reshape(-1),
        "cat": lambda: torch.cat([p, p]),
        "item": lambda: p.max(),
        "row add": lambda: p + torch.ones(p.shape[1]),
    }
    for case, action in wrong.items():
        with pytest.raises(RuntimeError, match=rf"{name} must not be (used|combined) in .*full_tensor\(\)"):
            action()
            print(case, "did not raise")
    other = next(q for q, w in pairs if q.owners != p.owners and w.shape == whole.shape)
    with pytest.raises(RuntimeError, match="must not be combined in"):
        p + other
    with pytest.raises(RuntimeError, match=rf"{name} must not be redistributed: it lives whole on rank \d. Call"):
        p.redistribute(p.device_mesh, [Replicate()])
    with pytest.raises(RuntimeError, match=rf"{name} must not be pickled: it lives whole on rank \d"):
        torch.save(p, io.BytesIO())
    with pytest.raises(NotImplementedError, match=f"{name} has no differentiable full_tensor"):
        p.full_tensor(grad_placements=[Replicate()])


def test_every_other_way_out_is_right_or_raises(seed):
    run_on_ranks(2, guard, seed)


def other_optimizers(seed, options):
    """AdamW of torch on owned matrices: the same numbers as on whole ones."""
    net, pairs = owned_and_whole(seed, (2,))
    wholes = [nn.Parameter(whole.clone()) for _, whole in pairs]
    theirs = torch.optim.AdamW(wholes, lr=1e-2, **options)
    ours = torch.optim.AdamW([p for p, _ in pairs], lr=1e-2, **options)
    for step in range(3):
        models.loss_of(net, models.batch(seed, 0, step)).backward()
        for (p, _), whole in zip(pairs, wholes, strict=True):
            whole.grad = p.grad.full_tensor()
        ours.step()
        theirs.step()
        ours.zero_grad()
    for (p, _), whole in zip(pairs, wholes, strict=True):
        assert is_owned(ours.state[p]["exp_avg"])
        assert ours.state[p]["exp_avg"].to_local().shape == p.to_local().shape
        assert torch.equal(p.full_tensor(), whole.detach())


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_torch_optimizers_work_on_owned_parameters(seed, options):
    run_on_ranks(2, other_optimizers, seed, options)


def clip(seed, mesh_shape, max_norm, **model):
    net = models.shard(models.make_model(seed, **model), mesh_shape=mesh_shape)
    models.loss_of(net, models.batch(seed, 0, 0)).backward()
    single = models.make_model(seed, **model)
    models.loss_of(single, models.batch(seed, 0, 0)).backward()
    expected = torch.nn.utils.clip_grad_norm_(single.parameters(), max_norm)
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
    worst = 0.0
    for (_, p), (_, q) in zip(net.named_parameters(), single.named_parameters(), strict=True):
        worst = max(worst, ((p.grad.full_tensor() - q.grad).norm() / q.grad.norm()).item())
    return abs(norm.full_tensor() - expected).item() / expected.item(), worst


@pytest.mark.parametrize(("world", "mesh_shape"), MESHES)
def test_case_20_the_clipping_norm_is_joint(seed, world, mesh_shape):
    for norm_gap, gradient_gap in run_on_ranks(world, clip, seed, mesh_shape, 0.05):
        assert norm_gap <= 1e-6  # the acceptance figure; fp32 sums in another order
        assert gradient_gap <= 5e-6


def raw_dcp(seed, mesh_shape, folder, **model):
    """Even a raw owned tensor is described truly to DCP: whoever forgets the door still gets whole matrices."""
    _, pairs = owned_and_whole(seed, mesh_shape, **model)
    state = {p.owner_layout.name: p.detach() for p, _ in pairs}
    dcp.save(state, checkpoint_id=folder)
    with torch.no_grad():
        for p, _ in pairs:
            p.zero_()
    dcp.load(state, checkpoint_id=folder)
    for p, whole in pairs:
        assert torch.equal(p.full_tensor(), whole)
    even = {p.owner_layout.name: to_standard(torch.zeros_like(p)) for p, _ in pairs}
    dcp.load(even, checkpoint_id=folder)
    for p, whole in pairs:
        assert torch.equal(even[p.owner_layout.name].full_tensor(), whole)


@pytest.mark.parametrize(("world", "mesh_shape"), [(2, (2,)), (4, (2, 2))])
def test_distributed_checkpoint_reads_the_true_layout(seed, world, mesh_shape):
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(world, raw_dcp, seed, mesh_shape, folder)


def ram_efficient(seed, master, **model):
    """Only rank 0 has weights, the others are on meta; owners get theirs from rank 0."""
    whole = dict(models.make_model(seed, **model).named_parameters())
    if dist.get_rank() == 0:
        net = models.make_model(seed, **model).to(torch.bfloat16 if master else torch.float32)
    else:
        with torch.device("meta"):
            net = models.make_model(seed, **model).to(torch.bfloat16 if master else torch.float32)
    for _, p in net.named_parameters():
        p.use_muon = True
        p.mark = "kept"
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    detached = detach(net, models.is_matrix)
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    runtime = attach(net, detached, mesh, Placement(master_dtype=torch.float32, param_dtype=torch.float32))
    for row in detached:
        assert runtime.replaced[id(row.parameter)].owner_layout.name == row.name
    for p in runtime.parameters:
        assert p.use_muon and p.mark == "kept" and p.dtype == torch.float32
        expected = whole[p.owner_layout.name].detach()
        assert torch.equal(p.full_tensor(), expected.to(torch.bfloat16).float() if master else expected)


@pytest.mark.parametrize("master", [False, True])
def test_owners_get_their_weights_from_rank_zero(seed, master):
    run_on_ranks(4, ram_efficient, seed, master)
