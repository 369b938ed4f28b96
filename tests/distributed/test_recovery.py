# SPDX-License-Identifier: Apache-2.0
"""After something went wrong or changed: a backward that raised, a rank that failed, freezing, a deleted model."""

import contextlib
import gc
import math
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_muon.distributed import dedicate_params, find_runtime, runtime_of
from tests.distributed import models
from tests.support.worker_pool import outcomes_on_ranks, run_on_ranks


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("broken backward")


def whole_gradients(net):
    return {name: p.grad.full_tensor() for name, p in net.named_parameters() if p.grad is not None}


def raise_in_backward(seed, reshard):
    rank = dist.get_rank()
    gradients = []
    for broken in (False, True):
        net = models.shard(models.make_model(seed), reshard_after_forward=reshard)
        if broken:
            handle = net.layers[0].register_forward_hook(lambda module, args, out: Breaks.apply(out))
            with contextlib.suppress(RuntimeError):
                models.loss_of(net, models.batch(seed, rank, 7)).backward()
            handle.remove()
            net.zero_grad()
            net.reset_iter_state()
            runtime_of(net).reset()
        models.loss_of(net, models.batch(seed, rank, 0)).backward()
        gradients.append(whole_gradients(net))
    clean, after = gradients
    return [name for name in clean if not torch.equal(clean[name], after[name])]


@pytest.mark.parametrize("reshard", [True, False])
def test_a_backward_that_raised_leaves_nothing_behind_after_reset(seed, reshard):
    assert run_on_ranks(2, raise_in_backward, seed, reshard) == [[], []]


def fail_on_one_rank(seed, where):
    net = models.make_model(seed)
    predicate = models.is_matrix
    if where == "predicate" and dist.get_rank() == 1:
        predicate = lambda name, p: False  # noqa: E731
    start = time.monotonic()
    try:
        if where == "body":
            mesh = init_device_mesh("cpu", (2,))
            with dedicate_params(net, mesh, predicate=predicate):
                if dist.get_rank() == 1:
                    raise KeyError("the user's own mistake")
                fully_shard(net, mesh=mesh)
        else:
            models.shard(net, predicate=predicate)
    except (RuntimeError, ValueError, KeyError) as error:
        return type(error).__name__, str(error), time.monotonic() - start, find_runtime(net) is None
    return None


@pytest.mark.parametrize(("where", "kind"), [("predicate", "ValueError"), ("body", "KeyError")])
def test_a_failure_on_one_rank_is_heard_on_the_others_within_seconds(seed, where, kind):
    (name, message, seconds, clean), (other, _, _, _) = run_on_ranks(2, fail_on_one_rank, seed, where)
    assert (name, other) == ("RuntimeError", kind)
    assert "ranks [1] failed" in message and clean
    assert seconds < 20


def freeze_after(seed):
    net = models.shard(models.make_model(seed))
    net.layers[1].requires_grad_(False)
    models.loss_of(net, models.batch(seed, dist.get_rank(), 0)).backward()
    frozen = [p.grad is None for p in net.layers[1].parameters()]
    moving = [p.grad is not None for p in net.layers[0].parameters()]
    return all(frozen), all(moving)


def test_freezing_after_wrapping_reaches_owned_matrices(seed):
    assert run_on_ranks(2, freeze_after, seed) == [(True, True)] * 2


def clip_by_maximum(seed):
    net = models.shard(models.make_model(seed))
    models.loss_of(net, models.batch(seed, dist.get_rank(), 0)).backward()
    largest = max(float(grad.abs().max()) for grad in whole_gradients(net).values())
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9, norm_type=math.inf)
    return float(norm.full_tensor()), largest


def test_case_20_clipping_by_the_largest_element(seed):
    for norm, largest in run_on_ranks(2, clip_by_maximum, seed):
        assert norm == largest


def delete(seed):
    net = models.shard(models.make_model(seed))
    models.loss_of(net, models.batch(seed, dist.get_rank(), 0)).backward()
    alive = weakref.ref(net)
    del net
    gc.collect()
    return alive() is None


def test_a_deleted_model_is_freed(seed):
    assert all(outcome.value for outcome in outcomes_on_ranks(2, delete, seed))
