# SPDX-License-Identifier: Apache-2.0
"""Ranks that disagree, die or go another way: an error on every rank, within a minute, that says what to look for."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_muon.distributed import dedicate_params, find_runtime, ownership, runtime_of
from tests.distributed import models
from tests.support.worker_pool import outcomes_on_ranks, run_on_ranks

LIMIT = 60.0


@pytest.fixture(autouse=True)
def running_workers():
    """Start the workers first: importing torch on busy cores must not count against the limit of a fault."""
    run_on_ranks(2, dist.barrier, timeout=200.0)


def disagree(seed, how):
    rank = dist.get_rank()
    net = models.make_model(seed, layers=3 if how == "model" and rank == 1 else 2)
    predicate = models.is_matrix
    if how == "predicate" and rank == 1:
        predicate = lambda name, p: models.is_matrix(name, p) and "up" not in name  # noqa: E731
    if how == "dtype" and rank == 1:
        net = net.to(torch.bfloat16)
    if how == "order" and rank == 1:
        net.layers = nn.ModuleList(net.layers[::-1])
        net.layers[0].up, net.layers[0].few_rows = net.layers[0].few_rows, net.layers[0].up
    z3 = not (how == "mode" and rank == 1)
    if how == "failure" and rank == 1:
        net.layers[0].register_parameter("stack", nn.Parameter(torch.zeros(2, 3, 4)))
        net.layers[0].stack.muon_view = object()  # planning raises on this rank only
    start = time.monotonic()
    names = [n for n, _ in net.named_parameters()]
    try:
        models.shard(net, predicate=predicate, reshard_after_forward=z3)
    except (RuntimeError, AttributeError) as error:
        still = [n for n, _ in net.named_parameters()]
        return str(error), time.monotonic() - start, sorted(still) == sorted(names)
    return None


@pytest.mark.parametrize("how", ["model", "predicate", "dtype", "order", "mode"])
def test_plans_that_differ_raise_on_every_rank(seed, how):
    for message, seconds, restored in run_on_ranks(2, disagree, seed, how):
        assert "ownership plan must be the same on every rank; got 2 plans (ranks [0]:" in message
        assert "Check that model, predicate, parameter order, dtypes and rates agree." in message
        assert seconds < 10
        assert restored


def test_a_rank_that_fails_while_planning_stops_the_others(seed):
    (other, seconds, _), (own, _, _) = run_on_ranks(2, disagree, seed, "failure")
    assert "ranks must all be able to dedicate parameters; ranks [1] failed" in other
    assert "matrix_shapes" in own
    assert seconds < 10


def die(seed, moment):
    rank = dist.get_rank()
    net = models.shard(models.make_model(seed))
    optimizer = models.Stepper(net)
    for step in range(3):
        if step == 1 and rank == 1:
            if moment == "forward":
                net.layers[1].register_forward_pre_hook(lambda *_: os._exit(17))
            elif moment == "backward":
                net.layers[1].register_full_backward_hook(lambda *_: os._exit(17))
            else:
                os._exit(17)
        models.loss_of(net, models.batch(seed, rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("moment", ["between steps", "forward", "backward"])
def test_a_killed_rank_makes_the_others_end_with_an_error(seed, moment):
    survivor, dead = outcomes_on_ranks(2, die, seed, moment, timeout=LIMIT)
    assert "exit code 17" in dead.error
    assert "RuntimeError" in survivor.error or "DistBackendError" in survivor.error
    assert survivor.seconds < LIMIT


class OwnedOnly(nn.Module):
    """A block of matrices alone: FSDP2 has nothing in it, so our own message shows."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(models.HIDDEN, models.INTER, bias=False)
        self.b = nn.Linear(models.INTER, models.HIDDEN, bias=False)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


class Skipping(models.TinyModel):
    def __init__(self, block):
        super().__init__(block=block)
        self.skip = None

    def forward(self, ids):
        x = self.embed(ids)
        for index, layer in enumerate(self.layers):
            if index != self.skip:
                x = layer(x)
        return self.head(x)


