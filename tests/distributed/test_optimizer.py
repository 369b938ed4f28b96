# SPDX-License-Identifier: Apache-2.0
"""The real optimizer on owned matrices: one process and N ranks walk the same path."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_muon
from hf_muon.distributed import is_owned, runtime_of
from tests.distributed import models
from tests.distributed.test_paths import make_experts, nobody
from tests.support.worker_pool import run_on_ranks

STEPS = 6
OPTIONS = {"lr": 0.01, "weight_decay": 0.1, "ns_dtype": "float32", "fused_adam": "false"}


def one_process(seed, world, order):
    net = models.make_model(seed)
    start = {n: p.detach().clone() for n, p in net.named_parameters()}
    hf_muon.tag_parameters(net)
    optimizer = hf_muon.MuonWithAuxAdam(net.named_parameters(), **OPTIONS)
    for step in range(STEPS):
        gradients = []
        for rank in range(world):
            net.zero_grad()
            models.loss_of(net, models.batch(seed, rank, step)).backward()
            gradients.append({n: p.grad.clone() for n, p in net.named_parameters()})
        for name, p in net.named_parameters():
            rows = [sum(gradients[r][name] for r in row[1:]) + gradients[row[0]][name] for row in order]
            p.grad = sum(rows) / world
        optimizer.step()
    return start, {n: p.detach().clone() for n, p in net.named_parameters()}


def many(seed, mesh_shape, z3):
    net = models.make_model(seed)
    hf_muon.tag_parameters(net)
    names = ("shard",) if len(mesh_shape) == 1 else ("replicate", "shard")
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    with hf_muon.dedicate_params(net, mesh, reshard_after_forward=z3):
        for layer in net.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    optimizer = hf_muon.MuonWithAuxAdam(net.named_parameters(), **OPTIONS)
    for step in range(STEPS):
        models.loss_of(net, models.batch(seed, dist.get_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for p in runtime_of(net).parameters:
        assert is_owned(optimizer.state[p]["momentum_buffer"])
    return models.whole_state(net)


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize(("mesh_shape", "order"), [((2,), [[0, 1]]), ((2, 2), [[0, 1], [2, 3]])])
def test_muon_on_owners_equals_one_process(seed, mesh_shape, order, z3):
    """Stacks of equal matrices are other ones on each owner, and batched products round otherwise: 4e-6 to 7e-6 seen.

    (The tests' own step, one matrix at a time, is bit-equal: test_training.) Another order of sums alone moves gram by
    1e-5. No clipping: its factor differs in the last bit, which AdamW's tiny second moments blow up to 7e-5.
    """
    world = len(order) * 2
    start, end = one_process(seed, world, order)
    results = run_on_ranks(world, many, seed, mesh_shape, z3)
    gap = models.distance(start, end, results[0])
    print(f"{mesh_shape}: {gap:.2e} of the movement")
    assert gap <= 3e-5
    for name, value in results[0].items():
        assert all(torch.equal(value, other[name]) for other in results[1:])


def unused_expert(seed):
    net = make_experts(seed)
    hf_muon.tag_parameters(net, include=["separate", "stacked"])
    models.shard(net)
    optimizer = hf_muon.MuonWithAuxAdam(net.named_parameters(), **OPTIONS)
    before = models.whole_state(net)
    nobody(net, seed, dist.get_rank(), 0)
    optimizer.step()
    after = models.whole_state(net)
    return {name for name in before if torch.equal(before[name], after[name])}


def test_case_22_an_expert_no_rank_used_does_not_decay(seed):
    for unchanged in run_on_ranks(2, unused_expert, seed):
        assert {"layers.0.separate.0.weight", "layers.1.separate.0.weight"} <= unchanged
        assert "layers.0.separate.1.weight" not in unchanged
