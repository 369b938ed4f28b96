# SPDX-License-Identifier: Apache-2.0
"""The real optimizer on owned matrices: one process and N ranks walk the same path."""

import functools
import math

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
TIGHT = 2e-6  # of the largest movement; the goal of the project for exact agreement
OPTIONS = {"lr": 0.01, "weight_decay": 0.1, "ns_dtype": "float32", "fused_adam": "false"}


def one_process(seed, world, order, clip=None, **options):
    """Add the ranks' gradients in `order` (rows from the left, then the rows), as the ranks themselves do."""
    net = models.make_model(seed)
    start = {n: p.detach().clone() for n, p in net.named_parameters()}
    hf_muon.tag_parameters(net)
    optimizer = hf_muon.MuonWithAuxAdam(net.named_parameters(), **OPTIONS, **options)
    for step in range(STEPS):
        gradients = []
        for rank in range(world):
            net.zero_grad()
            models.loss_of(net, models.batch(seed, rank, step)).backward()
            gradients.append({n: p.grad.clone() for n, p in net.named_parameters()})
        for name, p in net.named_parameters():
            rows = [functools.reduce(torch.add, [gradients[r][name] for r in row]) for row in order]
            p.grad = functools.reduce(torch.add, rows) / world
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return start, {n: p.detach().clone() for n, p in net.named_parameters()}


def many(seed, mesh_shape, z3, clip=None, **options):
    net = models.make_model(seed)
    hf_muon.tag_parameters(net)
    names = ("shard",) if len(mesh_shape) == 1 else ("replicate", "shard")
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    with hf_muon.dedicate_params(net, mesh, reshard_after_forward=z3):
        for layer in net.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    optimizer = hf_muon.MuonWithAuxAdam(net.named_parameters(), **OPTIONS, **options)
    for step in range(STEPS):
        models.loss_of(net, models.batch(seed, dist.get_rank(), step)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    for p in runtime_of(net).parameters:
        assert is_owned(optimizer.state[p]["momentum_buffer"])
    return models.whole_state(net)


def gap_to_one_process(seed, mesh_shape, order, z3, **options):
    """Return the distance of N ranks from one process; asserts that all ranks end with the same bits."""
    world = math.prod(mesh_shape)
    start, end = one_process(seed, world, order, **options)
    results = run_on_ranks(world, many, seed, mesh_shape, z3, **options)
    for name, value in results[0].items():
        assert all(torch.equal(value, other[name]) for other in results[1:])
    return models.distance(start, end, results[0])


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize(("mesh_shape", "order"), [((2,), [[0, 1]]), ((2, 2), [[0, 1], [2, 3]])])
def test_muon_on_owners_equals_one_process(seed, mesh_shape, order, z3):
    """Sums of two terms have one order, and a matrix's update does not depend on the owner's other matrices."""
    gap = gap_to_one_process(seed, mesh_shape, order, z3)
    print(f"{mesh_shape}: {gap:.2e} of the movement")
    assert gap <= TIGHT


def test_muon_on_four_owners_equals_one_process(seed):
    """gloo's order of four-term sums is its own: measured beside what another order does to one process."""
    start, end = one_process(seed, 4, [[0, 1, 2, 3]])
    _, other = one_process(seed, 4, [[3, 2], [1, 0]])
    noise = models.distance(start, end, other)
    gap = gap_to_one_process(seed, (4,), [[0, 1, 2, 3]], True)
    print(f"4 ranks: {gap:.2e} of the movement; another order of sums alone: {noise:.2e}")
    assert gap <= max(TIGHT, 3 * noise)


def test_clipped_muon_on_owners_equals_one_process(seed):
    """The joint norm is a sum in another order: where its last bit differs, so does every clipped gradient's.

    What one such bit does to one process is measured beside it: 4e-6 to 1.4e-5 of the movement, which is a few units
    in the last place of the embedding's weights. eps is 1e-6: AdamW divides by sqrt(v) + eps, and with the default of
    1e-10 an element whose first gradients are near zero by cancellation turns their rounding into a share of a step.
    """
    options = {"clip": 0.1, "eps": 1e-6}
    start, end = one_process(seed, 2, [[0, 1]], **options)
    _, other = one_process(seed, 2, [[0, 1]], **{**options, "clip": 0.1 * (1 + 1.2e-7)})
    noise = models.distance(start, end, other)
    gap = gap_to_one_process(seed, (2,), [[0, 1]], True, **options)
    print(f"clipped: {gap:.2e} of the movement; one bit of the clipping factor alone: {noise:.2e}")
    assert gap <= max(TIGHT, 5 * noise)


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
