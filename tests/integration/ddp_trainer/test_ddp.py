# SPDX-License-Identifier: Apache-2.0
"""Trainer and Accelerate under DDP, nothing set: 2 gloo ranks against one process, and their checkpoints."""

import os

import pytest
import torch

from tests.integration.accelerate.jobs import run
from tests.integration.ddp_trainer import jobs

LOSS = 1e-5
# As in the FSDP2 tests: matrices are below 1 in size, so this is a few units in the last place; AdamW divides a
# gradient by its own size, which makes the rounding of small ones visible.
LAST_BITS, ADAMW = 2e-6, 1e-4


def assert_close(result, reference):
    assert result["losses"] == pytest.approx(reference["losses"], abs=LOSS)
    assert result["norms"] == pytest.approx(reference["norms"], rel=1e-6)
    for name, wanted in reference["weights"].items():
        difference = float((result["weights"][name] - wanted).abs().max())
        assert difference <= (LAST_BITS if "proj" in name else ADAMW), name


def assert_same_bits(first, second):
    assert set(first["weights"]) == set(second["weights"])
    for name, value in first["weights"].items():
        assert torch.equal(value, second["weights"][name]), name


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return run(jobs.train, 1, str(tmp_path_factory.mktemp("one")))[0]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run of 6 steps on 2 ranks with a checkpoint after 4."""
    folder = str(tmp_path_factory.mktemp("two"))
    return folder, run(jobs.train, 2, folder, save_strategy="steps", save_steps=4)


def test_trainer_gives_owners_and_the_curve_of_one_process(reference, uninterrupted):
    _, (first, second) = uninterrupted
    assert first["owned"] and second["owned"] and not reference["owned"]
    assert_close(first, reference)
    assert_same_bits(first, second)
    assert first["held"] + second["held"] == first["muon"] and min(first["held"], second["held"]) > 0
    assert first["traffic"]["reduce"] == 6 * 4 * first["muon"]
    saves = 2  # after step 4, and at the end: momentum travels once for each
    assert first["traffic"]["broadcast"] == (6 + saves) * 4 * first["muon"]


def test_accumulation_through_trainer(tmp_path, reference):
    first, _ = run(jobs.train, 2, str(tmp_path), accumulation=2)
    assert first["owned"]
    assert_close(first, reference)
    assert first["traffic"]["reduce"] == first["traffic"]["broadcast"] == 6 * 4 * first["muon"]  # once per step


def test_case_29_a_killed_run_resumes_to_the_same_bits(tmp_path, uninterrupted):
    _, whole_run = uninterrupted
    folder = str(tmp_path)
    assert run(jobs.train, 2, folder, save_strategy="steps", save_steps=2, stop=5) == [None, None]
    assert not os.path.exists(tmp_path / "checkpoint-6")
    resumed = run(jobs.train, 2, folder, checkpoint=f"{folder}/checkpoint-4", seed=5)
    for result, wanted in zip(resumed, whole_run, strict=True):
        assert result["losses"] == wanted["losses"][4:]
        assert_same_bits(result, wanted)


def test_case_29_a_checkpoint_of_two_ranks_resumes_in_one_process(tmp_path, uninterrupted):
    folder, (whole_run, _) = uninterrupted
    state = torch.load(f"{folder}/checkpoint-4/optimizer.pt", weights_only=True)
    momenta = [value["momentum_buffer"] for value in state["state"].values() if "momentum_buffer" in value]
    assert sum(value.numel() for value in momenta) == whole_run["muon"] and all(value.any() for value in momenta)
    alone = run(jobs.train, 1, str(tmp_path), checkpoint=f"{folder}/checkpoint-4", seed=5)[0]
    assert alone["losses"] == pytest.approx(whole_run["losses"][4:], abs=LOSS)
    assert all(
        float((alone["weights"][name] - value).abs().max()) <= ADAMW for name, value in whole_run["weights"].items()
    )


def test_lora_where_every_trainable_tensor_is_on_muon(tmp_path):
    alone = run(jobs.train, 1, str(tmp_path / "a"), steps=4, lora=True)[0]
    options = {"steps": 4, "lora": True, "save_strategy": "steps", "save_steps": 2}
    first, second = run(jobs.train, 2, str(tmp_path / "b"), **options)
    assert first["owned"] and first["traffic"]["all_reduce"] == 0
    assert_close(first, alone)
    assert_same_bits(first, second)
    folder = str(tmp_path / "b/checkpoint-2")
    again = run(jobs.train, 2, str(tmp_path / "c"), checkpoint=folder, seed=4, steps=4, lora=True)[0]
    assert_same_bits(again, first)
    from safetensors.torch import load_file

    adapter = load_file(str(tmp_path / "b/checkpoint-4/adapter_model.safetensors"))
    assert len(adapter) == 12
    for name, value in adapter.items():
        stem, _, leaf = name.rpartition(".")
        assert torch.equal(value, first["weights"][f"{stem}.default.{leaf}"])


def test_training_twice(tmp_path):
    alone = run(jobs.train_twice, 1, str(tmp_path / "a"))[0]
    first, second = run(jobs.train_twice, 2, str(tmp_path / "b"))
    assert first["owned"]
    assert_close(first, alone)
    assert_same_bits(first, second)


def test_dmuon_off_repeats_the_work(tmp_path, reference):
    first, _ = run(jobs.train, 2, str(tmp_path), optim_args=",dmuon=off")
    assert not first["owned"] and first["held"] == first["muon"]
    assert_close(first, reference)


@pytest.mark.parametrize("order", ["together", "optimizer first", "one by one", "from the wrapped model"])
def test_accelerate_gives_owners_in_every_order_of_preparation(tmp_path, order):
    alone = run(jobs.raw_loop, 1, str(tmp_path), steps=3)[0]
    first, second = run(jobs.raw_loop, 2, str(tmp_path), order, steps=3)
    assert first["owned"]
    assert_close(first, alone)
    assert_same_bits(first, second)


def test_accelerates_accumulation(tmp_path):
    alone = run(jobs.raw_loop, 1, str(tmp_path), steps=3)[0]
    first, second = run(jobs.raw_loop, 2, str(tmp_path), steps=3, accumulation=2)
    assert first["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    assert_same_bits(first, second)


def test_accelerates_save_state_brings_a_run_back_to_the_same_bits(tmp_path):
    folder = str(tmp_path / "state")
    whole_run = run(jobs.raw_loop, 2, folder, save_after=3)
    resumed = run(jobs.raw_loop, 2, None, seed=5, load=folder, save_after=3)
    for result, wanted in zip(resumed, whole_run, strict=True):
        assert result["losses"] == wanted["losses"][3:]
        assert_same_bits(result, wanted)
