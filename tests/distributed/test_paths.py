# SPDX-License-Identifier: Apache-2.0
"""Paths that have broken hook-based runtimes: reuse, nesting, odd outputs, partial use, no gradients, compilation."""

import dataclasses
from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_muon.distributed import comm_stats, dedicate_params, ownership, runtime_of
from tests.distributed import models
from tests.support.worker_pool import run_on_ranks

# One or two ranks' sums, same order as the reference: only rounding in another place may differ.
TIGHT = 2e-6
# The same sums in another order (ranks first, then passes): measured 2e-6 to 6e-6; a lost gradient shows above 1e-2.
REORDERED = 3e-5
STEPS = 3


def compare(net, make, seed, run, *, steps=STEPS, lr=0.02):
    """Train the sharded `net`, and a replica of it on every rank's data in this process; return the distance."""
    world, rank = dist.get_world_size(), dist.get_rank()
    single = make(seed)
    start = {n: p.detach().clone() for n, p in single.named_parameters()}
    optimizer, alone = models.Stepper(net, lr), models.Stepper(single, lr)
    for step in range(steps):
        run(net, seed, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        gradients = []
        for other in range(world):
            single.zero_grad()
            run(single, seed, other, step)
            gradients.append({n: p.grad.clone() for n, p in single.named_parameters() if p.grad is not None})
        for name, p in single.named_parameters():
            parts = [g[name] for g in gradients if name in g]
            total = parts[0] if parts else None
            for part in parts[1:]:
                total = total + part
            p.grad = total / world if parts else None
        alone.step()
    end = {n: p.detach().clone() for n, p in single.named_parameters()}
    return models.distance(start, end, models.whole_state(net))


def backward(net, seed, rank, step):
    models.loss_of(net, models.batch(seed, rank, step)).backward()


def job(make, run, seed, z3, **options):
    net = models.shard(make(seed), reshard_after_forward=z3, **options)
    gap = compare(net, make, seed, run)
    assert runtime_of(net).num_gathered_bytes == 0
    return gap


def check(make, run, seed, bound=TIGHT, **options):
    for z3 in (True, False):
        gaps = run_on_ranks(2, job, make, run, seed, z3, **options)
        assert max(gaps) <= bound, gaps


# ---------------------------------------------------------------------- several forwards, several backwards


def two_forwards(net, seed, rank, step):
    first = models.loss_of(net, models.batch(seed, rank, 2 * step))
    second = models.loss_of(net, models.batch(seed, rank, 2 * step + 1))
    (first + second).backward()


def two_backwards(net, seed, rank, step):
    first = models.loss_of(net, models.batch(seed, rank, 2 * step))
    second = models.loss_of(net, models.batch(seed, rank, 2 * step + 1))
    first.backward()
    second.backward()


def retained_graph(net, seed, rank, step):
    loss = models.loss_of(net, models.batch(seed, rank, step))
    loss.backward(retain_graph=True)
    loss.backward()


def evaluate_between(net, seed, rank, step):
    """Forward without gradients, forward with gradients that nobody uses, then train.

    No evaluation between backward and step: FSDP2 itself keeps its root's parameters stale then (ours: `stale_job`).
    """
    with torch.no_grad():
        models.loss_of(net, models.batch(seed, rank, 100))
    models.loss_of(net, models.batch(seed, rank, 101))
    backward(net, seed, rank, step)


@pytest.mark.parametrize("run", [two_forwards, two_backwards, retained_graph, evaluate_between])
def test_several_passes_per_step(seed, run):
    check(models.make_model, run, seed, bound=TIGHT if run is evaluate_between else REORDERED)


class SharedBlock(models.TinyModel):
    """One block applied three times (ALBERT)."""

    def __init__(self, **options):
        super().__init__(layers=1, **options)

    def forward(self, ids):
        x = self.embed(ids)
        for _ in range(3):
            x = self.layers[0](x) if self.ckpt is None else models.checkpoint(self.layers[0], x, use_reentrant=False)
        return self.head(x)


def make_shared(seed):
    torch.manual_seed(seed)
    return SharedBlock()


def make_shared_checkpointed(seed):
    torch.manual_seed(seed)
    return SharedBlock(ckpt="saved tensors")


def test_a_block_used_several_times_in_one_forward(seed):
    for make in (make_shared, make_shared_checkpointed):
        check(make, backward, seed)


# ---------------------------------------------------------------------- inputs, outputs, nesting


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extras: dict


Pair = namedtuple("Pair", "first second")


class ModelOutputLike(OrderedDict):
    """transformers' ModelOutput: a dict whose items are attributes too."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class NestedBlock(models.Block):
    def forward(self, bundle):
        x = bundle["pair"].first
        y = super().forward(x)
        return Output(hidden=y, extras={"list": [y * 0.5, (Pair(y * 0.25, None),)], "name": "text"})


class NestedModel(models.TinyModel):
    def __init__(self):
        super().__init__(block=NestedBlock)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            bundle = ModelOutputLike()
            bundle["pair"] = Pair(x, [x.detach()])
            out = layer(bundle)
            x = out.hidden + out.extras["list"][0] + out.extras["list"][1][0].first
        return self.head(x)


def make_nested(seed):
    torch.manual_seed(seed)
    return NestedModel()


def test_nested_inputs_and_outputs(seed):
    check(make_nested, backward, seed)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(models.HIDDEN, models.INTER, bias=False)
        self.b = nn.Linear(models.INTER, models.HIDDEN)

    def forward(self, x):
        return self.b(F.gelu(self.a(x)))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.mix = nn.Linear(models.HIDDEN, models.HIDDEN)

    def forward(self, x):
        return x + self.mix(torch.tanh(self.inner(x)))


class OuterModel(models.TinyModel):
    def __init__(self):
        super().__init__(block=Outer)
        self.layers.append(models.Block())  # and one block wrapped once


def make_outer(seed):
    torch.manual_seed(seed)
    return OuterModel()


def nested_job(seed, z3, wrap_blocks):
    """Wrapped modules inside wrapped modules; without `wrap_blocks` every matrix belongs to the root."""
    net = make_outer(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with dedicate_params(net, mesh, reshard_after_forward=z3, predicate=models.is_matrix):
        for layer in net.layers if wrap_blocks else []:
            if hasattr(layer, "inner"):
                fully_shard(layer.inner, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    units = {matrix.unit for matrix in ownership(net).matrices}
    assert ("layers.0.inner" in units) == wrap_blocks
    return compare(net, make_outer, seed, backward)


@pytest.mark.parametrize("wrap_blocks", [True, False])
def test_nested_units_and_a_root_that_owns_everything(seed, wrap_blocks):
    for z3 in (True, False):
        assert max(run_on_ranks(2, nested_job, seed, z3, wrap_blocks)) <= TIGHT


# ---------------------------------------------------------------------- partial use


class Experts(nn.Module):
    """Two experts; rank-dependent data may use either, both or none. 3-D weights, batch first."""

    def __init__(self):
        super().__init__()
        self.stacked = nn.Parameter(torch.randn(2, models.HIDDEN, models.HIDDEN) / 8)
        self.separate = nn.ModuleList(nn.Linear(models.HIDDEN, models.HIDDEN, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(models.HIDDEN)
        self.pick = None

    def forward(self, x):
        h = self.norm(x)
        if self.pick is None:
            return x + h
        return x + torch.tanh(self.separate[self.pick](h)) + torch.tanh(h @ self.stacked[self.pick])


class ExpertModel(models.TinyModel):
    def __init__(self):
        super().__init__(block=Experts, layers=2)


def make_experts(seed):
    torch.manual_seed(seed)
    return ExpertModel()


def crossed(net, seed, rank, step):
    """Rank 0 takes expert 0 in the first layer and 1 in the second; rank 1 the other way round."""
    for index, layer in enumerate(net.layers):
        layer.pick = (rank + index) % 2
    backward(net, seed, rank, step)


def one_rank_only(net, seed, rank, step):
    """Only rank 1 uses experts at all: every gradient of theirs is None on rank 0."""
    for layer in net.layers:
        layer.pick = 1 if rank == 1 else None
    backward(net, seed, rank, step)


def nobody(net, seed, rank, step):
    """Expert 0 is used by no rank: no update, no decay."""
    for layer in net.layers:
        layer.pick = 1
    backward(net, seed, rank, step)


def expert_job(run, seed, z3):
    net = models.shard(make_experts(seed), reshard_after_forward=z3)
    before = models.whole_state(net)
    gap = compare(net, make_experts, seed, run)
    after = models.whole_state(net)
    return gap, {name for name in before if torch.equal(before[name], after[name])}


@pytest.mark.parametrize("run", [crossed, one_rank_only, nobody])
def test_case_22_experts_used_by_some_ranks_or_none(seed, run):
    for z3 in (True, False):
        for gap, unchanged in run_on_ranks(2, expert_job, run, seed, z3):
            assert gap <= TIGHT
            if run in (one_rank_only, nobody):
                assert {"layers.0.separate.0.weight", "layers.1.separate.0.weight"} <= unchanged
            else:
                assert not {name for name in unchanged if "separate" in name}


class Unreached(models.TinyModel):
    """The last block runs, but its output is not part of the loss on rank-dependent steps."""

    def __init__(self):
        super().__init__()
        self.use_last = True

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers[:-1]:
            x = layer(x)
        last = self.layers[-1](x)
        return self.head(last if self.use_last else x + 0.0 * last)


def make_unreached(seed):
    torch.manual_seed(seed)
    return Unreached()


def last_block_zeroed_on_rank_one(net, seed, rank, step):
    net.use_last = rank == 0
    backward(net, seed, rank, step)


def test_a_block_whose_output_does_not_matter_on_one_rank(seed):
    check(make_unreached, last_block_zeroed_on_rank_one, seed)


def frozen_first(seed):
    net = models.make_model(seed)
    for p in [*net.embed.parameters(), *net.layers[0].parameters()]:
        p.requires_grad_(False)
    return net


def frozen_embedding(seed):
    net = models.make_model(seed)
    net.embed.weight.requires_grad_(False)  # the first block's inputs need no gradient: only the end of backward acts
    return net


def frozen_middle(seed):
    net = models.make_model(seed)
    for p in net.layers[1].parameters():
        p.requires_grad_(False)
    return net


@pytest.mark.parametrize("make", [frozen_first, frozen_embedding, frozen_middle])
def test_frozen_parts(seed, make):
    check(make, backward, seed)


def skip_micro_batch(seed, z3):
    """A block that runs in the first micro-batch only must still be sent with the last."""
    net = models.shard(make_experts(seed), reshard_after_forward=z3)
    for layer in net.layers:
        layer.pick = 0
    net.set_requires_gradient_sync(False)
    backward(net, seed, dist.get_rank(), 0)
    net.set_requires_gradient_sync(True)
    for layer in net.layers:
        layer.pick = 1
    backward(net, seed, dist.get_rank(), 1)
    return [
        (p.has_gradient, p.grad.to_local().abs().sum().item() > 0) for p in runtime_of(net).parameters if p.is_local
    ]


def test_gradients_of_earlier_micro_batches_arrive(seed):
    for z3 in (True, False):
        for flags in run_on_ranks(2, skip_micro_batch, seed, z3):
            assert all(flag == (True, True) for flag in flags)


# ---------------------------------------------------------------------- no gradients, generation, compilation


def generate_job(seed, z3):
    net = models.shard(models.make_model(seed), reshard_after_forward=z3)
    single = models.make_model(seed)
    ids = models.batch(seed, 0, 0)
    comm_stats(net, reset=True)
    with torch.no_grad():
        for _ in range(4):
            logits = net(ids)
            assert torch.allclose(logits, single(ids), atol=1e-6)
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    elements = sum(m.numel for m in ownership(net).matrices)
    resident = runtime_of(net).num_gathered_bytes
    runtime_of(net).reshard()
    return comm_stats(net)["broadcast"] / 4 / elements, resident / 4 / elements, runtime_of(net).num_gathered_bytes


def test_generation_keeps_z2_copies_and_frees_z3_copies(seed):
    assert run_on_ranks(2, generate_job, seed, True) == [(4, 0, 0)] * 2
    assert run_on_ranks(2, generate_job, seed, False) == [(1, 1, 0)] * 2


def stale_job(seed):
    """Z2 copies that an evaluation left must not survive a step, an in-place change or a load."""
    net = models.shard(models.make_model(seed), reshard_after_forward=False)
    ids = models.batch(seed, 0, 0)
    optimizer = models.Stepper(net)
    outputs = []

    def evaluate():
        with torch.no_grad():
            outputs.append(net(ids).clone())

    evaluate()
    backward(net, seed, dist.get_rank(), 0)
    evaluate()
    optimizer.step()
    evaluate()
    with torch.no_grad():
        for parameter in runtime_of(net).parameters:
            parameter.mul_(1.5)
    evaluate()
    fresh = models.make_model(seed)
    fresh.load_state_dict(models.whole_state(net))
    return outputs, fresh(ids).detach()


def test_resident_copies_follow_the_weights(seed):
    for outputs, expected in run_on_ranks(2, stale_job, seed):
        assert torch.equal(outputs[0], outputs[1])
        assert not torch.equal(outputs[1], outputs[2])
        assert not torch.equal(outputs[2], outputs[3])
        assert torch.allclose(outputs[3], expected, atol=1e-6)


def compile_job(seed, backend, z3):
    torch._dynamo.reset()
    net = models.make_model(seed, layers=2)
    for layer in net.layers:
        layer.compile(backend=backend)
    models.shard(net, reshard_after_forward=z3)
    torch._dynamo.utils.counters.clear()
    gap = compare(net, lambda s: models.make_model(s, layers=2), seed, backward, steps=2)
    counters = torch._dynamo.utils.counters
    return gap, counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_of_blocks(seed, backend):
    for gap, graphs in run_on_ranks(2, compile_job, seed, backend, True):
        assert gap <= TIGHT
        assert graphs >= 1


def raise_and_recover(seed):
    net = models.shard(models.make_model(seed))
    hook = net.layers[1].register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(net, seed, dist.get_rank(), 0)
    hook.remove()
    net.reset_iter_state()
    runtime_of(net).reset()
    return compare(net, models.make_model, seed, backward)


def test_training_goes_on_after_an_exception_in_forward(seed):
    assert max(run_on_ranks(2, raise_and_recover, seed)) <= TIGHT
