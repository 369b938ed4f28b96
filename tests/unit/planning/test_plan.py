# SPDX-License-Identifier: Apache-2.0
"""The plan's numbers against arithmetic from published dimensions, and its shape."""

import json
import time

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

import hf_muon
from hf_muon.planning.model_source import resolve_model
from hf_muon.planning.wire import payload_elements, wire_elements
from hf_muon.planning.zero import MUON_STATE_BYTES, zero_table

# hidden, layers, intermediate, width of queries, of keys, vocabulary, tied, biases on q, k and v: the model cards.
DIMENSIONS = {
    "Qwen2.5-0.5B": (896, 24, 4864, 896, 128, 151936, True, True),
    "Qwen2.5-3B": (2048, 36, 11008, 2048, 256, 151936, True, True),
    "Qwen2.5-7B": (3584, 28, 18944, 3584, 512, 152064, False, True),
    "Llama-3-8B": (4096, 32, 14336, 4096, 1024, 128256, False, False),
    "SmolLM2-135M": (576, 30, 1536, 576, 192, 49152, True, False),
}


@pytest.mark.parametrize("name", DIMENSIONS)
def test_formulas_are_exact(name):
    hidden, layers, inner, query, key, vocabulary, tied, biased = DIMENSIONS[name]
    muon = layers * hidden * (2 * query + 2 * key + 3 * inner)
    adamw = vocabulary * hidden * (1 if tied else 2) + layers * (2 * hidden + biased * (query + 2 * key)) + hidden
    plan = hf_muon.plan(name, world_size=8).to_dict()
    assert (plan["muon_elements"], plan["adamw_elements"]) == (muon, adamw)
    z2, z3 = plan["modes"]["z2"], plan["modes"]["z3"]
    assert (z2["payload_elements_per_step"], z3["payload_elements_per_step"]) == (2 * muon, 3 * muon)
    assert z2["wire_elements_per_rank_per_step"] * 8 == 2 * 7 * muon
    assert z3["wire_elements_per_rank_per_step"] * 8 == 3 * 7 * muon
    assert z3["naive_wire_elements_per_rank_per_step"] * 8 == 4 * 7 * muon
    assert z2["muon_bytes_resident_per_rank"] == z3["muon_bytes_resident_per_rank"] == 8 * muon / 8
    assert z2["muon_bytes_transient_per_rank"] == 2 * muon
    assert z3["muon_bytes_transient_per_rank"] == 2 * 2 * muon // layers
    states = plan["optimizer_state_bytes_per_rank"]
    assert states == {"muon": 4 * muon / 8, "adamw": 8 * adamw / 8}
    assert plan["all_adamw_state_bytes_per_rank"] == 8 * (muon + adamw) / 8
    assert sum(row["elements"] for row in plan["owners"]) == muon
    assert [row["rank"] for row in plan["owners"]] == list(range(8))
    assert sum(row["matrices"] for row in plan["owners"]) == 7 * layers
    assert plan["imbalance"] <= 1.02
    assert plan["zero"]["zero2"] == pytest.approx((2 + 14 / 8) * (muon + adamw), rel=1e-12)


def test_zero_of_the_paper():
    table = zero_table(7.5e9, 64)
    assert {name: round(size / 1e9, 1) for name, size in table.items()} == {
        "ddp": 120.0,
        "zero1": 31.4,
        "zero2": 16.6,
        "zero3": 1.9,
    }
    muon = zero_table(7.5e9, 64, MUON_STATE_BYTES)
    assert muon["ddp"] == 7.5e9 * 12 and muon["zero3"] == 7.5e9 * 12 / 64


def test_replicas_and_micro_batches_on_the_wire():
    assert wire_elements(640, "z3", 8, 4) == {"shard": 1680, "replicate": 960}
    assert wire_elements(100, "z2", 1) == {"shard": 0, "replicate": 0}
    assert wire_elements(10, "z2", 3)["shard"] == pytest.approx(40 / 3)
    assert [payload_elements(5, mode, 4) for mode in ("z2", "z3")] == [25, 45]  # k + 1 and 2k + 1 times P_M
    plan = hf_muon.plan("SmolLM2-135M", world_size=8, replicate=2)
    assert plan.shard == 4 and plan.ownership.num_ranks == 8
    wire = plan.to_dict()["modes"]["z3"]
    muon = plan.census.muon_elements
    assert wire["wire_elements_per_rank_per_step"] * 4 == 3 * 3 * muon + 4 * muon
    assert {row.layout for row in plan.memory} >= {"hsdp-fsdp2", "hsdp-dmuon-z2", "hsdp-dmuon-z3"}


