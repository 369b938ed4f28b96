# SPDX-License-Identifier: Apache-2.0
"""What is under way while a unit computes, read from recorded spans: issue, wait and work of every rank."""

import itertools

import pytest
import torch
import torch.distributed as dist

from hf_muon.orthogonalize import newton_schulz_many
from hf_muon.tracing import begin_span, record_spans
from tests.distributed import models
from tests.support.worker_pool import run_on_ranks

LAYERS = 4


def with_a_matrix_of_the_root(name, parameter):
    return models.is_matrix(name, parameter) or name == "head.weight"


def spans_of_a_step(seed, z3, mesh_shape=None, predicate=models.is_matrix):
    """Train; return the spans of the third step: in the first nobody knows yet which unit comes next."""
    net = models.make_model(seed, layers=LAYERS)
    models.shard(net, reshard_after_forward=z3, mesh_shape=mesh_shape, predicate=predicate)
    optimizer = models.Stepper(net)
    for step in range(3):
        with record_spans() as spans:
            models.loss_of(net, models.batch(seed, dist.get_rank(), step)).backward()
        optimizer.step()
        net.zero_grad()
    return spans


def work(spans, kind):
    """Return the one span of this kind of every layer, in order."""
    found = [[s for s in spans if s.kind == kind and s.name == f"layers.{k}"] for k in range(LAYERS)]
    assert all(len(one) == 1 for one in found)
    return [one[0] for one in found]


def rounds(spans, kind, what, count):
    """Return for every layer its `count` rounds of collectives of this kind, each the spans of all its owners."""
    result = []
    for k in range(LAYERS):
        flights = [s for s in spans if s.kind == kind and s.name == f"{what} of layers.{k}"]
        per_round, rest = divmod(len(flights), count)
        assert per_round and not rest
        assert all(None not in (s.waited, s.done, s.end) for s in flights)
        result.append([flights[i * per_round : (i + 1) * per_round] for i in range(count)])
    return result


@pytest.mark.parametrize("z3", [True, False])
def test_broadcasts_are_one_unit_ahead_and_reductions_one_behind(seed, z3):
    for spans in run_on_ranks(2, spans_of_a_step, seed, z3):
        forward, backward = work(spans, "forward"), work(spans, "backward")
        gathers = rounds(spans, "broadcast", "broadcast", 2 if z3 else 1)
        for k in range(1, LAYERS):  # on its way before the unit ahead begins to compute, needed when it has
            assert all(s.begin <= forward[k - 1].begin and s.waited >= forward[k - 1].end for s in gathers[k][0])
        if z3:
            for k in range(LAYERS - 1):
                assert all(s.begin <= backward[k + 1].begin and s.waited >= backward[k + 1].end for s in gathers[k][1])
        for flights in itertools.chain.from_iterable(gathers):
            assert {s.peer for s in flights} == {0, 1}  # both ranks own something of every unit
            assert max(s.begin for s in flights) <= min(s.waited for s in flights)
        check_reductions(spans, backward)


def check_reductions(spans, backward):
    for k, (flights,) in enumerate(rounds(spans, "reduce", "gradient reduction", 1)):
        if k > 0:  # sent off before the unit below computes, needed when it has
            assert all(backward[k].end <= s.begin <= backward[k - 1].begin for s in flights)
            assert all(s.waited >= backward[k - 1].end for s in flights)


def test_a_matrix_of_the_root_does_not_hold_the_others_up(seed):
    for spans in run_on_ranks(2, spans_of_a_step, seed, True, predicate=with_a_matrix_of_the_root):
        backward = work(spans, "backward")
        check_reductions(spans, backward)
        of_root = [s for s in spans if s.kind == "reduce" and s.name.endswith("the root module")]
        assert of_root and all(s.begin >= backward[0].end for s in of_root)


def test_publications_to_replicas_hide_behind_the_forward(seed):
    for spans in run_on_ranks(4, spans_of_a_step, seed, True, mesh_shape=(2, 2)):
        forward = work(spans, "forward")
        published = rounds(spans, "replicate_broadcast", "publication", 1)
        for k in range(LAYERS):
            assert all(s.begin <= forward[0].begin for s in published[k][0])
            if k >= 2:  # it fills the broadcast that goes out before the unit ahead
                assert all(forward[k - 2].end <= s.waited <= forward[k - 1].begin for s in published[k][0])


def test_nothing_is_kept_while_nobody_records():
    assert begin_span("forward", "layers.0") is None
    with record_spans() as spans:
        span = begin_span("forward", "layers.0")
    assert spans == [span]
    assert begin_span("forward", "layers.0") is None


def profiled_step(seed):
    net = models.shard(models.make_model(seed, layers=2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        models.loss_of(net, models.batch(seed, dist.get_rank(), 0)).backward()
        newton_schulz_many([torch.randn(3, 8, 6)])
    return {event.key for event in profiler.key_averages()}


def test_ranges_in_a_profile_name_units_and_shapes(seed):
    whats = ("broadcast of layers.0", "gradient reduction of layers.1")
    expected = {f"hf_muon::{act} {what}" for act in ("issue", "wait") for what in whats}
    for names in run_on_ranks(2, profiled_step, seed):
        assert expected | {"hf_muon::newton_schulz 1 x 3x8x6"} <= names


def open_spans(seed, ckpt):
    net = models.shard(models.make_model(seed, layers=LAYERS, ckpt=ckpt))
    with record_spans() as spans:
        for step in range(2):
            models.loss_of(net, models.batch(seed, dist.get_rank(), step)).backward()
    return len(spans), [s.kind for s in spans if s.end is None]


@pytest.mark.parametrize("ckpt", [None, "reentrant", "non-reentrant"])
def test_every_span_ends_under_checkpointing(seed, ckpt):
    for count, unfinished in run_on_ranks(2, open_spans, seed, ckpt):
        assert count > 4 * LAYERS and unfinished == []
