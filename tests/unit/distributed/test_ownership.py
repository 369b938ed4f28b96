# SPDX-License-Identifier: Apache-2.0
"""The ownership plan and packed buffers: plain data, no process group."""

import dataclasses
import itertools
import random

import pytest
import torch

from hf_muon.distributed.buckets import Piece, build_buckets
from hf_muon.distributed.ownership import Matrix, build_plan
from hf_muon.distributed.structures import grad_tensors, replace_grad_tensors
from hf_muon.param_groups import MatrixView


def random_matrices(layers, seed):
    rng = random.Random(seed)
    shapes = [(rng.randrange(1, 200), rng.randrange(1, 200)) for _ in range(rng.randrange(1, 9))]
    return [
        Matrix(f"layers.{layer}.m{i}", shape, f"layers.{layer}", float(shape[0] * shape[1] * min(shape)))
        for layer in range(layers)
        for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_every_matrix_has_one_owner_and_work_is_balanced(seed, ranks):
    matrices = random_matrices(6, seed)
    plan = build_plan(matrices, shard=ranks)
    assert len(plan.owners) == len(matrices)
    assert all(0 <= owner < ranks for owner in plan.owners)
    loads = plan.ns_cost_per_rank()
    assert sum(loads) == pytest.approx(sum(m.cost for m in matrices))
    # Longest-processing-time's proven bound is (4/3 - 1/3k) of the optimum, which is at least both of these; the
    # spread may add its 5 %.
    lower = max(sum(loads) / ranks, max(m.cost for m in matrices))
    in_order = sorted((m.cost for m in matrices), reverse=True)
    if len(in_order) > ranks:
        lower = max(lower, in_order[ranks - 1] + in_order[ranks])
    assert max(loads) <= (4 / 3) * 1.05 * lower + 1e-6
    assert sum(plan.elements_per_rank()) == sum(m.numel for m in matrices)
    assert sum(plan.bytes_per_rank()) == 4 * sum(m.numel for m in matrices)


def test_a_layer_is_spread_over_different_owners():
    shapes = [(960, 960), (320, 960), (320, 960), (960, 960), (2560, 960), (2560, 960), (960, 2560)]
    matrices = [
        Matrix(f"{layer}.{i}", shape, f"{layer}", float(shape[0] * shape[1] * min(shape)))
        for layer in range(32)
        for i, shape in enumerate(shapes)
    ]
    plan = build_plan(matrices, shard=8)
    for layer in range(32):
        owners = [owner for m, owner in zip(matrices, plan.owners, strict=True) if m.unit == str(layer)]
        assert len(set(owners)) == len(shapes)
    assert plan.imbalance < 1.1


def test_the_plan_is_a_pure_function_and_its_digest_sees_everything(seed):
    matrices = random_matrices(3, seed)
    plan = build_plan(matrices, replicate=2, shard=3, settings="x")
    again = build_plan([dataclasses.replace(m) for m in matrices], replicate=2, shard=3, settings="x")
    assert plan == again and plan.digest() == again.digest() and hash(plan) == hash(again)
    other = [dataclasses.replace(matrices[0], shape=(1, 1)), *matrices[1:]]
    variants = [
        build_plan(matrices, replicate=3, shard=2, settings="x"),
        build_plan(matrices, replicate=2, shard=3, settings="y"),
        build_plan(other, replicate=2, shard=3, settings="x"),
    ]
    assert len({p.digest() for p in [plan, *variants]}) == 4


def test_one_rank_and_more_ranks_than_matrices():
    matrices = [Matrix("a", (3, 4), "", 5.0), Matrix("b", (2, 3, 4), "", 1.0)]
    assert build_plan(matrices).owners == (0, 0)
    plan = build_plan(matrices, shard=5)
    assert len(set(plan.owners)) == 2
    assert plan.idle_ranks == [rank for rank in range(5) if rank not in plan.owners]
    assert plan.owner_of("b") == plan.owners[1]
    assert [m.name for m in plan.matrices_of(plan.owners[0])] == ["a"]
    assert build_plan([], shard=2).imbalance == 1.0


def test_bad_plans_are_named():
    with pytest.raises(ValueError, match=r"mesh must have at least one rank on each axis; got \(0, 2\)"):
        build_plan([], replicate=0, shard=2)
    with pytest.raises(ValueError, match="a must stand once in the plan; got 2 entries"):
        build_plan([Matrix("a", (1, 1), "", 1.0)] * 2)
    with pytest.raises(ValueError, match="a must have a cost of at least 0; got -1"):
        build_plan([Matrix("a", (1, 1), "", -1.0)])
    with pytest.raises(KeyError, match=r"zz must be a matrix of the ownership plan"):
        build_plan([]).owner_of("zz")


def test_buckets_pack_without_gaps_and_sort_by_replica():
    shapes = [(3, 4), (2, 2, 2), (5, 1), (1, 7)]
    owners = [(1, 0), (0, 0), (0, 2), (1, 0)]
    pieces = [Piece(index, 0, shape, *owners[index]) for index, shape in enumerate(shapes)]
    first, second = build_buckets(pieces)
    assert (first.shard_index, second.shard_index) == (0, 2)
    assert first.numel == 12 + 8 + 7 and second.numel == 5
    assert [segment.replicate_index for segment in first.segments] == [0, 1]
    assert [slot.index for slot in first.slots] == [1, 0, 3]
    position = 0
    for segment in first.segments:
        assert segment.start == position
        for slot in segment.slots:
            assert slot.offset == position
            position = slot.end
        assert segment.end == position
    assert position == first.numel
    assert second.offset == first.numel
    assert build_buckets([]) == ()


def test_split_stacks_keep_every_expert_once_in_rank_order(seed):
    rng = random.Random(seed)
    stacks = [
        Matrix.of_parameter(
            f"{layer}.{i}", (rng.randrange(1, 40), rng.randrange(8, 64), rng.randrange(8, 64)), str(layer)
        )
        for layer in range(5)
        for i in range(2)
    ]
    kernel = Matrix.of_parameter("kernel", (64, 32, 3), "0", view=MatrixView(flatten=True))
    matrices = [*stacks[:3], kernel, *stacks[3:]]
    for shard, replicate in ((1, 1), (3, 1), (8, 1), (4, 3)):
        plan = build_plan(matrices, shard=shard, replicate=replicate, split_stacks=True)
        assert list(dict.fromkeys(m.name for m in plan.matrices)) == [m.name for m in matrices]
        for matrix in matrices:
            rows = [(m, owner) for m, owner in zip(plan.matrices, plan.owners, strict=True) if m.name == matrix.name]
            owners = [owner for _, owner in rows]
            assert owners == sorted(set(owners))
            assert sum(m.shape[0] for m, _ in rows) == matrix.shape[0]
            for (m, owner), (after, _) in itertools.pairwise(
                [*rows, (Matrix("end", (), "", 0, start=matrix.shape[0]), 0)]
            ):
                assert after.start == m.start + m.shape[0] and m.shape[1:] == matrix.shape[1:]
                assert plan.owner_of(matrix.name, m.start + m.experts - 1) == owner
        assert sum(m.name == "kernel" for m in plan.matrices) == 1  # one matrix in three axes
        assert sum(plan.ns_cost_per_rank()) == pytest.approx(sum(m.cost for m in matrices), rel=1e-12)
        assert plan == build_plan(matrices, shard=shard, replicate=replicate, split_stacks=True)


def test_an_expert_is_the_unit_of_balance():
    stack = Matrix("stack", (64, 8, 8), "", 64.0, experts=64)
    plan = build_plan([stack], shard=64, split_stacks=True)
    assert plan.imbalance == plan.imbalance_bound == 1.0
    assert build_plan([stack], shard=1, split_stacks=True).matrices == (stack,)
    plan = build_plan([stack], shard=100, split_stacks=True)
    assert len(plan.idle_ranks) == 36 and plan.imbalance == plan.imbalance_bound == pytest.approx(100 / 64)
    one = build_plan([Matrix("whole", (64, 8, 8), "", 64.0)], shard=4, split_stacks=True)
    assert one.split_stacks == 0 and one.imbalance == one.imbalance_bound == 4.0
    assert build_plan([stack], shard=4).matrices == (stack,)  # only a runtime that can hold parts asks for them


def test_pieces_of_a_stack_lie_side_by_side():
    pieces = [Piece(0, 0, (2, 3, 4), 0, 1), Piece(0, 2, (1, 3, 4), 0, 2), Piece(0, 3, (2, 3, 4), 1, 1)]
    buckets = build_buckets([*pieces, Piece(1, 0, (7, 2), 1, 1)])
    assert [(b.shard_index, b.offset, b.numel) for b in buckets] == [(1, 0, 14), (1, 14, 24), (2, 38, 12), (1, 50, 24)]
    slots = [(b.offset + slot.offset, slot.rows) for b in buckets for slot in b.slots if slot.index == 0]
    assert slots == [(14, slice(0, 2)), (38, slice(2, 3)), (50, slice(3, 5))]
    one_rank_replicas = [Piece(0, 0, (2, 3), 0, 0), Piece(0, 2, (1, 3), 1, 0)]
    (bucket,) = build_buckets(one_rank_replicas)
    assert [(segment.replicate_index, segment.start, segment.end) for segment in bucket.segments] == [
        (0, 0, 6),
        (1, 6, 9),
    ]


def test_tensors_are_found_and_replaced_inside_containers():
    @dataclasses.dataclass(frozen=True)
    class Box:
        a: object
        b: int = 1

    t = [torch.ones(1, requires_grad=True) for _ in range(4)]
    plain = torch.ones(1)
    value = {"x": t[0], "y": [plain, (t[1], Box(t[2]))], "z": None, "cache": object(), "same": [plain]}
    assert grad_tensors((value, t[3])) == t
    fresh = [torch.zeros(1, requires_grad=True) for _ in range(4)]
    new, last = replace_grad_tensors((value, t[3]), fresh)
    assert new["x"] is fresh[0] and new["y"][1][0] is fresh[1] and new["y"][1][1].a is fresh[2] and last is fresh[3]
    assert new["y"][0] is plain and new["cache"] is value["cache"] and new["same"] is value["same"]
    assert value["x"] is t[0]  # the caller's containers are untouched
