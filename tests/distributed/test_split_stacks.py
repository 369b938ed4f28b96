# SPDX-License-Identifier: Apache-2.0
"""Stacks of experts with several owners: the same training, traffic and checkpoints as whole ones."""

import functools
import io
import math
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hf_muon
from hf_muon.distributed import comm_stats, ownership, runtime_of
from hf_muon.optim import functional
from tests.distributed import models, test_owned
from tests.support.worker_pool import run_on_ranks

MODEL = {"block": models.MoeBlock, "layers": 1}  # stacks of 5 and 3; the first is split on 2 and on 4 ranks
FEW = {"block": functools.partial(models.MoeBlock, 3, 5), "layers": 1}  # both are split on 4 ranks
STEPS = 4
TIGHT = 2e-6  # of the largest movement; the goal of the project for exact agreement
OPTIONS = {"lr": 0.01, "weight_decay": 0.1, "ns_dtype": "float32", "fused_adam": "false"}


def make(seed, model=MODEL):
    net = models.make_model(seed, **model)
    for name, parameter in net.named_parameters():
        parameter.use_muon = models.is_matrix(name, parameter)
    return net


def make_sharded(seed, mesh_shape, z3=True, reduce_dtype=None, model=MODEL):
    net = make(seed, model)
    names = ("shard",) if len(mesh_shape) == 1 else ("replicate", "shard")
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    with hf_muon.dedicate_params(net, mesh, reshard_after_forward=z3):
        for layer in net.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(net, mesh=mesh, mp_policy=policy)
    return net, hf_muon.MuonWithAuxAdam(net.named_parameters(), **OPTIONS)


def one_process(seed, order, sum_dtype, model):
    """Add the ranks' gradients in `order` (rows from the left, then the rows), as the ranks themselves do."""
    net = make(seed, model)
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = hf_muon.MuonWithAuxAdam(net.named_parameters(), **OPTIONS)
    world = sum(map(len, order))
    for step in range(STEPS):
        gradients = []
        for rank in range(world):
            net.zero_grad()
            models.loss_of(net, models.batch(seed, rank, step)).backward()
            gradients.append({name: p.grad.to(sum_dtype) for name, p in net.named_parameters()})
        for name, p in net.named_parameters():
            rows = [functools.reduce(torch.add, [gradients[r][name] for r in row]) for row in order]
            p.grad = (functools.reduce(torch.add, rows) / world).to(p.dtype)
        optimizer.step()
    return start, {name: p.detach().clone() for name, p in net.named_parameters()}


def fit(seed, *args):
    net, optimizer = make_sharded(seed, *args)
    worked = []

    def count(matrices, **options):
        worked.extend(tuple(matrix.shape) for matrix in matrices)
        return newton_schulz_many(matrices, **options)

    newton_schulz_many = functional.newton_schulz_many
    comm_stats(net, reset=True)
    with mock.patch.object(functional, "newton_schulz_many", count):
        for step in range(STEPS):
            models.loss_of(net, models.batch(seed, dist.get_rank(), step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    held = sum(
        p.to_local().numel() + optimizer.state[p]["momentum_buffer"].to_local().numel()
        for p in runtime_of(net).parameters
    )
    return {
        "weights": models.whole_state(net),
        "plan": ownership(net),
        "stats": comm_stats(net),
        "worked": worked,
        "held": held,
        "gathered": runtime_of(net).num_gathered_bytes,
    }


@pytest.mark.parametrize(
    ("mesh_shape", "order", "dtype", "model", "split"),
    [
        ((2,), [[0, 1]], torch.float32, MODEL, {"gate_up"}),
        ((2, 2), [[0, 1], [2, 3]], torch.float32, FEW, {"gate_up", "down"}),
        ((4,), [[0, 1, 2, 3]], torch.float64, FEW, {"gate_up", "down"}),  # float64: gloo's order does not matter
    ],
    ids=["2", "2x2", "4"],
)
def test_training_equals_one_process(seed, mesh_shape, order, dtype, model, split):
    """5 experts on 2 and 4 ranks, 3 on 4; Z2 and Z3 to the bit; every byte and every Newton-Schulz counted."""
    start, end = one_process(seed, order, dtype, model)
    world = math.prod(mesh_shape)
    bits = []
    for z3 in (True, False):
        results = run_on_ranks(world, fit, seed, mesh_shape, z3, dtype, model)
        plan = results[0]["plan"]
        counts = Counter(matrix.name.rpartition(".")[2] for matrix in plan.matrices)
        assert {name for name, count in counts.items() if count > 1} == split
        assert models.distance(start, end, results[0]["weights"]) <= TIGHT
        elements = sum(matrix.numel for matrix in plan.matrices)
        for result in results:
            assert all(torch.equal(value, result["weights"][name]) for name, value in results[0]["weights"].items())
            assert result["stats"]["broadcast"] == STEPS * (2 if z3 else 1) * elements * 4
            sent = STEPS * (elements + len(plan.matrices)) * dtype.itemsize
            assert result["stats"]["reduce"] == sent
            assert result["gathered"] == 0
        assert [result["held"] for result in results] == [2 * count for count in plan.elements_per_rank()]
        worked = [shape for result in results for shape in result["worked"]]
        net = make(seed, model).layers[0]
        for rows, experts in ((17, 2 * len(net.gate_up)), (60, len(net.down))):  # gate and up; down, output first
            assert sum(shape[0] for shape in worked if len(shape) == 3 and shape[1] == rows) == STEPS * experts
        bits.append(results[0]["weights"])
    assert all(torch.equal(value, bits[1][name]) for name, value in bits[0].items())


@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2)], ids=str)
def test_doors_of_split_stacks(seed, mesh_shape, tmp_path):
    world = math.prod(mesh_shape)
    run_on_ranks(world, test_owned.read_everywhere, seed, mesh_shape, **MODEL)
    run_on_ranks(world, test_owned.write_back, seed, mesh_shape, **MODEL)
    run_on_ranks(world, test_owned.raw_dcp, seed, mesh_shape, str(tmp_path), **MODEL)
    for norm_gap, gradient_gap in run_on_ranks(world, test_owned.clip, seed, mesh_shape, 0.05, **MODEL):
        assert norm_gap <= 1e-6 and gradient_gap <= 5e-6  # fp32 sums in another order


