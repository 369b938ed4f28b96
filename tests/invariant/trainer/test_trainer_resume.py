# SPDX-License-Identifier: Apache-2.0
"""Resuming in the middle gives the same bits as never having stopped."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from tests.support.trainer_runs import EXACT, make_trainer, plain_optimizer, tiny_llama, token_rows, weights

RUN = {"max_steps": 12, "save_strategy": "steps", "save_steps": 6, "optim_args": f"muon_lr=0.01,{EXACT}"}


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("scheduler", "options"),
    [("linear", {"warmup_steps": 2}), ("cosine_with_min_lr", {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}})],
)
def test_resume_at_6_of_12_steps_is_bit_identical(tmp_path, scheduler, options):
    rows = token_rows(48)
    run = {**RUN, **options, "lr_scheduler_type": scheduler, "weight_decay": 0.1}
    whole = make_trainer(tmp_path, rows, **run)
    whole.train()
    resumed = make_trainer(tmp_path / "again", rows, model=tiny_llama(seed=5), **run)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))

    assert resumed.state.global_step == 12
    assert losses(resumed) == losses(whole)
    for name, value in weights(whole.model).items():
        assert torch.equal(value, weights(resumed.model)[name]), name
    first, second = plain_optimizer(whole), plain_optimizer(resumed)
    for group, other in zip(first.param_groups, second.param_groups, strict=True):
        assert group["lr"] == other["lr"]
        for one, two in zip(group["params"], other["params"], strict=True):
            for key, value in first.state[one].items():
                assert torch.equal(value, second.state[two][key]), key
    momenta = [first.state[p]["momentum_buffer"] for p in first.param_groups[0]["params"]]
    assert all(momentum.abs().max() > 0 for momentum in momenta)


def test_checkpoint_files_are_ordinary(tmp_path):
    make_trainer(tmp_path, **{**RUN, "max_steps": 6}).train()
    folder = tmp_path / "checkpoint-6"
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    assert set(load_file(folder / "model.safetensors")) == set(names)
    entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    assert all(isinstance(entry["muon_lr"], float) and entry["muon_update_rms"] > 0 for entry in entries)
    assert all(entry["skipped_steps"] == 0 for entry in entries)


def test_resume_with_another_freeze_keeps_momentum_by_name(tmp_path):
    make_trainer(tmp_path, **{**RUN, "max_steps": 6}).train()
    model = tiny_llama()
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    trainer = make_trainer(tmp_path / "again", model=model, **{**RUN, "max_steps": 6})
    resumed = {}

    class Snapshot(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):  # the state is loaded, no step was taken yet
            optimizer = plain_optimizer(trainer)
            group = optimizer.param_groups[0]
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                resumed[name] = optimizer.state[parameter]["momentum_buffer"].clone()

    trainer.add_callback(Snapshot())
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    saved = torch.load(tmp_path / "checkpoint-6" / "optimizer.pt", weights_only=True)
    position = {name: i for i, name in enumerate(n for g in saved["param_groups"] for n in g["param_names"])}
    assert len(resumed) == 7
    for name, momentum in resumed.items():
        assert momentum.any() and torch.equal(momentum, saved["state"][position[name]]["momentum_buffer"]), name
