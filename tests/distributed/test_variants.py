# SPDX-License-Identifier: Apache-2.0
"""Numeric variants on owned matrices: N ranks walk the path of one process; state survives the checkpoint's layout."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

import hf_muon
from hf_muon.distributed import runtime_of
from hf_muon.optim.state_spec import ROW_STATISTICS
from tests.distributed import models
from tests.distributed.test_optimizer import OPTIONS, TIGHT, gap_to_one_process
from tests.support.worker_pool import run_on_ranks


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"normuon": True, "offload": "cpu"}, TIGHT),
        # Where a gradient differs in its last bit, a rounding may fall on the other neighbour: 2**-8 of one momentum.
        ({"momentum_dtype": "bfloat16"}, 2e-3),
    ],
    ids=["normuon-offload", "bfloat16"],
)
def test_variants_on_owners_equal_one_process(seed, options, limit):
    gap = gap_to_one_process(seed, (2,), [[0, 1]], True, **options)
    print(f"{options}: {gap:.2e} of the movement")
    assert gap <= limit


def resume(seed):
    """Four steps; then again from a state dict taken after two, which holds ordinary sharded DTensors.

    The head is on Muon without an owner here: its momentum stays sharded, its row statistics whole on every rank.
    """
    options = {"normuon": True, "momentum_dtype": "bfloat16", "stochastic_rounding": "true", "offload": "cpu"}

    def fresh():
        net = models.make_model(seed).bfloat16()
        hf_muon.tag_parameters(net)
        models.shard(net)
        return net, hf_muon.MuonWithAuxAdam(net.named_parameters(), **OPTIONS, **options)

    def train(net, optimizer, steps):
        for step in steps:
            models.loss_of(net, models.batch(seed, dist.get_rank(), step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    net, optimizer = fresh()
    train(net, optimizer, range(2))
    weights, saved = models.whole_state(net), optimizer.state_dict()
    other, second = fresh()
    for name, parameter in other.named_parameters():
        if hasattr(parameter, "is_owned"):
            hf_muon.distributed.from_standard(parameter, weights[name])
        else:
            parts = distribute_tensor(weights[name], parameter.device_mesh, parameter.placements)
            parameter.data.copy_(parts)
    second.load_state_dict(saved)
    for model, its_optimizer in ((net, optimizer), (other, second)):
        train(model, its_optimizer, range(2, 4))
    first_state, second_state = models.whole_state(net), models.whole_state(other)
    owned = runtime_of(net).parameters
    shapes = {tuple(optimizer.state[p][ROW_STATISTICS].shape) for p in owned}
    dtypes = {optimizer.state[p]["momentum_buffer"].dtype for p in owned}
    moved = any(not torch.equal(first_state[name], weights[name]) for name in weights)
    return all(torch.equal(first_state[n], second_state[n]) for n in weights), moved, shapes, dtypes


def test_every_variant_resumes_to_the_bit_through_the_standard_layout(seed):
    for same, moved, shapes, dtypes in run_on_ranks(2, resume, seed):
        assert same and moved
        assert shapes == {(rows, 1) for rows in (models.HIDDEN, models.INTER, 3)}
        assert dtypes == {torch.bfloat16}
