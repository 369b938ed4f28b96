# SPDX-License-Identifier: Apache-2.0
"""The simulator against steps worked out by hand, against the planner's bytes, and against what must always hold."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import hf_muon
from hf_muon.distributed.ownership import Matrix, OwnershipPlan
from hf_muon.distributed.rates import DeviceRates, ShapeSeconds
from hf_muon.planning import simulate
from hf_muon.planning.designs import Setting
from hf_muon.planning.devices import PRESETS, SimulatedDevice, find_device
from hf_muon.planning.network import Group, LinkNetwork
from hf_muon.planning.simulation import DESIGNS, simulate_step
from hf_muon.planning.timeline import Timeline
from hf_muon.planning.workload import UnitLoad, Workload, unit_buckets

# Seconds come out whole: one FLOP a second in the passes, one byte a second in memory and on the links.
UNIT = SimulatedDevice("unit", 1.0, math.inf, 1.0, 1.0, pass_share=1.0, ns_share=1.0, launch=0.0, intra_latency=0.5)
ORTHOGONALIZE = {"a": 100.0, "b": 70.0}


class Slow(SimulatedDevice):
    """Orthogonalizes (count, m, n) in m seconds each: the two matrices have 100 and 70 rows."""

    def orthogonalize_seconds(self, parts):
        return float(sum(count * m for count, m, _ in parts))


def hand_made(device=UNIT, *, replicate=1, shard=2, muon=(8, 8), rest=(0, 4, 4), flops=(0.0, 10.0, 10.0), **options):
    """Return a setting and a plan: two units with one matrix each, owned by ranks 0 and 1 (100 and 70 seconds)."""
    load = Workload(
        UnitLoad("", flops[0], 0, rest[0]),
        (UnitLoad("u0", flops[1], muon[0], rest[1]), UnitLoad("u1", flops[2], muon[1], rest[2])),
        {"a": ((1, 100, 1),), "b": ((1, 70, 1),)},
        tokens=1,
    )
    matrices = (Matrix("a", (2, muon[0] // 2), "u0", 100.0), Matrix("b", (2, muon[1] // 2), "u1", 70.0))
    owners = OwnershipPlan(matrices, (0, 1), replicate, shard)
    device = Slow(**{name: getattr(device, name) for name in device.__dataclass_fields__})
    return Setting(
        load, device, device.network, compute_bytes=1, reduce_bytes=1, checkpointing=False, **options
    ), owners


def test_adamw_of_two_units_by_hand():
    # A collective of 12 elements on 2 ranks: 0.5 s for the hop and 12/2 = 6 s of bytes.
    # Forward: gather u0 until 6.5; from there gather u1 (until 13) beside 10 s of computation (until 16.5); u1: 26.5.
    # Backward: gather u1 again, issued when u1's computation was: after forward, 26.5 to 33. u0's from 33 to 39.5
    # beside u1's 20 s (until 53). u1's reduction 53 to 59.5 beside u0's 20 s (until 73); u0's 73 to 79.5.
    found = simulate_step("adamw-fsdp2", *hand_made())
    assert found.step_seconds == pytest.approx(79.5, abs=1e-9)
    assert found.passes_seconds == 60.0
    assert found.exposed_seconds == pytest.approx(19.5, abs=1e-9)
    assert found.communication_seconds == pytest.approx(6 * 6.5, abs=1e-9)
    assert found.latency_seconds == pytest.approx(6 * 0.5, abs=1e-9)


def test_owned_matrices_by_hand():
    # A unit is an all-gather of 4 (2.5 s) and then a broadcast of 8 (4.5 s): 7 s.
    # Z3: gather u0 7; u1 7..14 beside computation 7..17; u1 17..27; gather u1 27..34; computation 34..54 beside
    # gather u0 34..41. Reductions of u1 54..61 beside 54..74; those of u0 74..81. Newton-Schulz, slower owner: 100.
    z3 = simulate_step("dmuon-z3", *hand_made())
    assert z3.step_seconds == pytest.approx(181.0, abs=1e-9)
    assert (z3.newton_schulz_seconds, z3.exposed_seconds) == (100.0, pytest.approx(21.0, abs=1e-9))
    assert z3.imbalance == pytest.approx(100 / 85)
    # Z2 keeps both units: backward starts at 27 and nothing is waited for but the last reductions.
    z2 = simulate_step("dmuon-z2", *hand_made())
    assert z2.step_seconds == pytest.approx(7 + 20 + 40 + 7 + 100, abs=1e-9)


def test_naive_and_all_to_all_by_hand():
    # After the passes of AdamW (79.5 s): each matrix gathered in float32, 8 * 4 / 2 + 0.5 s, and all orthogonalized.
    naive = simulate_step("naive", *hand_made())
    assert naive.step_seconds == pytest.approx(79.5 + 2 * 16.5 + 170, abs=1e-9)
    # One round: 8 bytes arrive at each owner (4.5 s), the slower one needs 100 s, and 4.5 s back.
    exchanged = simulate_step("all-to-all", *hand_made())
    assert exchanged.step_seconds == pytest.approx(79.5 + 4.5 + 100 + 4.5, abs=1e-9)


def test_replicas_publish_behind_forward_by_hand():
    # Two replicas of one shard rank; a machine each; links of 1 byte/s. Owners: replica 0 has a, replica 1 has b.
    # Publication 8/2 = 4 s each without latency: a 0..4, b 4..8. u0: 4..14 computed, u1 waits for nothing: ..24.
    device = replace(UNIT, ranks_per_node=1, inter_latency=0.0)
    setting, owners = hand_made(device, replicate=2, shard=1, rest=(0, 0, 0))
    found = simulate_step("dmuon-hsdp", setting, owners)
    # Backward 40 s; reductions (4 s each, two units in flight) are waited for at the end: 4 + 4.
    assert found.step_seconds == pytest.approx(4 + 20 + 40 + 8 + 100, abs=1e-9)
    assert found.wire_elements == {"shard": 0.0, "replicate": pytest.approx(2 * 16 / 2)}


def test_without_overlap_a_step_is_the_sum_of_its_parts():
    found = simulate_step("dmuon-z3", *hand_made(replace(UNIT, overlaps=False)))
    assert found.step_seconds == pytest.approx(60 + 100 + 6 * 2.5 + 6 * 4.5, abs=1e-9)
    assert found.exposed_seconds == found.communication_seconds


def test_the_latency_of_grouped_broadcasts_is_paid_once():
    setting, owners = hand_made(replace(UNIT, overlaps=False))
    matrices = (*owners.matrices, Matrix("c", (2, 4), "u0", 1.0))
    owners = OwnershipPlan(matrices, (0, 1, 1), 1, 2)
    parts = {**setting.workload.parts, "c": ((1, 1, 1),)}
    setting = replace(setting, workload=replace(setting.workload, parts=parts))
    apart, together = (simulate_step("dmuon-z3", replace(setting, grouped=on), owners) for on in (False, True))
    # u0 now has two buckets: two broadcasts and one reduction of it, each with one hop less when grouped.
    assert apart.step_seconds - together.step_seconds == pytest.approx(3 * 0.5, abs=1e-9)


def test_lanes_run_in_order_and_wait_for_computation():
    time = Timeline()
    time.compute("passes", 2.0)
    first = time.send("shard", 0.0, 5.0)  # from 2
    second = time.send("shard", 1.0, 1.0)  # behind it
    other = time.send("replicate", 0.0, 1.0, after=(first,))
    assert (first, second, other) == (7.0, 9.0, 8.0)
    time.wait(first)
    time.compute("passes", 1.0)
    assert (time.now, time.exposed, time.busy["passes"]) == (8.0, 5.0, 3.0)


def test_ring_formulas():
    links = LinkNetwork(100.0, 40.0, 1.0, 10.0, 0.25, ranks_per_node=4)
    node, two = Group.neighbours(4, 4), Group.neighbours(8, 4)
    assert (node.nodes, two.nodes) == (1, 2)
    assert links.seconds("all_gather", 400, node) == (0.25 + 3 * 1.0, 0.75 * 400 / 100)
    assert links.seconds("broadcast", 400, two) == (0.25 + 6 * 1.0 + 10.0, 0.875 * 400 / 40)
    assert links.seconds("all_reduce", 400, two) == (0.25 + 2 * 16.0, 2 * 0.875 * 400 / 40)
    assert links.seconds("all_to_all", 400, two)[1] == 0.875 * 400 / 10  # one of four network cards
    copies = Group.spread(2, 4, 4)  # one rank of each of two machines; four such groups share the cards
    assert links.seconds("reduce", 400, copies) == (0.25 + 10.0, 0.5 * 400 / 10)
    assert links.seconds("reduce", 400, Group(1)) == (0.0, 0.0)


# ---------------------------------------------------------------- a real model


@pytest.fixture(scope="module")
def small():
    from hf_muon.planning.model_source import build_meta_model, resolve_model

    return build_meta_model(resolve_model("SmolLM2-135M").config)


@pytest.fixture(scope="module")
def unchanged(small):
    return simulate(small, ranks=(16, 512))


def test_bytes_on_the_wire_are_the_planners(small):
    found = simulate(small, ranks=(8, 64), shard=4)
    for ranks in (8, 64):
        flat = hf_muon.plan(small, world_size=ranks).to_dict()["modes"]
        for design, mode in (("dmuon-z2", "z2"), ("dmuon-z3", "z3")):
            want = flat[mode]["shard_wire_elements_per_rank_per_step"]
            assert found.find(design, ranks).wire_elements == {
                "shard": pytest.approx(want, rel=1e-12),
                "replicate": 0.0,
            }
        want = flat["z3"]["naive_wire_elements_per_rank_per_step"]
        assert found.find("naive", ranks).wire_elements["shard"] == pytest.approx(want, rel=1e-12)
        copies = hf_muon.plan(small, world_size=ranks, replicate=ranks // 4).to_dict()["modes"]["z3"]
        wire = found.find("dmuon-hsdp", ranks).wire_elements
        assert wire["shard"] == pytest.approx(copies["shard_wire_elements_per_rank_per_step"], rel=1e-12)
        assert wire["replicate"] == pytest.approx(copies["replicate_wire_elements_per_rank_per_step"], rel=1e-12)


def test_a_step_is_the_sum_of_its_parts_and_free_links_leave_computation_alone(small):
    free = replace(PRESETS["h100"], intra_bytes=math.inf, inter_bytes=math.inf, launch=0.0)
    free = replace(free, intra_latency=0.0, inter_latency=0.0)
    for device in (PRESETS["h100"], free):
        for step in simulate(small, ranks=(16, 256), device=device).steps:
            parts = ("passes", "newton_schulz", "elementwise", "copies", "exposed")
            assert step.step_seconds == pytest.approx(sum(getattr(step, f"{p}_seconds") for p in parts), rel=1e-9)
            assert step.exposed_seconds >= 0 and step.latency_seconds <= step.communication_seconds + 1e-12
            if device is free:
                assert step.exposed_seconds == pytest.approx(0.0, abs=1e-12)
    found = simulate(small, ranks=(16,), device=free)
    z2, z3 = found.find("dmuon-z2", 16), found.find("dmuon-z3", 16)
    assert z2.passes_seconds == z3.passes_seconds
    # What is left between the two is FSDP2's second copy of the unsharded rest, out of its buffer.
    assert z3.step_seconds - z2.step_seconds == pytest.approx(z3.copies_seconds - z2.copies_seconds, abs=1e-12)


@pytest.mark.parametrize("figure", ["intra_latency", "inter_latency", "launch", "intra_bytes", "inter_bytes"])
def test_a_worse_link_never_helps(small, unchanged, figure):
    base = PRESETS["h100"]
    value = getattr(base, figure)
    worse = replace(base, **{figure: value / 3 if "bytes" in figure else 3 * value})
    for before, after in zip(unchanged.steps, simulate(small, ranks=(16, 512), device=worse).steps, strict=True):
        assert (before.design, before.ranks) == (after.design, after.ranks)
        assert after.step_seconds >= before.step_seconds * (1 - 1e-12)


def test_large_models_and_the_time_it_takes():
    import time

    start = time.process_time()
    found = simulate("Qwen2.5-3B")
    assert time.process_time() - start < 10  # all ten numbers of ranks, transformers' import included
    assert found.ranks[0] == 8 and found.ranks[-1] == 4096
    for ranks in (8, 16, 32, 64, 128):
        naive = found.find("naive", ranks)
        for design in ("dmuon-z2", "dmuon-z3"):
            owned = found.find(design, ranks)
            assert owned.step_seconds < naive.step_seconds
            # Once in the job: an owner has its share of what every rank of naive Muon does. The slowest rank may own
            # more elements instead of more Newton-Schulz.
            share = naive.newton_schulz_seconds / ranks
            assert 0.8 * share < owned.newton_schulz_seconds <= owned.imbalance * share * (1 + 1e-9)
    assert found.find("dmuon-hsdp", 8) is None
    last = found.find("dmuon-z3", 4096)
    assert last.idle_ranks == 4096 - 252 and {"latency", "idle ranks"} <= set(last.limits)
    # 6 FLOPs per weight and token, once more forward with checkpointing; attention comes on top.
    tokens, weights = 4 * 2048, 2_774_532_096
    device = found.device
    least = 8 * weights * tokens / (device.pass_share * device.product_flops)
    assert 1.0 < last.passes_seconds / least < 1.2
    document = found.to_dict()
    assert document == json.loads(json.dumps(document))
    assert {row["design"] for row in document["steps"]} == set(DESIGNS)


def test_measured_seconds_replace_flops():
    rows = (ShapeSeconds(64, 64, "standard", 1e-3), ShapeSeconds(64, 256, "gram", 2e-3))
    rates = DeviceRates("card", "cuda", "bfloat16", 5e12, 7e11, rows, link_bytes=3e9, link_latency=4e-6)
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))})
    found = simulate(model, ranks=(2,), rates=rates)
    assert (found.device.name, found.device.intra_bytes, found.device.memory_bytes) == ("card", 3e9, 7e11)
    assert found.find("naive", 2).newton_schulz_seconds == pytest.approx(4e-3)
    assert found.find("dmuon-z3", 2).newton_schulz_seconds == pytest.approx(2e-3)


def test_packed_buffers_are_the_runtimes(small):
    census = hf_muon.plan(small, world_size=8).census
    buckets = unit_buckets(census.owners(shard=8))
    assert sum(bucket.numel for unit in buckets.values() for bucket in unit) == census.muon_elements
    assert all(len({bucket.shard_index for bucket in unit}) == len(unit) for unit in buckets.values())


def test_experts_count_as_often_as_tokens_meet_them():
    from hf_muon.planning.workload import forward_flops

    plan = hf_muon.plan("Mixtral-8x7B", world_size=8)
    from hf_muon.planning.model_source import build_meta_model, resolve_model

    config = resolve_model("Mixtral-8x7B").config
    flops = sum(forward_flops(build_meta_model(config), config, plan.census, tokens=1, seq_len=1).values())
    # 12.9 billion active parameters are published, 0.13 of them in the table that is only looked up.
    assert flops / 2 == pytest.approx(12.9e9 - 0.13e9, rel=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "h10"}, "device must be one of a100, h100, h200, b200; got 'h10'. Did you mean 'h100'?"),
        ({"ranks": (0,)}, "ranks must be a whole number of at least 1; got 0."),
        ({"ranks": ()}, "ranks must name at least one"),
        ({"designs": ("dmuon-z4",)}, "got 'dmuon-z4'. Did you mean"),
        ({"shard": 0}, "shard must be a whole number"),
        ({"rates": "nowhere.json"}, "rates must be a file that hf-muon calibrate wrote; got nowhere.json"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=r"must|Did") as error:
        simulate(torch.nn.Linear(4, 4), **options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("launc", 1, "'launc' is no figure of a device. Did you mean 'launch'?"),
        ("product_flops", "fast", "product_flops must be a number above 0; got 'fast'."),
        ("memory_bytes", 0, "memory_bytes must be a number above 0; got 0."),
        ("launch", -1, "launch must be a number of at least 0; got -1."),
        ("overlaps", "perhaps", "overlaps must be true or false; got 'perhaps'."),
    ],
)
def test_bad_figures_are_named(key, value, message):
    with pytest.raises(ValueError) as error:
        find_device("h100", {key: value})
    assert str(error.value) == message


def test_figures_may_be_text():
    device = find_device("a100", {"inter_bytes": "1e11", "launch": "0", "ranks_per_node": "4", "overlaps": "false"})
    assert (device.inter_bytes, device.launch, device.ranks_per_node, device.overlaps) == (1e11, 0.0, 4, False)