def test_stacks_of_experts_are_split_where_whole_ones_cannot_be_balanced():
    start = time.process_time()
    plan = hf_muon.plan("Moonlight-16B-A3B", world_size=64)
    document = plan.to_dict()
    # 26 layers of 64 gate-up and 26 of 64 down projections for 64 ranks: whole stacks reach 1.524 at best.
    assert document["imbalance"] <= 1.02
    assert document["split_stacks"] == 52
    assert sum(row["matrices"] for row in document["owners"]) <= 400  # 241 parameters: few, large parts
    assert sum(row["elements"] for row in document["owners"]) == document["muon_elements"]
    assert sum(row["ns_flops"] for row in document["owners"]) == pytest.approx(
        sum(matrix.cost for matrix in plan.census.matrices()), rel=1e-9
    )
    few = hf_muon.plan("Moonlight-16B-A3B", world_size=8).to_dict()
    assert few["imbalance"] <= 1.02 and few["split_stacks"] == 0
    many = hf_muon.plan("Moonlight-16B-A3B", world_size=4096).to_dict()
    # One dense layer's projections are indivisible: nothing can be better than the costliest of them.
    assert many["imbalance"] == pytest.approx(many["imbalance_lower_bound"], rel=1e-9)
    assert len(many["owners"]) == 4096 and many["idle_ranks"] < 1000
    assert time.process_time() - start < 10


def test_the_document_is_complete_and_serialisable():
    plan = hf_muon.plan("SmolLM2-135M", world_size=8, micro_batch=2, seq_len=128).to_dict()
    assert plan == json.loads(json.dumps(plan))
    documented = {"model", "world_size", "replicate", "muon_elements", "adamw_elements", "modes", "owners", "zero"}
    assert documented | {"optimizer_state_bytes_per_rank", "imbalance", "recommendation"} <= set(plan)
    assert set(plan["owners"][0]) == {"rank", "matrices", "elements", "ns_flops"}
    assert set(plan["recommendation"]) == {"mode", "why"}
    layouts = [(row["layout"], row["optimizer"]) for row in plan["memory"]]
    zero = [(stage, optimizer) for stage in plan["zero"] for optimizer in ("adamw", "muon")]
    assert layouts == [
        *zero,
        ("fsdp2", "adamw"),
        ("fsdp2", "muon"),
        ("dmuon-z2", "muon"),
        ("dmuon-z3", "muon"),
    ]
    for row in plan["memory"]:
        parts = ("weights", "gradients", "states", "buffers", "activations")
        assert row["peak"] == sum(row[part] for part in parts)


@pytest.mark.parametrize(
    ("name", "ranks", "mode", "word"),
    [
        ("Moonlight-16B-A3B", 64, "z3", "above 10"),
        ("SmolLM2-135M", 8, "z2", "below 3"),
        ("SmolLM2-135M", 4, "z3", "few ranks"),
        ("Qwen2.5-7B", 8, "z3", "between 3 and 10"),
        ("SmolLM2-135M", 1, "off", "One process"),
    ],
)
def test_advice_and_its_reason(name, ranks, mode, word):
    advice = hf_muon.plan(name, world_size=ranks).recommendation
    assert advice.mode == mode and word in advice.why


def test_advice_sees_whether_it_fits():
    def advice(gib):
        return hf_muon.plan("SmolLM2-135M", world_size=8, micro_batch=8, seq_len=2048, device_gib=gib).recommendation

    peaks = {
        row.layout: row.peak / 2**30
        for row in hf_muon.plan("SmolLM2-135M", world_size=8, micro_batch=8, seq_len=2048).memory
    }
    assert peaks["dmuon-z3"] < peaks["dmuon-z2"]
    assert advice(peaks["dmuon-z2"] * 1.01).mode == "z2"
    assert advice((peaks["dmuon-z2"] + peaks["dmuon-z3"]) / 2).mode == "z3"
    assert "Look at activations" in advice(peaks["dmuon-z3"] * 0.9).why


def test_other_sources_and_an_architecture_without_a_formula(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=32)
    config.save_pretrained(tmp_path)
    wanted = 2 * 64 * (2 * 64 + 2 * 32 + 3 * 96)
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(config)
    for source in (config, str(tmp_path), model):
        plan = hf_muon.plan(source, world_size=2, micro_batch=1, seq_len=8)
        assert plan.census.muon_elements == wanted
        assert plan.activations["with_checkpointing"] is not None
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    plan = hf_muon.plan(plain, world_size=2, micro_batch=1, seq_len=8)
    assert plan.model == "Sequential" and plan.to_dict()["activation_bytes_per_rank"]["with_checkpointing"] is None
    assert all(row.activations is None for row in plan.memory)
    mixtral = hf_muon.plan(resolve_model("Mixtral-8x7B").config, world_size=8, micro_batch=1, seq_len=8)
    assert set(mixtral.activations.values()) == {None}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "world_size must be a whole number of at least 1; got 0"),
        ({"world_size": True}, "world_size must be a whole number"),
        ({"world_size": 8, "replicate": 3}, "replicate must divide world_size; got 3 and 8"),
        ({"world_size": 8, "micro_batch": 2}, "micro_batch must come together with seq_len"),
        ({"world_size": 8, "seq_len": 2}, "seq_len must come together with micro_batch"),
        ({"world_size": 8, "device_gib": -1.0}, "device_gib must be a number above 0; got -1.0"),
    ],
)
def test_bad_numbers_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        hf_muon.plan("SmolLM2-135M", **options)


def test_another_kind_of_model_is_named():
    with pytest.raises(TypeError, match="must be a name, a transformers configuration or a module; got int"):
        hf_muon.plan(3, world_size=1)
