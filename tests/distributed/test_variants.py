# SPDX-License-Identifier: Apache-2.0
"""Numeric variants on owned matrices: N ranks walk the path of one process; state survives the checkpoint's layout."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import hf_muon
from hf_muon.distributed import runtime_of
from hf_muon.integrations.transformers.attention_logits import attach_qk_clip
from hf_muon.optim.state_spec import ROW_STATISTICS
from hf_muon.param_groups import MatrixView
from tests.distributed import models
from tests.distributed.test_optimizer import OPTIONS, TIGHT, gap_to_one_process
from tests.support.trainer_runs import tiny_llama
from tests.support.worker_pool import run_on_ranks


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"normuon": True, "offload": "cpu"}, TIGHT),
        # Where a gradient differs in its last bit, a rounding may fall on the other neighbour: 2**-8 of one momentum.
        ({"momentum_dtype": "bfloat16"}, 2e-3),
        # The same, and a code is 1/127 of the largest value of its block.
        ({"momentum_dtype": "int8", "normuon": True, "offload": "cpu"}, 1e-2),
    ],
    ids=["normuon-offload", "bfloat16", "int8-normuon-offload"],
)
def test_variants_on_owners_equal_one_process(seed, options, limit):
    gap = gap_to_one_process(seed, (2,), [[0, 1]], True, **options)
    print(f"{options}: {gap:.2e} of the movement")
    assert gap <= limit


def resume(seed, dtype):
    """Four steps; then again from a state dict taken after two, which holds ordinary sharded DTensors.

    The head is on Muon without an owner here: its momentum stays sharded, its row statistics whole on every rank.
    """
    options = {"normuon": True, "momentum_dtype": dtype, "stochastic_rounding": "true", "offload": "cpu"}

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
    assert_same_in_one_process(seed, net, saved, dtype)
    for model, its_optimizer in ((net, optimizer), (other, second)):
        train(model, its_optimizer, range(2, 4))
    first_state, second_state = models.whole_state(net), models.whole_state(other)
    owned = runtime_of(net).parameters
    shapes = {tuple(optimizer.state[p][ROW_STATISTICS].shape) for p in owned}
    dtypes = {optimizer.state[p]["momentum_buffer"].dtype for p in owned}
    moved = any(not torch.equal(first_state[name], weights[name]) for name in weights)
    plain = {values["momentum_buffer"].dtype for values in saved["state"].values() if "momentum_buffer" in values}
    return all(torch.equal(first_state[n], second_state[n]) for n in weights), moved, shapes, (dtypes, plain)


def assert_same_in_one_process(seed, net, saved, dtype):
    """One process gets the momenta that the owners have, to the bit: blocks of codes start where matrices do."""
    alone = models.make_model(seed).bfloat16()
    hf_muon.tag_parameters(alone)
    single = hf_muon.MuonWithAuxAdam(alone.named_parameters(), **OPTIONS, momentum_dtype=dtype)
    single.load_state_dict(saved)
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    kept = single.state_dict()
    places = {name: n for n, name in enumerate(n for group in kept["param_groups"] for n in group["param_names"])}
    owned = {name for name, parameter in net.named_parameters() if hasattr(parameter, "is_owned")}
    assert owned
    for number, name in enumerate(names):
        if name in owned:
            whole = saved["state"][number]["momentum_buffer"].full_tensor()
            assert whole.any() and torch.equal(kept["state"][places[name]]["momentum_buffer"], whole)


@pytest.mark.parametrize(
    ("dtype", "rests", "is_saved"),
    [("bfloat16", torch.bfloat16, torch.bfloat16), ("int8", torch.uint8, torch.float32)],
)
def test_every_variant_resumes_to_the_bit_through_the_standard_layout(seed, dtype, rests, is_saved):
    for same, moved, shapes, dtypes in run_on_ranks(2, resume, seed, dtype):
        assert same and moved
        assert shapes == {(rows, 1) for rows in (models.HIDDEN, models.INTER, 3)}
        assert dtypes == ({rests}, {is_saved})


THRESHOLD = 20.0


def exploding():
    model = tiny_llama(3).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(60.0)
    hf_muon.tag_parameters(model)
    return model


def token_batch(seed, rank, step):
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(seed % 2**31 + 100 * step + rank))


def clip_on_owners(seed, z3):
    model = exploding()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    with hf_muon.dedicate_params(model, mesh, reshard_after_forward=z3):
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = hf_muon.MuonWithAuxAdam(model.named_parameters(), **OPTIONS, qk_clip=THRESHOLD)
    attach_qk_clip(model, optimizer)
    largest = []
    for step in range(3):
        ids = token_batch(seed, dist.get_rank(), step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        largest.append(float(optimizer.qk_clip.largest))
    return models.whole_state(model), largest


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_qk_clip_on_owners_equals_one_process(seed, z3):
    """The largest logit is over both ranks' batches; only the owner rescales its rows."""
    model = exploding()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = hf_muon.MuonWithAuxAdam(model.named_parameters(), **OPTIONS, qk_clip=THRESHOLD)
    attach_qk_clip(model, optimizer)
    wanted = []
    for step in range(3):
        for rank in range(2):
            ids = token_batch(seed, rank, step)
            (model(input_ids=ids, labels=ids).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(float(optimizer.qk_clip.largest))
    assert wanted[0] > 3 * THRESHOLD
    end = {name: p.detach().clone() for name, p in model.named_parameters()}
    results = run_on_ranks(2, clip_on_owners, seed, z3)
    for state, largest in results:
        assert largest == pytest.approx(wanted, rel=1e-4)  # later logits follow weights that differ in the last bits
        assert models.distance(start, end, state) <= TIGHT


def transposed_rows(seed):
    """A square matrix stored as (in, out): one statistic per output, so per column of the storage."""
    net = models.make_model(seed)
    hf_muon.tag_parameters(net)
    name, chosen = next((n, p) for n, p in net.named_parameters() if p.use_muon and p.ndim == 2)
    chosen.muon_view = MatrixView(transposed=True)
    models.shard(net)
    optimizer = hf_muon.MuonWithAuxAdam(net.named_parameters(), **OPTIONS, normuon=True)
    for step in range(2):
        models.loss_of(net, models.batch(seed, dist.get_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    parameter = dict(net.named_parameters())[name]
    rows = optimizer.state[parameter][ROW_STATISTICS]
    return tuple(parameter.shape), tuple(rows.shape), tuple(rows.to_local().shape), rows.full_tensor()


def test_row_statistics_of_a_transposed_matrix_are_on_its_owner_alone(seed):
    first, second = run_on_ranks(2, transposed_rows, seed)
    shape, rows, *_ = first
    assert rows == (1, shape[1])
    assert sorted(found[2][0] for found in (first, second)) == [0, 1]
    assert torch.equal(first[3], second[3]) and (first[3] > 0).all()
