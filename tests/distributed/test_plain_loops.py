# SPDX-License-Identifier: Apache-2.0
"""A plain FSDP2 loop saves and loads with torch's own tools; nothing is called besides `hf_muon.dedicate_params`."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import hf_muon
from hf_muon.checkpoint import install_optimizer_doors
from hf_muon.distributed import is_owned
from tests.distributed import models
from tests.support.worker_pool import run_on_ranks

OPTIONS = {"lr": 0.01, "ns_dtype": "float32", "fused_adam": "false"}


def make(seed, mesh_shape, z3):
    net = models.make_model(seed)
    hf_muon.tag_parameters(net)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    with hf_muon.dedicate_params(net, mesh, reshard_after_forward=z3):
        for layer in net.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=z3)
        fully_shard(net, mesh=mesh, reshard_after_forward=z3)
    return net, hf_muon.MuonWithAuxAdam(net.named_parameters(), **OPTIONS)


def steps(net, optimizer, seed, which):
    for step in which:
        models.loss_of(net, models.batch(seed, dist.get_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluate(net, seed):
    with torch.no_grad():
        models.loss_of(net, models.batch(seed, dist.get_rank(), 99))  # leaves gathered copies registered under Z2


def assert_standard(tensors, mesh_shape):
    placements = (Shard(0),) if len(mesh_shape) == 1 else (Replicate(), Shard(0))
    for name, value in tensors.items():
        assert isinstance(value, DTensor) and not is_owned(value), name
        assert value.placements == placements, name
        assert value.full_tensor().isfinite().all(), name


def hand_out(seed, mesh_shape, z3):
    net, optimizer = make(seed, mesh_shape, z3)
    steps(net, optimizer, seed, range(2))
    evaluate(net, seed)
    weights = net.state_dict()
    assert_standard(weights, mesh_shape)
    for name, value in models.whole_state(net).items():
        assert torch.equal(value, weights[name].full_tensor()), name
    state = optimizer.state_dict()["state"]
    momentum = {key: values["momentum_buffer"] for key, values in state.items() if "momentum_buffer" in values}
    assert len(momentum) == sum(is_owned(p) for p in net.parameters()) > 0
    assert_standard(momentum, mesh_shape)
    assert all(is_owned(optimizer.state[p]["momentum_buffer"]) for p in net.parameters() if is_owned(p))


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=["2 ranks", "2x2"])
def test_state_dicts_are_standard_without_any_further_call(seed, mesh_shape, z3):
    run_on_ranks(math.prod(mesh_shape), hand_out, seed, mesh_shape, z3)


def go_on(seed, mesh_shape, z3, folder):
    """Save after two steps and an evaluation, go on; load into the other mode, go on: the same bits."""
    net, optimizer = make(seed, mesh_shape, z3)
    steps(net, optimizer, seed, range(2))
    evaluate(net, seed)
    weights, state = get_state_dict(net, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    saved = models.whole_state(net)
    steps(net, optimizer, seed, range(2, 4))
    other, second = make(seed + 1, mesh_shape, not z3)
    weights, state = get_state_dict(other, second)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(other, second, model_state_dict=weights, optim_state_dict=state)
    for name, value in models.whole_state(other).items():
        assert torch.equal(value, saved[name]), name
    steps(other, second, seed, range(2, 4))
    for name, value in models.whole_state(other).items():
        assert torch.equal(value, models.whole_state(net)[name]), name
    return saved


@pytest.mark.parametrize("z3", [True, False], ids=["z3 to z2", "z2 to z3"])
def test_distributed_checkpoint_brings_a_run_back_to_the_same_bits(seed, z3, tmp_path):
    saved = run_on_ranks(2, go_on, seed, (2,), z3, str(tmp_path / "dcp"))[0]
    alone = models.make_model(seed + 2)  # one process, an ordinary model, no process group
    weights = alone.state_dict()
    dcp.load({"model": weights}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    for name, value in weights.items():
        assert torch.equal(value, saved[name]), name


def torch_adamw(seed):
    net, _ = make(seed, (2,), True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    steps(net, optimizer, seed, range(1))
    install_optimizer_doors(optimizer, net)
    weights = {name: value.clone() for name, value in net.state_dict().items()}  # the rest shares memory
    for values in optimizer.state_dict()["state"].values():
        assert_standard({key: values[key] for key in ("exp_avg", "exp_avg_sq")}, (2,))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    net.load_state_dict(weights)
    return all(
        torch.equal(value.full_tensor(), net.state_dict()[name].full_tensor()) for name, value in weights.items()
    )


def test_another_optimizer_needs_one_line(seed):
    assert run_on_ranks(2, torch_adamw, seed) == [True, True]
