# SPDX-License-Identifier: Apache-2.0
"""`DMuonPlugin` in loops without Trainer: 2 gloo ranks (4 for HSDP) against one process."""

import os
from pathlib import Path

import pytest
import torch

import hf_muon
from hf_muon.distributed.rates import DeviceRates, ShapeSeconds
from tests.integration.accelerate import jobs

# Weights are below 1 in size and float32: summing the ranks' gradients in another order moves the last bits of them.
LAST_BITS = 5e-7
LOSS = 1e-5
KINDS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")


@pytest.fixture(scope="module")
def reference():
    return jobs.run(jobs.one_process, 1)[0]


def largest_difference(first, second):
    assert set(first) == set(second)
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "z3"},
        {"mode": "z2"},
        {"mode": "z2", "dmuon": "z3"},
        {"mode": "z3", "ram_efficient": True},
        {"mode": "z3", "activation_checkpointing": True},
        {"mode": "z3", "dmuon": "off"},
    ],
    ids=str,
)
def test_case_20_and_24_curve_norm_and_weights_are_those_of_one_process(reference, settings):
    losses, norms, weights = reference
    results = jobs.run(jobs.dedicated, 2, **settings)
    assert results[0][0] == pytest.approx(losses, abs=LOSS)
    for _, rank_norms, _ in results:  # the joint norm over owned and sharded parameters, on every rank
        assert rank_norms == pytest.approx(norms, rel=1e-6)
    assert largest_difference(weights, results[0][2]) <= LAST_BITS


@pytest.mark.slow
def test_case_25_hsdp_through_accelerate(reference):
    losses, norms, weights = reference
    results = jobs.run(jobs.dedicated, 4, "z3", replicas=2)
    assert results[0][0] == pytest.approx(losses, abs=LOSS)
    assert all(result[1] == pytest.approx(norms, rel=1e-6) for result in results)
    assert largest_difference(weights, results[0][2]) <= LAST_BITS


def test_case_15_owners_keep_float32_under_bf16(reference):
    for losses, norms, dtypes, gathered in jobs.run(jobs.mixed, 2):
        assert dtypes == {"torch.float32"} and gathered == {"torch.bfloat16"}
        # bf16 has 8 bits: 0.4 % of a loss of 4.9, and a few times that of a norm that sums products.
        assert losses == pytest.approx(reference[0][:4], rel=5e-3)
        assert norms == pytest.approx(reference[1][:4], rel=5e-2)


