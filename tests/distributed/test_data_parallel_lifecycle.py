# SPDX-License-Identifier: Apache-2.0
"""Owners under DDP around the step: state on one rank, gradients on one rank, wrapping, refusals, fallbacks."""

import copy
import logging
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_muon
from hf_muon.distributed import OwnedGradient
from hf_muon.distributed.exchange import MAX_PARCEL_BYTES, pack_parcels
from tests.distributed import models, replicas
from tests.support.worker_pool import outcomes_on_ranks, run_on_ranks


def prepared(seed, **options):
    net = replicas.make(seed)
    model = replicas.wrap(net, **options)
    return net, model, hf_muon.OptimizerFactory()(model, **replicas.OPTIONS)


def train(model, optimizer, seed, steps):
    for step in steps:
        models.loss_of(model, models.batch(seed, dist.get_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def message_of(function, *args, **kwargs):
    """What `function` raises, as text."""
    try:
        function(*args, **kwargs)
    except Exception as error:  # any kind: the caller asserts on the text, None fails it
        return f"{type(error).__name__}: {error}"
    return None


# ---------------------------------------------------------------- state


def state_on_rank_zero(seed):
    net, model, optimizer = prepared(seed)
    fresh = copy.deepcopy(optimizer.state_dict())  # nothing has moved yet
    train(model, optimizer, seed, range(2))
    alone = message_of(optimizer.state_dict) if dist.get_rank() == 0 else None  # returns: no collective
    optimizer.consolidate_state_dict(to=0)
    state = copy.deepcopy(optimizer.state_dict()) if dist.get_rank() == 0 else message_of(optimizer.state_dict)
    optimizer.consolidate_state_dict(to=None)
    everywhere = copy.deepcopy(optimizer.state_dict())
    held = {n: replicas.momentum_of(optimizer, p) for n, p in net.named_parameters() if replicas.is_muon(p)}
    train(model, optimizer, seed, [2])
    later = message_of(optimizer.state_dict)
    return fresh, alone, state, everywhere, held, later, replicas.values(net)


def momenta(state):
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    return {names[n]: s["momentum_buffer"] for n, s in state["state"].items() if "momentum_buffer" in s}


def test_one_rank_alone_gets_state_after_consolidation_and_an_error_before(seed):
    first, second = run_on_ranks(2, state_on_rank_zero, seed)
    fresh, alone, state, everywhere, _, later, _ = first
    wanted = "must be gathered before state_dict(); it is on rank 1. Call optimizer.consolidate_state_dict(to=0)"
    assert wanted in alone and wanted in later and "it is on rank 0" in second[2]
    assert all(not value.any() and value.ndim >= 2 for value in momenta(fresh).values())
    for name, value in momenta(state).items():
        parts = [part[4][name] for part in (first, second)]
        whole = [part for part in parts if part.numel()]
        assert len(whole) == 1 and torch.equal(value, whole[0])  # on one rank only, and that one was found
        assert torch.equal(value, momenta(everywhere)[name]) and torch.equal(value, momenta(second[3])[name])


def go_on(seed, state, weights, steps):
    """Load whole state on every rank, before the first forward and again after it, and train."""
    net, model, optimizer = prepared(seed + 1)
    optimizer.load_state_dict(state)
    train(model, optimizer, seed, [0])
    optimizer.load_state_dict(state)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(weights[name])
    train(model, optimizer, seed, steps)
    held = sum(s["momentum_buffer"].numel() for s in optimizer.state.values() if "momentum_buffer" in s)
    return replicas.values(net), held


def checkpoint(seed):
    net, model, optimizer = prepared(seed)
    train(model, optimizer, seed, range(2))
    optimizer.consolidate_state_dict()
    weights = replicas.values(net)
    state = copy.deepcopy(optimizer.state_dict()) if dist.get_rank() == 0 else None
    train(model, optimizer, seed, range(2, 4))
    return state, weights, replicas.values(net)


def test_state_loads_on_every_rank_to_the_same_bits_and_in_one_process(seed):
    state, weights, end = run_on_ranks(2, checkpoint, seed)[0]
    results = run_on_ranks(2, go_on, seed, state, weights, range(2, 4))
    for result, _ in results:
        assert all(torch.equal(value, result[name]) for name, value in end.items())
    sizes, _ = replicas.muon_sizes(seed)
    assert sum(held for _, held in results) == sum(sizes)
    alone = replicas.make(seed)
    optimizer = hf_muon.OptimizerFactory()(alone, **replicas.OPTIONS)
    optimizer.load_state_dict(state)
    for name, value in momenta(state).items():
        assert torch.equal(optimizer.state[alone.get_parameter(name)]["momentum_buffer"], value)


def wrapped_again(seed):
    """A second DDP module around the same model, in the middle of training."""
    net, model, optimizer = prepared(seed)
    train(model, optimizer, seed, range(2))
    again = replicas.wrap(net, gradient_as_bucket_view=True)
    assert optimizer.dedicate_matrices(again)
    whole = copy.deepcopy(optimizer.state_dict())  # everyone has everything until the next forward
    train(again, optimizer, seed, range(2, 4))
    return whole, replicas.values(net)


def test_wrapping_the_model_again_keeps_momentum(seed):
    (first, end), (second, _) = run_on_ranks(2, wrapped_again, seed)
    assert all(torch.equal(value, momenta(second)[name]) for name, value in momenta(first).items())
    assert all(value.any() for value in momenta(first).values())
    _, _, wanted = run_on_ranks(2, checkpoint, seed)[0]
    assert all(torch.equal(value, end[name]) for name, value in wanted.items())


# ---------------------------------------------------------------- gradients


def scaled_together(seed):
    net, model, _ = prepared(seed)
    models.loss_of(model, models.batch(seed, 0, 0)).backward()
    grads = [p.grad for p in net.parameters() if isinstance(p.grad, OwnedGradient)]
    before = [float(torch.linalg.vector_norm(grad)) for grad in grads]
    torch._foreach_mul_(grads, 0.5)  # a list of owned gradients alone
    return before, [float(torch.linalg.vector_norm(grad)) for grad in grads]


def test_owned_gradients_alone_are_scaled_once(seed):
    for before, after in run_on_ranks(2, scaled_together, seed):
        assert before and all(after) and after == pytest.approx([value / 2 for value in before], rel=1e-6)


def gradient_answers(seed):
    net, model, _ = prepared(seed)
    models.loss_of(model, models.batch(seed, dist.get_rank(), 0)).backward()
    rank, found = dist.get_rank(), {}
    if rank == 0:  # one rank alone may ask, again and again
        found["norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()
    names = [name for name, p in net.named_parameters() if isinstance(p.grad, OwnedGradient)]
    gradients = {name: net.get_parameter(name).grad for name in names}
    assert sorted(names) == sorted(m.name for m in hf_muon.ownership(model).matrices)
    for gradient in gradients.values():
        content = gradient.content
        assert (content.local is not None) == (content.owner == rank)
        assert torch.isfinite(gradient).all() and not gradient.isnan().any()
        if content.local is not None:
            assert gradient.norm() == content.local.norm()
            assert gradient.norm(p=math.inf) == content.local.abs().max()
            assert torch.linalg.vector_norm(gradient, dtype=torch.float64).dtype == torch.float64
    name, gradient = next(iter(gradients.items()))
    before = gradient.norm()
    copy = gradient.clone()
    gradient.mul_(-2.0).div_(torch.tensor(4.0))
    assert torch.allclose(gradient.norm(), before / 2) and copy.norm() == before
    assert gradient.detach().norm() == gradient.norm()
    for value in (math.nan, math.inf):
        copy.mul_(value)
        assert not torch.isfinite(copy).any()
    gradient.detach().zero_()
    assert gradient.norm() == 0
    refused = {
        "addition": lambda: gradient.add_(1.0),
        "abs": lambda: gradient.abs(),
        "a norm of order 1": lambda: gradient.norm(p=1),
        "a norm along some dimensions": lambda: torch.linalg.vector_norm(gradient, dim=0),
        "multiplication by more than one number": lambda: gradient.mul_(torch.ones(gradient.shape)),
        "copy_": lambda: torch.empty(gradient.shape).copy_(gradient),
        "clamp_": lambda: torch.nn.utils.clip_grad_value_(net.parameters(), 0.1, foreach=False),
        "pickling": lambda: pickle.dumps(gradient),
    }
    found["messages"] = {what: message_of(action) for what, action in refused.items()}
    return name, found, gradient.content.owner


def test_an_owned_gradient_answers_alike_everywhere_and_refuses_the_rest_by_name(seed):
    for name, found, owner in run_on_ranks(2, gradient_answers, seed):
        for what, message in found["messages"].items():
            assert f".grad must not be used in {what}: under DDP only its owner, rank" in message, (what, message)
            assert "dmuon=off keeps whole gradients everywhere" in message
        assert (
            f"{name}.grad must not be used in abs: under DDP only its owner, rank {owner}" in found["messages"]["abs"]
        )


def unreduced(seed):
    net, model, optimizer = prepared(seed)
    models.loss_of(net, models.batch(seed, 0, 1)).backward()  # DDP has seen no forward yet
    first = message_of(optimizer.step)
    optimizer.zero_grad()
    train(model, optimizer, seed, [0])
    before = replicas.values(net)
    messages = []
    with model.no_sync():
        models.loss_of(model, models.batch(seed, 0, 1)).backward()
    messages.append(message_of(optimizer.step))
    optimizer.zero_grad()
    models.loss_of(net, models.batch(seed, 0, 1)).backward()
    messages.append(message_of(optimizer.step))
    optimizer.zero_grad()
    models.loss_of(model, models.batch(seed, 0, 1)).backward()
    with model.no_sync():
        models.loss_of(model, models.batch(seed, 0, 1)).backward()
    messages.append(message_of(torch.nn.utils.clip_grad_norm_, model.parameters(), 1.0))
    messages.append(message_of(optimizer.step))
    same = all(torch.equal(value, before[name]) for name, value in replicas.values(net).items())
    optimizer.zero_grad()  # and all is well again, also what was added above is forgotten
    train(model, optimizer, seed, [1])
    return [*messages, first], same, replicas.values(net)


def plainly(seed):
    net, model, optimizer = prepared(seed)
    train(model, optimizer, seed, [0, 1])
    return replicas.values(net)


def test_a_step_on_gradients_of_one_rank_raises_and_changes_nothing(seed):
    wanted = run_on_ranks(2, plainly, seed)[0]
    for messages, same, end in run_on_ranks(2, unreduced, seed):
        assert all("must be reduced" in message for message in messages) and same
        assert "the last backward ran inside no_sync()" in messages[2]
        assert all(torch.equal(value, end[name]) for name, value in wanted.items())


def interrupted(seed):
    """A backward that raises before any bucket was sent; then DDP goes on."""
    net, model, optimizer = prepared(seed)
    train(model, optimizer, seed, [0])
    models.loss_of(model, models.batch(seed, dist.get_rank(), 7)).backward()
    loss = models.loss_of(model, models.batch(seed, dist.get_rank(), 8))

    def fail(_):
        raise ValueError("on purpose")

    loss.register_hook(fail)
    text = message_of(loss.backward)
    optimizer.zero_grad()
    train(model, optimizer, seed, [1])
    return text, replicas.values(net)


def test_a_backward_that_raised_leaves_nothing_behind(seed):
    wanted = run_on_ranks(2, plainly, seed)[0]
    for text, end in run_on_ranks(2, interrupted, seed):
        assert "on purpose" in text
        assert all(torch.equal(value, end[name]) for name, value in wanted.items())


# ---------------------------------------------------------------- wrapping, refusals, fallbacks


def disagree(seed):
    net = replicas.make(seed)
    model = replicas.wrap(net)
    exclude = [r"layers\.0\.up"] if dist.get_rank() == 1 else []
    return message_of(hf_muon.OptimizerFactory(), model, exclude=exclude, **replicas.OPTIONS)


def test_ranks_that_disagree_about_the_plan_all_raise(seed):
    for message in run_on_ranks(2, disagree, seed):
        assert "ownership plan must be the same on every rank; got 2 plans" in message


def custom_hook(state, bucket):
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def falls_back(seed, why):
    logger, lines = logging.getLogger("hf_muon.optim"), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        net = replicas.make(seed)
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        model = replicas.wrap(net, process_group=groups[dist.get_rank()] if why == "one rank" else None)
        if why == "hook":
            model.register_comm_hook(None, custom_hook)
        options = {"dmuon": "off"} if why == "off" else {}
        optimizer = hf_muon.OptimizerFactory()(model, **replicas.OPTIONS, **options)
        assert not optimizer.dedicate_matrices(model)  # asked again: no second line
        train(model, optimizer, seed, range(2))
        assert not any(isinstance(p.grad, OwnedGradient) for p in net.parameters())
        state = optimizer.state_dict()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return [line for line in lines if "No owners" in line], replicas.values(net), momenta(state)


@pytest.mark.parametrize(
    ("why", "text"),
    [
        ("hook", "another communication hook is registered"),
        ("off", "dmuon=off"),
        ("one rank", "the process group has one rank"),
    ],
)
def test_without_owners_every_rank_does_all_the_work_and_one_line_says_why(seed, why, text):
    results = run_on_ranks(2, falls_back, seed, why)
    for lines, _, state in results:
        assert lines == [f"No owners under DDP: {text}. Every rank orthogonalizes every matrix."]
        assert all(value.any() for value in state.values())
    if why != "one rank":
        wanted = run_on_ranks(2, plainly, seed)[0]
        for _, end, _ in results:
            assert all(torch.equal(value, end[name]) for name, value in wanted.items())


def refusals(seed):
    found = []
    net, model, optimizer = prepared(seed)
    with model.join():
        found.append(message_of(train, model, optimizer, seed, [0]))
    net = replicas.make(seed)
    found.append(message_of(hf_muon.OptimizerFactory(), replicas.wrap(net), dmuon="z3", **replicas.OPTIONS))
    other = replicas.wrap(replicas.make(seed))
    found.append(message_of(optimizer.dedicate_matrices, other))
    sparse = replicas.make(seed)
    sparse.embed = nn.Embedding(models.VOCAB, models.HIDDEN, sparse=True)
    found.append(message_of(hf_muon.OptimizerFactory(), replicas.wrap(sparse), **replicas.OPTIONS))
    return found


def test_what_cannot_work_raises_before_training(seed):
    for join, z3, other, sparse in run_on_ranks(2, refusals, seed):
        assert join == (
            "RuntimeError: DistributedDataParallel.join() must not be used with owners: a rank that ran out of data"
            " cannot take part in the optimizer's step. Give every rank as many batches, or set dmuon=off."
        )
        assert "dmuon=z3 needs FSDP2; got DDP" in z3
        assert "ddp must reduce at least one Muon matrix of this optimizer; got none." in other
        assert "embed.weight must have dense gradients; got sparse=True" in sparse


def subgroups(seed):
    """Two independent jobs of two ranks each inside four."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    job = dist.get_rank() // 2
    net, model, optimizer = prepared(seed + job, process_group=groups[job])
    train(model, optimizer, seed, range(3))
    return replicas.values(net), [m.name for m in hf_muon.ownership(model).matrices_of(dist.get_rank() % 2)]


def test_a_process_group_of_its_own(seed):
    results = run_on_ranks(4, subgroups, seed)
    for first, second in (results[:2], results[2:]):
        assert all(torch.equal(value, second[0][name]) for name, value in first[0].items())
        assert first[1] and second[1] and not set(first[1]) & set(second[1])
    assert not torch.equal(results[0][0]["layers.0.up.weight"], results[2][0]["layers.0.up.weight"])


def two_groups(seed):
    """Models over different ranks: their ranks could not agree to skip a step."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = Pair(replicas.make(seed), replicas.make(seed + 1))
    pair.first = replicas.wrap(pair.first)
    pair.second = replicas.wrap(pair.second, process_group=pairs[dist.get_rank() // 2])
    return message_of(hf_muon.OptimizerFactory(), pair, **replicas.OPTIONS)


def test_models_over_different_ranks_need_an_optimizer_each(seed):
    for message in run_on_ranks(4, two_groups, seed):
        assert "All DDP models of one optimizer must use the same ranks" in message


class Pair(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second


def two_models(seed):
    """Two DDP modules, one optimizer; one matrix is kept out of DDP by its own ignore list."""
    nets = [replicas.make(seed), replicas.make(seed + 1)]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(nets[0], ["layers.2.up.weight"])
    pair = Pair(*map(replicas.wrap, nets))
    optimizer = hf_muon.OptimizerFactory()(pair, **replicas.OPTIONS)
    for step in range(3):
        for model in (pair.first, pair.second):
            models.loss_of(model, models.batch(seed, dist.get_rank(), step)).backward()
        ignored = nets[0].layers[2].up.weight
        dist.all_reduce(ignored.grad.div_(2))  # what who ignores a parameter does by themselves
        optimizer.step()
        optimizer.zero_grad()
    plans = [hf_muon.ownership(model) for model in (pair.first, pair.second)]
    names = [sorted(matrix.name for matrix in plan.matrices) for plan in plans]
    return [replicas.values(net) for net in nets], names, optimizer.state[ignored]["momentum_buffer"].numel()


def test_two_models_on_one_optimizer_and_ddps_own_ignore_list(seed):
    results = run_on_ranks(2, two_models, seed)
    for first, second in zip(*(result[0] for result in results), strict=True):
        assert all(torch.equal(value, second[name]) for name, value in first.items())
    for _, (first, second), numel in results:
        assert set(second) - set(first) == {"layers.2.up.weight"}
        assert numel == models.HIDDEN * models.INTER  # replicated: whole on every rank


def freed(seed):
    import gc
    import weakref

    net, model, optimizer = prepared(seed)
    train(model, optimizer, seed, range(2))
    watched = [weakref.ref(item) for item in (model, net, optimizer, net.layers[0].up.weight)]
    del net, model, optimizer
    gc.collect()
    return [item() is None for item in watched]


def test_models_and_optimizers_are_freed(seed):
    assert run_on_ranks(2, freed, seed) == [[True] * 4] * 2


def second_optimizer(seed):
    """A new optimizer for the same DDP module takes the owners over."""
    net, model, _ = prepared(seed)
    optimizer = hf_muon.OptimizerFactory()(model, **replicas.OPTIONS)
    train(model, optimizer, seed, [0, 1])
    held = [s["momentum_buffer"].numel() > 0 for s in optimizer.state.values() if "momentum_buffer" in s]
    return replicas.values(net), sum(held), len(held)


def test_a_new_optimizer_takes_the_owners_over(seed):
    wanted = run_on_ranks(2, plainly, seed)[0]
    results = run_on_ranks(2, second_optimizer, seed)
    assert results[0][1] + results[1][1] == results[0][2]
    for end, _, _ in results:
        assert all(torch.equal(value, end[name]) for name, value in wanted.items())


def test_parcels_are_bounded_and_owners_take_turns():
    half = MAX_PARCEL_BYTES // 8
    owners, numels = [1, 1, 1, 0, 0, 1], [half, half, 5, 7, half * 9, 2]
    dtypes = [torch.float32] * 5 + [torch.bfloat16]
    parcels = pack_parcels(owners, numels, dtypes)
    assert [(p.owner, p.indices) for p in parcels] == [(0, (3,)), (1, (0, 1)), (0, (4,)), (1, (2,)), (1, (5,))]
    assert all(len({dtypes[i] for i in p.indices}) == 1 for p in parcels)


def dies(seed):
    _, model, optimizer = prepared(seed)
    train(model, optimizer, seed, [0])
    if dist.get_rank() == 1:
        raise SystemError("gone")
    train(model, optimizer, seed, [1])


@pytest.mark.slow
def test_a_rank_that_is_gone_is_an_error_not_a_hang(seed):
    outcomes = outcomes_on_ranks(2, dies, seed, timeout=100)
    assert not any(outcome.ok for outcome in outcomes)
    assert "gone" in outcomes[1].error and "still running" not in outcomes[0].error
