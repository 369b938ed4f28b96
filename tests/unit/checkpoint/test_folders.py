# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders in one process: finding, checking, reading, loading; every message."""

import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hf_muon.checkpoint import (
    find_checkpoint,
    load_whole_model,
    read_model,
    read_optimizer,
    verify_checkpoint,
)

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.ones(4)}


def optimizer_state(shape=(2, 3)):
    return {"state": {"a.weight": {"momentum_buffer": torch.zeros(shape)}}, "param_groups": []}


def write(folder, kind, shape=(2, 3)):
    """A small checkpoint of each kind, as Trainer or Accelerate names it."""
    if kind == "full":
        torch.save(WEIGHTS, folder / "pytorch_model_fsdp.bin")
        torch.save(optimizer_state(shape), folder / "optimizer.bin")
    elif kind == "sharded":
        import torch.distributed.checkpoint as dcp

        dcp.save({"model": WEIGHTS}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
        dcp.save({"optimizer": optimizer_state(shape)}, checkpoint_id=folder / "optimizer_0", no_dist=True)
    else:
        save_file(WEIGHTS, folder / "model.safetensors")
        torch.save(optimizer_state(shape), folder / "optimizer.pt")


@pytest.mark.parametrize("kind", ["full", "sharded", "plain"])
def test_read_back(tmp_path, kind):
    write(tmp_path, kind)
    found = find_checkpoint(tmp_path)
    assert found.format == kind and found.is_fsdp == (kind != "plain")
    verify_checkpoint(tmp_path)
    weights = read_model(tmp_path)
    assert set(weights) == set(WEIGHTS) and all(torch.equal(weights[name], WEIGHTS[name]) for name in WEIGHTS)
    state = read_optimizer(tmp_path)["state"]["a.weight"]["momentum_buffer"]
    assert torch.equal(state, torch.zeros(2, 3))


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_halves_of_two_checkpoints_are_refused(tmp_path, kind):
    write(tmp_path, kind, shape=(3, 3))
    with pytest.raises(ValueError, match=r"optimizer.* must belong to the weights beside it; its state of a.weight"):
        verify_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("kind", "name", "keep"),
    [
        ("full", "pytorch_model_fsdp.bin", 0.5),
        ("full", "optimizer.bin", 0.9),
        ("plain", "model.safetensors", 0.9),
        ("plain", "model.safetensors", 0.2),
        ("plain", "model.safetensors", 0.0),
        ("plain", "optimizer.pt", 0.5),
        ("sharded", "pytorch_model_fsdp_0/__0_0.distcp", 0.9),
        ("sharded", "optimizer_0/.metadata", 0.5),
        ("sharded", "optimizer_0/.metadata", 0.0),
    ],
)
def test_truncated_files_are_named(tmp_path, kind, name, keep):
    write(tmp_path, kind)
    path = tmp_path / name
    os.truncate(path, int(path.stat().st_size * keep))
    with pytest.raises(ValueError, match="must be a whole checkpoint file") as error:
        verify_checkpoint(tmp_path)
    assert str(path) in str(error.value)
    with pytest.raises(ValueError, match="must be a whole checkpoint file"):
        (read_model if "model" in name else read_optimizer)(tmp_path)


def test_an_unfinished_save_is_named(tmp_path):
    write(tmp_path, "sharded")
    (tmp_path / "pytorch_model_fsdp_0/.metadata").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model_fsdp_0/.metadata .* is missing: the save did not finish"):
        verify_checkpoint(tmp_path)


def test_nothing_there(tmp_path):
    assert find_checkpoint(tmp_path) is None
    verify_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="must hold the weights of a checkpoint"):
        read_model(tmp_path)
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match="must hold optimizer state; got none"):
        read_optimizer(tmp_path)


def test_whole_weights_into_a_plain_model():
    model = nn.ModuleDict({"a": nn.Linear(3, 2, bias=False)})
    load_whole_model(model, WEIGHTS)
    assert torch.equal(model["a"].weight, WEIGHTS["a.weight"])
    with pytest.raises(ValueError, match=r"weights must belong to this model; got names such as c.weight"):
        load_whole_model(model, {"c.weight": torch.ones(1)})