@pytest.mark.parametrize("mode", ["z3", "z2"])
def test_case_23_accumulate_defers_the_reduce_and_equals_one_batch(mode):
    whole_norms, whole_bytes, whole = jobs.run(jobs.accumulated, 2, mode, 1)[0]
    norms, num_bytes, weights = jobs.run(jobs.accumulated, 2, mode, 4)[0]
    assert norms == pytest.approx(whole_norms, rel=1e-5)
    assert largest_difference(whole, weights) <= LAST_BITS
    assert num_bytes["reduce"] == whole_bytes["reduce"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_case_29_and_30_save_evaluate_resume(tmp_path, kind):
    folder = str(tmp_path / "state")
    losses, weights = jobs.run(jobs.save_in_the_middle, 2, folder, "z3", True, state_dict_type=kind)[0]
    for mode, dmuon in (("z3", "auto"), ("z2", "auto"), ("z3", "off")):
        resumed = jobs.run(jobs.resume, 2, folder, mode, state_dict_type=kind, dmuon=dmuon)[0]
        assert resumed[0] == losses, (mode, dmuon)
        assert largest_difference(weights, resumed[1]) == 0.0, (mode, dmuon)
    alone = jobs.run(jobs.resume_in_one_process, 1, folder)[0]
    assert alone[0] == pytest.approx(losses, abs=LOSS)
    assert largest_difference(weights, alone[1]) <= LAST_BITS


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_case_29_and_30_resume_on_four_ranks(tmp_path, kind):
    folder = str(tmp_path / "state")
    losses, weights = jobs.run(jobs.save_in_the_middle, 2, folder, state_dict_type=kind)[0]
    resumed = jobs.run(jobs.resume, 4, folder, state_dict_type=kind)[0]
    assert resumed[0] == pytest.approx(losses, abs=LOSS)
    assert largest_difference(weights, resumed[1]) <= LAST_BITS


def test_every_public_state_dict_holds_ordinary_whole_tensors(tmp_path):
    for owned, count in jobs.run(jobs.public_state, 2, str(tmp_path)):
        assert owned == 14  # q, k, v, o, gate, up, down of two layers
        assert count > 2 * owned


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("FULL_STATE_DICT", "pytorch_model_fsdp.bin"),
        ("FULL_STATE_DICT", "optimizer.bin"),
        ("SHARDED_STATE_DICT", "pytorch_model_fsdp_0/__1_0.distcp"),
        ("SHARDED_STATE_DICT", "optimizer_0/.metadata"),
    ],
)
def test_a_truncated_file_is_named_on_every_rank(tmp_path, kind, damage):
    folder = tmp_path / "state"
    jobs.run(jobs.save_in_the_middle, 2, str(folder), state_dict_type=kind)
    path = folder / damage
    os.truncate(path, path.stat().st_size // 2)
    before = {item: item.stat().st_size for item in Path(folder).rglob("*") if item.is_file()}
    for message, untouched in jobs.run(jobs.message_of_load, 2, str(folder), state_dict_type=kind, timeout=60):
        assert message is not None and str(path) in message and "Nothing was loaded" in message
        assert untouched
    assert before == {item: item.stat().st_size for item in Path(folder).rglob("*") if item.is_file()}


def test_a_missing_piece_is_named(tmp_path):
    folder = tmp_path / "state"
    jobs.run(jobs.save_in_the_middle, 2, str(folder), state_dict_type="SHARDED_STATE_DICT")
    (folder / "optimizer_0/__0_0.distcp").unlink()
    for message, _ in jobs.run(jobs.message_of_load, 2, str(folder), state_dict_type="SHARDED_STATE_DICT"):
        assert "optimizer_0/__0_0.distcp" in message


def test_refusals_of_the_plugin():
    with pytest.raises(NotImplementedError, match="fsdp_version must be 2 with Muon; got 1"):
        hf_muon.DMuonPlugin(fsdp_version=1)
    with pytest.raises(ValueError, match=r"dmuon must be one of auto, z2, z3, off; got 'z4'"):
        hf_muon.DMuonPlugin(dmuon="z4")


def test_refusals_when_preparing():
    message, parameters = jobs.run(jobs.message_of_prepare, 2, dmuon="z2", optimizer={"dmuon": "z3"})[0]
    assert message == (
        "ValueError: dmuon must be the same in DMuonPlugin and in the optimizer; got 'z2' and 'z3'."
        " Set it in one place."
    )
    assert parameters == len(list(jobs.tiny_llama().parameters()))
    assert "fsdp_offload_params must be false" in jobs.run(jobs.offloaded_message, 2)[0]
    assert "must not be sharded yet" in jobs.run(jobs.sharded_before_message, 2)[0]


def test_rates_reach_the_owner_plan_from_plugin_or_optimizer(tmp_path):
    rows = (ShapeSeconds(16, 16, "standard", 0.5), ShapeSeconds(64, 64, "standard", 2.0))
    rates = DeviceRates("card", "cpu", "float32", 1e9, 1e9, rows)
    path = str(tmp_path / "rates.json")
    rates.write(path)
    for given in ((path, None), (None, path), (path, path)):
        first, second = jobs.run(jobs.costs_of_owners, 2, *given)
        assert first == second == [(shape, rates.seconds(*shape)) for shape, _ in first]
    assert all(cost > 1e3 for _, cost in jobs.run(jobs.costs_of_owners, 2, None, None)[0])  # FLOPs
    message, _ = jobs.run(jobs.message_of_prepare, 2, rates=path, optimizer={"rates": "other.json"})[0]
    assert message == (
        f"ValueError: rates must be the same in DMuonPlugin and in the optimizer; got {path!r} and 'other.json'."
        " Set it in one place."
    )


def test_an_optimizer_of_another_model_is_refused_and_the_model_stays_whole():
    from hf_muon.integrations.accelerate.prepare import _take_out

    model, other = jobs.tiny_llama(), jobs.tiny_llama(layers=3)
    optimizer = jobs.muon(other)
    model.model.layers = other.model.layers[:2]
    count = len(list(model.parameters()))
    with pytest.raises(ValueError, match=r"must all be trainable parameters of the model; got 21 of which .* has 14"):
        _take_out(model, optimizer)
    assert len(list(model.parameters())) == count
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
