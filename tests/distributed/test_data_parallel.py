# SPDX-License-Identifier: Apache-2.0
"""Owners under DistributedDataParallel: 2 and 4 ranks against one process, with the real optimizer."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_muon
from hf_muon.optim import functional
from hf_muon.orthogonalize import ns_flops
from tests.distributed import models, replicas
from tests.support.worker_pool import run_on_ranks

TIGHT = 2e-6  # of the largest movement of any weight
CASES = {
    "clipped": {"clip": 0.1},
    "clipped, foreach": {"clip": 0.1, "foreach": True},
    "clipped, loop": {"clip": 0.1, "foreach": False},
    "largest element": {"clip": 1e-3, "order": math.inf},
    "no_sync": {"micro": 3, "clip": 0.1},
    "synchronized twice": {"micro": 2, "sync_each": True, "clip": 0.1},
    "synchronized twice, views": {"micro": 2, "sync_each": True, "ddp": {"gradient_as_bucket_view": True}},
    "gradients set to zero": {"clip": 0.1, "set_to_none": False, "micro": 2},
    "unused on one rank": {"skips": (1, None), "ddp": {"find_unused_parameters": True}},
    "unused everywhere": {"skips": (1, 1), "clip": 0.1, "ddp": {"find_unused_parameters": True}},
    "unused, synchronized twice": {
        "skips": (1, 1),
        "micro": 2,
        "sync_each": True,
        "ddp": {"find_unused_parameters": True},
    },
    "static graph": {"ddp": {"static_graph": True}},
    "views": {"clip": 0.1, "ddp": {"gradient_as_bucket_view": True}},
    "small buckets": {"clip": 0.1, "ddp": {"bucket_cap_mb": 0.02}},
    "reentrant checkpointing": {"ckpt": "reentrant", "clip": 0.1},
    "checkpointing": {"ckpt": "saved tensors", "clip": 0.1},
    "bf16 autocast": {"autocast": True, "clip": 0.1},
    "tied embeddings": {"tied": True, "clip": 0.1},
    "all on Muon, as LoRA": {"lora": True, "clip": 0.1},
}


def gap(reference, results):
    """Largest difference to one process, relative to the largest movement; all ranks must agree to the bit."""
    replicas.assert_same_bits(results)
    return models.distance(reference["start"], reference["end"], results[0]["end"])


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process(seed, case):
    """Sums of two terms have one order, so the same numbers are added here and there."""
    options = dict(CASES[case])
    results = run_on_ranks(2, replicas.many, seed, **options)
    alone = {key: value for key, value in options.items() if key not in ("ddp", "foreach", "set_to_none")}
    reference = replicas.one_process(seed, 2, **alone)
    found = gap(reference, results)
    print(f"{case}: {found:.1e} of the movement")
    assert found <= TIGHT
    if "clip" in options:
        assert min(reference["norms"]) > options["clip"]  # it bites
        assert results[0]["norms"] == pytest.approx(reference["norms"], rel=1e-6)


@pytest.mark.parametrize("options", [{"clip": 0.1}, {"lora": True}], ids=str)
def test_four_ranks_equal_one_process(seed, options):
    """gloo's order of four-term sums is its own: measured beside what another order does to one process.

    eps is 1e-6: with the default AdamW turns the rounding of gradients that cancel into a share of a step.
    """
    options = {**options, "eps": 1e-6}
    results = run_on_ranks(4, replicas.many, seed, **options)
    reference = replicas.one_process(seed, 4, **options)
    other = replicas.one_process(seed, 4, sums=(3, 1, 2, 0), **options)
    noise = models.distance(reference["start"], reference["end"], other["end"])
    found = gap(reference, results)
    print(f"4 ranks: {found:.1e} of the movement; another order of sums alone: {noise:.1e}")
    assert found <= max(TIGHT, 5 * noise)
    holders = [name for result in results for name in result["momentum"]]
    assert sorted(holders) == sorted(reference["momentum"])


class Traffic(TorchDispatchMode):
    """Elements of every collective where it reaches the dispatcher, those of DDP's C++ included."""

    def __init__(self):
        super().__init__()
        self.elements = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__.strip("_")
            size = max((leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)), default=0)
            self.elements[name] = self.elements.get(name, 0) + size
        return func(*args, **(kwargs or {}))


