# SPDX-License-Identifier: Apache-2.0
"""Numeric variants on matrices that replicas own under DDP: the path of one process, and whole checkpoints."""

import copy

import pytest
import torch
import torch.distributed as dist

import hf_muon
from tests.distributed import models
from tests.distributed.replicas import OPTIONS, assert_same_bits, is_muon, loss_of, make, many, one_process, wrap
from tests.support.worker_pool import run_on_ranks


@pytest.mark.parametrize(
    ("dtype", "rests", "limit"),
    [
        # Where a gradient differs in its last bit, a rounding may fall on the other neighbour: 2**-8 of one momentum,
        # or 1/127 of the largest value of its block.
        ("bfloat16", torch.bfloat16, 2e-3),
        ("int8", torch.uint8, 1e-2),
    ],
)
def test_narrow_and_offloaded_momentum_of_owners_equals_one_process(seed, dtype, rests, limit):
    options = {"momentum_dtype": dtype, "offload": "cpu"}
    wanted = one_process(seed, 2, **options)
    results = run_on_ranks(2, many, seed, **options)
    assert_same_bits(results)
    gap = models.distance(wanted["start"], wanted["end"], results[0]["end"])
    print(f"{dtype}: {gap:.2e} of the movement")
    assert gap <= limit
    held = [set(result["momentum"]) for result in results]
    assert held[0] | held[1] == set(wanted["momentum"]) and not held[0] & held[1]
    assert all(value.dtype == rests for result in results for value in result["momentum"].values())


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


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_checkpoint_of_one_rank_resumes_every_variant_to_the_bit(seed, dtype):
    options = {"momentum_dtype": dtype, "offload": "cpu", "stochastic_rounding": "true"}
    for same, elsewhere in run_on_ranks(2, resume, seed, options):
        assert same and elsewhere
    for same, elsewhere in run_on_ranks(2, resume, seed, {**options, "normuon": True}):
        assert same and elsewhere


def wrapped_again(seed):
    """Four steps of int8 momentum, with a second DDP module around the model after two of them, and without."""

    def train(rewraps):
        net = make(seed)
        model = wrap(net)
        optimizer = hf_muon.OptimizerFactory()(model, **OPTIONS, momentum_dtype="int8")
        whole = None
        for step in range(4):
            if step == 2:
                optimizer.consolidate_state_dict(to=None)
                whole = copy.deepcopy(optimizer.state_dict())
            if step == 2 and rewraps:
                model = wrap(net)
                assert optimizer.dedicate_matrices(model)
                alone = make(seed)
                single = hf_muon.OptimizerFactory()(alone, **OPTIONS, momentum_dtype="int8")
                single.load_state_dict(whole)
                for state in (optimizer.state_dict()["state"], single.state_dict()["state"]):
                    for number, values in whole["state"].items():
                        assert all(torch.equal(value, state[number][key]) for key, value in values.items())
            loss_of(model, seed, dist.get_rank(), step, None, False).backward()
            optimizer.step()
            optimizer.zero_grad()
        return net.state_dict()

    straight, rewrapped = train(False), train(True)
    return all(torch.equal(value, rewrapped[name]) for name, value in straight.items())


def test_codes_survive_another_wrapping_and_a_load_in_one_process(seed):
    """Every rank gets whole momenta back, then owners again; one process rounds what it loads to the same codes."""
    assert all(run_on_ranks(2, wrapped_again, seed))


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