def test_owners_of_a_stack_get_their_experts_from_rank_zero(seed):
    run_on_ranks(4, test_owned.ram_efficient, seed, False, **MODEL)


def refusals(seed):
    _, pairs = test_owned.owned_and_whole(seed, (2,), **MODEL)
    split = next(p for p, _ in pairs if len(p.owners) > 1)
    with pytest.raises(RuntimeError, match=r"must not be redistributed: it lives in parts on ranks \[0, 1\]\. Call"):
        split.redistribute(split.device_mesh, split.placements)
    with pytest.raises(RuntimeError, match=r"must not be pickled: it lives in parts on ranks \[0, 1\]\. Save"):
        torch.save(split, io.BytesIO())
    assert str(split).endswith("in parts on ranks [0, 1])")


def test_refusals_say_where_the_parts_are(seed):
    run_on_ranks(2, refusals, seed)


def as_plain(state):
    return {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()}


def save(seed, mesh_shape, folder):
    """Train, save sharded, return the state as one file would hold it."""
    net, optimizer = make_sharded(seed, mesh_shape)
    for step in range(2):
        models.loss_of(net, models.batch(seed, dist.get_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(net, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    return get_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def resume(seed, mesh_shape, folder, full):
    """Load the other way round on other ranks; return every value as a whole tensor."""
    net, optimizer = make_sharded(seed + 1, mesh_shape)
    options = StateDictOptions(full_state_dict=full is not None, broadcast_from_rank0=full is not None)
    if full is None:
        weights, state = get_state_dict(net, optimizer)
        saved = {"model": weights, "optimizer": state}
        dcp.load(saved, checkpoint_id=folder)
        full = saved["model"], saved["optimizer"]
    elif dist.get_rank():
        full = {}, {}
    set_model_state_dict(net, full[0], options=options)
    set_optimizer_state_dict(net, optimizer, full[1], options=options)
    names = {id(p): name for name, p in net.named_parameters()}
    states = {names[id(p)]: as_plain(values) for p, values in optimizer.state.items()}
    return models.whole_state(net), states


@pytest.mark.parametrize(("before", "after"), [((2,), (4,)), ((2, 2), (2,))], ids=str)
def test_a_resume_on_other_ranks_has_the_same_bits(seed, tmp_path, before, after):
    weights, state = run_on_ranks(math.prod(before), save, seed, before, str(tmp_path))[0]
    for full in (None, (weights, state)):
        found, states = run_on_ranks(math.prod(after), resume, seed, after, str(tmp_path), full)[0]
        assert all(torch.equal(value, found[name]) for name, value in weights.items())
        for name, values in state["state"].items():
            assert all(torch.equal(value, states[name][key]) for key, value in values.items())
    alone = make(seed + 1)
    optimizer = hf_muon.MuonWithAuxAdam(alone.named_parameters(), **OPTIONS)
    alone.load_state_dict(weights)
    optimizer.load_state_dict(state)
    momentum = optimizer.state[alone.layers[0].gate_up]["momentum_buffer"]
    assert torch.equal(momentum, state["state"]["layers.0.gate_up"]["momentum_buffer"]) and momentum.any()
