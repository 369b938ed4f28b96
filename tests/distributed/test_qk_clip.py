# SPDX-License-Identifier: Apache-2.0
"""Clipping attention logits on several ranks: the path of one process, over the ranks that train the model alone."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hf_muon
from hf_muon.integrations.transformers.attention_logits import attach_qk_clip
from tests.distributed import models
from tests.distributed.test_optimizer import OPTIONS, TIGHT
from tests.support.trainer_runs import tiny_llama
from tests.support.worker_pool import run_on_ranks

THRESHOLD = 20.0
STEPS = 3


def exploding():
    """Biases are on AdamW and therefore sharded by FSDP2, not owned: they are rescaled too."""
    model = tiny_llama(3, attention_bias=True).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(60.0) if parameter.ndim == 2 else parameter.add_(torch.linspace(-1, 1, len(parameter)))
    hf_muon.tag_parameters(model)
    return model


def tokens(seed, rank, step):
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(seed % 2**31 + 100 * step + rank))


def make_optimizer(model, exact, **options):
    optimizer = hf_muon.MuonWithAuxAdam(
        model.named_parameters(), **OPTIONS, qk_clip=THRESHOLD, qk_clip_exact=exact, **options
    )
    attach_qk_clip(model, optimizer)
    return optimizer


def one_process(seed, ranks, exact):
    """Gradients are added batch by batch, as ranks add them; what is measured is the maximum over all of them."""
    model = exploding()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer, largest = make_optimizer(model, exact), []
    for step in range(STEPS):
        batches = [tokens(seed, rank, step) for rank in ranks]
        for ids in batches:
            (model(input_ids=ids, labels=ids).loss / len(ranks)).backward()
        # The ranks run their batches at the same time, so the pass to repeat is one over all of them.
        optimizer.qk_clip._source.take_passes()
        model(input_ids=torch.cat(batches))
        optimizer.step()
        optimizer.zero_grad()
        largest.append(float(optimizer.qk_clip.largest))
    return start, {name: p.detach().clone() for name, p in model.named_parameters()}, largest


def many(seed, exact, layout):
    """Train under `layout`; return whole weights and the largest logits that this rank was told."""
    model, rank, world_size = exploding(), dist.get_rank(), dist.get_world_size()
    options, called = {}, model
    if layout.startswith("ddp"):
        halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])] if layout == "ddp-halves" else [None]
        called = DistributedDataParallel(model, process_group=halves[rank // 2 % len(halves)])
    else:
        names = ("replicate", "shard")
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=names) if world_size == 4 else None
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)) if grid is None else grid
        mesh = grid["shard"] if layout == "z3-halves" else mesh
        wrap(model, mesh, layout)
    optimizer, largest = make_optimizer(model, exact, **options), []
    if called is not model:
        optimizer.dedicate_matrices(called)
    for step in range(STEPS):
        ids = tokens(seed, rank, step)
        called(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        largest.append(float(optimizer.qk_clip.largest))
    return models.whole_state(model), largest


def wrap(model, mesh, layout):
    def shard():
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=layout != "z2")
        fully_shard(model, mesh=mesh, reshard_after_forward=layout != "z2")

    if layout == "gathered":
        shard()
        hf_muon.tag_parameters(model)  # its parameters are new ones
        return
    with hf_muon.dedicate_params(model, mesh, reshard_after_forward=layout != "z2"):
        shard()


CASES = [
    ("ddp", [[0, 1]]),
    ("z3", [[0, 1]]),
    ("z2", [[0, 1]]),
    ("gathered", [[0, 1]]),
    ("hsdp", [[0, 1, 2, 3]]),
    ("ddp-halves", [[0, 1], [2, 3]]),  # two models: neither may see the logits of the other
    ("z3-halves", [[0, 1], [2, 3]]),
]


RUNS = [(*case, exact) for case in CASES for exact in (False, True) if len(case[1]) == 1 or not exact]


@pytest.mark.parametrize(
    ("layout", "jobs", "exact"), RUNS, ids=[f"{name}-{'exact' if exact else 'paper'}" for name, _, exact in RUNS]
)
def test_ranks_clip_like_one_process(seed, layout, jobs, exact):
    found = run_on_ranks(sum(map(len, jobs)), many, seed, exact, layout)
    for ranks in jobs:
        start, end, wanted = one_process(seed, ranks, exact)
        assert wanted[0] > 3 * THRESHOLD
        for rank in ranks:
            state, largest = found[rank]
            assert largest == pytest.approx(wanted, rel=1e-4)  # later logits follow weights that differ in last bits
            gap = models.distance(start, end, state)
            print(f"{layout} rank {rank}: {gap:.1e} of the movement, logits {largest}")
            # Four gradients are added in another order; their rounding passes Newton-Schulz and the clipped queries.
            assert gap <= (5 * TIGHT if layout == "hsdp" else TIGHT)
    if len(jobs) == 2:
        assert found[0][1] != found[2][1]


def too_few_calls(seed):
    """One rank calls the inner model only: all ranks raise, none waits."""
    model = exploding()
    ddp = DistributedDataParallel(model)
    optimizer = make_optimizer(model, exact=True)
    ids = tokens(seed, dist.get_rank(), 0)
    ddp(input_ids=ids, labels=ids).loss.backward()
    if dist.get_rank() == 1:
        optimizer.qk_clip._source.take_passes()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)


def test_a_rank_without_a_pass_to_repeat_stops_all(seed):
    for message in run_on_ranks(2, too_few_calls, seed):
        assert message.startswith("qk_clip_exact must repeat the forward of the model; got a step without a call")


def accumulated(seed):
    """Two micro-batches under Z2, which keeps gathered weights between the repeated passes; logits after the step."""
    model, mesh = exploding(), init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    wrap(model, mesh, "z2")
    optimizer, found = make_optimizer(model, exact=True), []
    batches = [tokens(seed, dist.get_rank(), step) for step in range(2)]
    for ids in batches:
        (model(input_ids=ids, labels=ids).loss / 2).backward()
    optimizer.step()
    for ids in batches:
        model(input_ids=ids)  # with gradients: the recorder sees it
        found.append(max(float(logits.largest.max()) for logits in optimizer.qk_clip._source.take()))
    return found


def test_no_micro_batch_of_any_rank_is_above_after_an_exact_step(seed):
    found = [value for values in run_on_ranks(2, accumulated, seed) for value in values]
    assert max(found) <= THRESHOLD
    assert max(found) > 0.9 * THRESHOLD
