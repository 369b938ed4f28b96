# SPDX-License-Identifier: Apache-2.0
"""Numeric variants on matrices that replicas own under DDP: the path of one process, and whole checkpoints."""

import copy

import torch
import torch.distributed as dist

import hf_muon
from tests.distributed import models
from tests.distributed.replicas import OPTIONS, assert_same_bits, is_muon, loss_of, make, many, one_process, wrap
from tests.support.worker_pool import run_on_ranks


def test_bfloat16_and_offloaded_momentum_of_owners_equal_one_process(seed):
    options = {"momentum_dtype": "bfloat16", "offload": "cpu"}
    wanted = one_process(seed, 2, **options)
    results = run_on_ranks(2, many, seed, **options)
    assert_same_bits(results)
    # Where a gradient differs in its last bit, a rounding may fall on the other neighbour: 2**-8 of one momentum.
    assert models.distance(wanted["start"], wanted["end"], results[0]["end"]) <= 2e-3
    held = [set(result["momentum"]) for result in results]
    assert held[0] | held[1] == set(wanted["momentum"]) and not held[0] & held[1]
    assert all(value.dtype == torch.bfloat16 for result in results for value in result["momentum"].values())


def resume(seed, options):
    """Four steps; then again from what rank 0 could save after two."""

    def fresh():
        net = make(seed)
        model = wrap(net)
        return net, model, hf_muon.OptimizerFactory()(model, **OPTIONS, **options)

    def train(model, optimizer, steps):
        for step in steps:
            loss_of(model, seed, dist.get_rank(), step, None, False).backward()
            optimizer.step()
            optimizer.zero_grad()

    net, model, optimizer = fresh()
    train(model, optimizer, range(2))
    optimizer.consolidate_state_dict(to=None)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())
    other, second_model, second = fresh()
    other.load_state_dict(weights)
    second.load_state_dict(saved)
    for one, its_optimizer in ((model, optimizer), (second_model, second)):
        train(one, its_optimizer, range(2, 4))
    same = all(torch.equal(value, other.state_dict()[name]) for name, value in net.state_dict().items())
    owned = sum(not optimizer.state[p]["momentum_buffer"].numel() for p in net.parameters() if is_muon(p))
    return same, owned


def test_a_checkpoint_of_one_rank_resumes_every_variant_to_the_bit(seed):
    options = {"momentum_dtype": "bfloat16", "offload": "cpu", "stochastic_rounding": "true"}
    for same, elsewhere in run_on_ranks(2, resume, seed, options):
        assert same and elsewhere
    for same, elsewhere in run_on_ranks(2, resume, seed, {**options, "normuon": True}):
        assert same and elsewhere


def wrap_again(seed):
    """Four steps; once with a second DDP module around the same model after two of them."""
    ends = []
    for change in (False, True):
        net = make(seed)
        model = wrap(net)
        optimizer = hf_muon.OptimizerFactory()(model, **OPTIONS, normuon=True)
        for step in range(4):
            if change and step == 2:
                model = wrap(net)
                assert optimizer.dedicate_matrices(model)
            loss_of(model, seed, dist.get_rank(), step, None, False).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append({name: p.detach().clone() for name, p in net.named_parameters()})
    return ends


def test_row_statistics_come_home_when_the_model_is_wrapped_again(seed):
    for straight, changed in run_on_ranks(2, wrap_again, seed):
        assert all(torch.equal(value, changed[name]) for name, value in straight.items())