def skip_a_layer(seed, block):
    torch.manual_seed(seed)
    net = models.shard(Skipping(block))
    models.loss_of(net, models.batch(seed, 0, 0)).backward()
    if dist.get_rank() == 1:
        net.skip = 1
    models.loss_of(net, models.batch(seed, 0, 1)).backward()
    dist.barrier()


@pytest.mark.parametrize("block", [models.Block, OwnedOnly])
def test_a_layer_skipped_on_one_rank_does_not_hang(seed, block):
    """FSDP2 itself needs every rank to run every unit; what is asked is an error in bounded time."""
    outcomes = outcomes_on_ranks(2, skip_a_layer, seed, block, timeout=LIMIT)
    assert any(not outcome.ok for outcome in outcomes)
    for outcome in outcomes:
        assert outcome.seconds < LIMIT
        assert outcome.ok or "still running" not in outcome.error


def misuse(case):
    mesh = init_device_mesh("cpu", (2,))
    net = models.make_model(0)
    if case == "none chosen":
        models.shard(net, predicate=lambda name, p: False)
    elif case == "twice":
        models.shard(net)
        models.shard(net)
    elif case == "dimensions":
        with dedicate_params(net, mesh, predicate=lambda name, p: p.ndim == 1):
            pass
    elif case == "mesh":
        with dedicate_params(net, init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))):
            pass
    elif case == "unattached":
        runtime_of(net)
    elif case == "mixed dtypes":
        net.layers[0].up.to(torch.bfloat16)
        models.shard(net, predicate=models.is_matrix)
    elif case == "integers":
        net.layers[0].up.weight = nn.Parameter(torch.zeros(3, 4, dtype=torch.int32), requires_grad=False)
        with dedicate_params(net, mesh, predicate=lambda name, p: name == "layers.0.up.weight"):
            pass


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "none chosen",
            "predicate must choose at least one trainable parameter; got none. Call hf_muon.tag_parameters",
        ),
        ("twice", "model must not have dedicated parameters already"),
        ("dimensions", "layers.0.norm.weight must have 2 dimensions (or 3, batch first) to get an owner; got 1"),
        ("mesh", "mesh must have one dimension (shard) or two (replicate, shard); got 3"),
        ("unattached", "model must have dedicated parameters; got one without. Wrap it in dedicate_params first."),
        ("mixed dtypes", "layers.0 must hold owned matrices of one dtype; got ['torch.bfloat16', 'torch.float32']"),
        ("integers", "predicate must choose at least one trainable parameter"),
    ],
)
def test_misuse_is_named(case, message):
    for outcome in outcomes_on_ranks(2, catch, case):
        assert message in outcome.value


def catch(case):
    try:
        misuse(case)
    except ValueError as error:
        return str(error)
    return None


def fail_inside(seed):
    """An exception among the fully_shard calls leaves a whole model."""
    net = models.make_model(seed)
    before = {n: p for n, p in net.named_parameters()}
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ZeroDivisionError), dedicate_params(net, mesh, predicate=models.is_matrix):
        assert "layers.0.up.weight" not in dict(net.named_parameters())
        fully_shard(net.layers[2], mesh=mesh)
        raise ZeroDivisionError
    assert find_runtime(net) is None
    after = dict(net.named_parameters())
    assert set(after) == set(before)
    assert after["layers.0.up.weight"] is before["layers.0.up.weight"]


def test_an_exception_inside_the_context_puts_the_matrices_back(seed):
    run_on_ranks(2, fail_inside, seed)


def owners_beyond(seed):
    """More ranks than matrices: the idle rank takes part in everything."""
    only = lambda name, p: name == "layers.0.up.weight"  # noqa: E731
    net = models.shard(models.make_model(seed, layers=1), predicate=only)
    models.loss_of(net, models.batch(seed, dist.get_rank(), 0)).backward()
    plan = ownership(net)
    grad = net.layers[0].up.weight.grad
    return plan.idle_ranks, grad.to_local().shape[0], grad.full_tensor()


def test_more_ranks_than_matrices(seed):
    rows = run_on_ranks(4, owners_beyond, seed)
    assert rows[0][0] == [1, 2, 3]
    assert [row[1] for row in rows] == [models.INTER, 0, 0, 0]
    for row in rows[1:]:
        assert torch.equal(row[2], rows[0][2])
