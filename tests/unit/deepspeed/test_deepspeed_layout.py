# SPDX-License-Identifier: Apache-2.0
"""The plan of a step on flat partitions: plain numbers, checked against brute force."""

import random

import pytest
import torch

from hf_muon.integrations.deepspeed.exchange import run_plan
from hf_muon.integrations.deepspeed.idle_experts import leave_out_idle, runs_between
from hf_muon.integrations.deepspeed.layout import (
    Piece,
    StepPlan,
    Unit,
    assign_owners,
    partition_pieces,
    split_rounds,
    split_units,
)
from hf_muon.optim.functional import MuonEntry, MuonOptions, muon_update_
from hf_muon.param_groups import MatrixView

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_equal_shares_cover_every_element_once(num_ranks):
    for numel in (1, 5, 7 * num_ranks, random.randrange(1, 500)):
        size = -(-numel // num_ranks)
        pieces = partition_pieces(numel, size, offset=3, num_ranks=num_ranks)
        covered = [piece.start + i for piece in pieces for i in range(piece.numel)]
        assert covered == list(range(numel))
        assert all(piece.offset == 3 and piece.numel <= size for piece in pieces)


def test_experts_are_units_of_their_own_whatever_the_partition():
    shape, size = (5, 3, 4), 12
    cuts = sorted(random.sample(range(1, 60), 3))
    bounds = list(zip([0, *cuts], [*cuts, 60], strict=True))
    pieces = [Piece(rank, 100 * rank, first, last - first) for rank, (first, last) in enumerate(bounds)]
    owner_of = {e: (p.rank, p.offset + e - p.start) for p in pieces for e in range(p.start, p.start + p.numel)}
    units = split_units(0, shape, MatrixView(), pieces)
    assert [unit.shape for unit in units] == [(3, 4)] * 5
    for expert, unit in enumerate(units):
        found = {}
        for piece in unit.pieces:
            for i in range(piece.numel):
                found[expert * size + piece.start + i] = (piece.rank, piece.offset + i)
        assert found == {e: owner_of[e] for e in range(expert * size, (expert + 1) * size)}


def test_a_stacked_or_flattened_parameter_stays_one_unit():
    pieces = [Piece(0, 0, 0, 24)]
    assert len(split_units(0, (2, 3, 4), MatrixView(flatten=True), pieces)) == 1
    assert len(split_units(0, (6, 4), MatrixView(stack=2), pieces)) == 1


VIEWS = {
    "heads": ((96, 32), MatrixView(head_rows=(16,))),
    "fused by head": ((96, 32), MatrixView(parts=(64, 16, 16), head_rows=(16, 16, 16))),
    "grouped queries": ((96, 32), MatrixView(groups=2, parts=(32, 8, 8), head_rows=(8, 8, 8))),
    "Conv1D by head": ((32, 96), MatrixView(transposed=True, parts=(32, 32, 32), head_rows=(8, 8, 0))),
    "experts, fused": ((4, 64, 32), MatrixView(parts=(32, 32), routed=True)),
    "experts, transposed": ((4, 32, 64), MatrixView(transposed=True, groups=32, parts=(1, 1), routed=True)),
    "stacked": ((96, 32), MatrixView(stack=4, transposed=True, routed=True)),
    "adapters": ((48, 16), MatrixView(alternating=4, parts=(32, 16), routed=True)),
    "kernel of three axes": ((24, 16, 3), MatrixView(flatten=True)),
    "transposed kernel": ((32, 16, 2, 2), MatrixView(flatten=True, transposed=True)),
}


@pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("name", VIEWS)
def test_every_view_moves_as_it_does_without_deepspeed(name, rule):
    shape, view = VIEWS[name]
    update, direction = torch.randn(shape), torch.zeros(shape).flatten()
    options = MuonOptions(1.0, 0.0, 0.0, False, "gram", 5, "keller", "float32", rule)
    whole = MuonEntry(torch.zeros(shape), update, torch.zeros(shape), view)
    muon_update_([whole], options)
    units = split_units(0, shape, view, [Piece(0, 0, 0, update.numel())])

    def write(tensor, offset, part):
        direction[offset : offset + part.numel()] += part

    def read(tensor, offset, numel):
        return update.flatten()[offset : offset + numel]

    run_plan(StepPlan(split_rounds(units), 1, 0), read, write, options, torch.device("cpu"))
    # Experts one by one instead of in a batch: rounding of float32 on entries of about 1.
    torch.testing.assert_close(-direction.view(shape), whole.param, rtol=0, atol=1e-5)


def unit(numel, *ranks):
    share = numel // len(ranks)
    pieces = tuple(Piece(rank, 0, index * share, share) for index, rank in enumerate(ranks))
    return Unit(0, (numel // 4, 4), MatrixView(), pieces)


def test_a_matrix_on_one_rank_stays_there_and_split_ones_balance():
    units = [unit(64, 1), unit(64, 1), unit(64, 0, 1), unit(64, 0, 1), unit(64, 0)]
    owners = [entry.owner for entry in assign_owners(units, 2, steps=5, method="gram")]
    assert owners[:2] == [1, 1] and owners[4] == 0
    assert sorted(owners[2:4]) == [0, 1] or owners[2:4] == [0, 0]
    assert owners.count(0) in (2, 3)


def test_rounds_bound_what_an_owner_holds():
    units = assign_owners([unit(40, 0, 1) for _ in range(9)], 2, steps=5, method="gram")
    rounds = split_rounds(units, limit=100)
    assert sorted(map(id, units)) == sorted(id(entry) for row in rounds for entry in row)
    for row in rounds:
        for rank in (0, 1):
            assert sum(entry.numel for entry in row if entry.owner == rank) <= 100
    assert [len(row) for row in split_rounds(units[:1], limit=1)] == [1]


@pytest.mark.parametrize("name", ["experts, fused", "experts, transposed", "stacked"])
def test_experts_without_gradient_leave_the_plan_and_their_pieces_are_named(name):
    shape, view = VIEWS[name]
    rows = torch.randn(shape).view(4, -1)
    rows[[0, 2]] = 0.0
    rows[3] = 0.0
    rows[3, 5] = 1e-30  # one element is enough
    other = Unit(0, (4, 4), MatrixView(), (Piece(0, rows.numel(), 0, 16),))  # a matrix that is no expert stays
    units = [*split_units(0, shape, view, [Piece(0, 0, 0, rows.numel())]), other]
    flat = torch.cat([rows.flatten(), torch.zeros(16)])
    plan, idle = leave_out_idle(StepPlan((tuple(units),), 1, 0), lambda _, *run: flat.narrow(0, *run), CPU)
    assert plan.rounds == ((units[1], units[3], other),)
    size = rows.shape[1]
    assert [(piece.offset, piece.numel) for piece in idle[0]] == [(0, size), (2 * size, size)]
    assert runs_between(flat.numel(), idle[0]) == [(size, size), (3 * size, size + 16)]
    flat.fill_(1.0)
    whole = StepPlan((tuple(units),), 1, 0)
    assert leave_out_idle(whole, lambda _, *run: flat.narrow(0, *run), CPU) == (whole, {})
    assert runs_between(9, ()) == [(0, 9)]
    assert runs_between(9, [Piece(0, 4, 0, 5), Piece(0, 0, 0, 4)]) == []