def traffic(seed, **options):
    net = replicas.make(seed)
    model = replicas.wrap(net, **options)
    optimizer = hf_muon.OptimizerFactory()(model, **replicas.OPTIONS)
    found = []
    for step in range(3):  # DDP rebuilds its buckets after the first
        hf_muon.comm_stats(model, reset=True)
        with Traffic() as counted:
            models.loss_of(model, models.batch(seed, dist.get_rank(), step)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            in_backward = dict(counted.elements)
            optimizer.step()
            optimizer.zero_grad()
        found.append((in_backward, counted.elements, hf_muon.comm_stats(model)))
    return found


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.02}], ids=str)
def test_no_element_of_a_matrix_is_in_an_all_reduce(seed, options):
    sizes, rest = replicas.muon_sizes(seed)
    matrices, norms = sum(sizes), 2 * len(sizes)
    for rank in run_on_ranks(2, traffic, seed, **options):
        for in_backward, in_all, stats in rank:
            own = in_backward.pop("broadcast", 0)  # DDP's rebuilt bucket order, a few indices
            assert in_backward == {"allreduce": rest + norms, "reduce": matrices}
            assert in_all == {**in_backward, "broadcast": matrices + own}
            counted = {kind: count for kind, count in stats.items() if count}
            expected = {"broadcast": matrices, "reduce": matrices, "all_reduce": rest, "control": norms}
            assert counted == {kind: 4 * count for kind, count in expected.items()}


def count_work(job, *args, **kwargs):
    """Run `job`; return its result and the FLOPs of every Newton-Schulz that really ran."""
    original, flops = functional.newton_schulz_many, []

    def counted(matrices, **options):
        flops.extend(ns_flops(*matrix.shape[-2:], batch=math.prod(matrix.shape[:-2])) for matrix in matrices)
        return original(matrices, **options)

    functional.newton_schulz_many = counted
    try:
        return job(*args, **kwargs), sum(flops), len(flops)
    finally:
        functional.newton_schulz_many = original


@pytest.mark.parametrize("world_size", [2, 4])
def test_case_25_work_and_momentum_are_once_per_job_under_ddp(seed, world_size):
    reference, flops, calls = count_work(replicas.one_process, seed, 1)
    ranks = run_on_ranks(world_size, count_work, replicas.many, seed)
    print("FLOPs of all ranks against one process:", sum(rank[1] for rank in ranks) / flops)
    assert sum(rank[2] for rank in ranks) == calls > 0
    assert sum(rank[1] for rank in ranks) <= 1.05 * flops
    held = sum(value.numel() for rank in ranks for value in rank[0]["momentum"].values())
    assert held == sum(value.numel() for value in reference["momentum"].values())
    assert max(rank[1] for rank in ranks) <= 1.4 * flops / world_size  # and it is shared


def bad_gradient(seed, rank_with_it):
    net = replicas.make(seed)
    model = replicas.wrap(net)
    optimizer = hf_muon.OptimizerFactory()(model, **replicas.OPTIONS)
    skipped = []
    for step in range(3):
        before = replicas.values(net)
        loss = models.loss_of(model, models.batch(seed, dist.get_rank(), step))
        if step == 1 and dist.get_rank() == rank_with_it:
            layer = net.layers[1].up.weight
            handle = layer.register_hook(lambda grad: grad.index_fill(0, torch.tensor([2]), math.nan))
            loss.backward()
            handle.remove()
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(all(torch.equal(value, before[name]) for name, value in replicas.values(net).items()))
    return skipped, optimizer.num_skipped_steps, replicas.values(net)


@pytest.mark.parametrize("rank_with_it", [0, 1])
def test_case_13_nan_on_one_rank_skips_the_step_on_all(seed, rank_with_it):
    first, second = run_on_ranks(2, bad_gradient, seed, rank_with_it)
    assert first[:2] == second[:2] == ([False, True, False], 1)
    assert all(torch.equal(value, second[2][name]) for name, value in first[2].items())


def scaled(seed, overflow):
    net = replicas.make(seed)
    model = replicas.wrap(net)
    optimizer = hf_muon.OptimizerFactory()(model, **replicas.OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(3):
        loss = models.loss_of(model, models.batch(seed, dist.get_rank(), step))
        scaler.scale(loss * (math.inf if overflow and step == 1 and dist.get_rank() == 1 else 1)).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return replicas.values(net), scaler.get_scale(), norm.item()


def test_loss_scaling_changes_nothing_and_agrees_about_overflow(seed):
    first, second = run_on_ranks(2, scaled, seed, False)
    (plain, *_), _ = run_on_ranks(2, unscaled, seed)
    assert first[1:] == second[1:] and first[1] == 2.0**8
    assert all(torch.equal(first[0][name], plain[name]) for name in plain)  # a power of two
    first, second = run_on_ranks(2, scaled, seed, True)
    assert first[1:] == second[1:] and first[1] == 2.0**7
    assert all(torch.equal(value, second[0][name]) for name, value in first[0].items())


def unscaled(seed):
    net = replicas.make(seed)
    model = replicas.wrap(net)
    optimizer = hf_muon.OptimizerFactory()(model, **replicas.OPTIONS)
    for step in range(3):
        models.loss_of(model, models.batch(seed, dist.get_rank(), step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return (replicas.values(net),)
