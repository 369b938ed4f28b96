# SPDX-License-Identifier: Apache-2.0
"""`optim="dmuon"` as a value: command line, JSON, copies, pickles, other processes."""

import copy
import json
import pickle
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.trainer import DEFAULT_CALLBACKS
from transformers.training_args import OptimizerNames

import hf_muon
from hf_muon.integrations.transformers import registration
from hf_muon.integrations.transformers.callback import MuonCallback
from tests.support.trainer_runs import arguments, make_trainer, plain_optimizer


def test_the_name_is_a_member_like_any_other(tmp_path):
    args = arguments(tmp_path)
    assert args.optim is OptimizerNames("dmuon") is OptimizerNames.DMUON is OptimizerNames["DMUON"]
    assert isinstance(args.optim, str) and args.optim == "dmuon" and hash(args.optim) == hash("dmuon")
    assert args.to_dict()["optim"] == "dmuon" == json.loads(args.to_json_string())["optim"]
    with pytest.raises(ValueError, match="dmuon"):
        arguments(tmp_path, optim="dmuonn")


def test_registering_again_changes_nothing():
    members, callbacks = list(OptimizerNames), list(DEFAULT_CALLBACKS)
    registration.register()
    for name, action in registration._ACTIONS.items():
        action(sys.modules[name])
    assert list(OptimizerNames) == members and members.count("dmuon") == 1
    assert callbacks == DEFAULT_CALLBACKS and callbacks.count(MuonCallback) == 1


def test_command_line_parser_offers_it(tmp_path):
    parser = HfArgumentParser(TrainingArguments)
    line = ["--output_dir", str(tmp_path), "--optim", "dmuon", "--optim_args", "ns_steps=3", "--use_cpu", "true"]
    (args,) = parser.parse_args_into_dataclasses(line)
    assert args.optim == "dmuon"
    (again,) = parser.parse_dict({"output_dir": str(tmp_path), "optim": "dmuon", "use_cpu": True})
    assert again.optim == "dmuon"


def test_copies_stay_usable(tmp_path):
    args = arguments(tmp_path)
    for clone in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert clone.optim == OptimizerNames.DMUON
        trainer = Trainer(model=make_trainer(tmp_path).model, args=clone)
        assert isinstance(plain_optimizer_of(trainer), hf_muon.MuonWithAuxAdam)


def plain_optimizer_of(trainer):
    trainer.create_optimizer()
    return plain_optimizer(trainer)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_case_32_the_member_pickles_as_plain_text(protocol):
    data = pickle.dumps(OptimizerNames.DMUON, protocol)
    assert type(pickle.loads(data)) is str and pickle.loads(data) == "dmuon"
    assert b"OptimizerNames" not in data and b"hf_muon" not in data


def test_case_32_training_args_load_where_the_package_was_never_imported(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    code = (
        "import sys, torch\n"
        f"args = torch.load({str(tmp_path / 'saved' / 'training_args.bin')!r}, weights_only=False)\n"
        "assert type(args.optim) is str and args.optim == 'dmuon', args.optim\n"
        "assert args.to_dict()['optim'] == 'dmuon'\n"
        "assert not any(name.split('.')[0] == 'hf_muon' for name in sys.modules)\n"
        "print(args.learning_rate)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0.001"
    assert torch.load(tmp_path / "saved" / "training_args.bin", weights_only=False).optim == OptimizerNames.DMUON


def test_a_transformers_that_changed_does_not_break_its_own_import(caplog):
    with caplog.at_level("WARNING", "hf_muon"):
        registration._guarded(registration._add_name)(ModuleType("transformers.training_args"))
    assert "could not be registered" in caplog.text and "optimizer_cls_and_kwargs" in caplog.text


def test_other_optimizers_are_left_alone(tmp_path):
    trainer = make_trainer(tmp_path, optim="adamw_torch", optim_args=None, max_steps=2)
    trainer.train()
    assert isinstance(plain_optimizer(trainer), torch.optim.AdamW)
    assert not any("muon" in key or "skipped" in key for entry in trainer.state.log_history for key in entry)


def test_search_over_learning_rates_builds_a_fresh_optimizer_per_trial(tmp_path):
    def fresh(_=None):
        return make_trainer(tmp_path).model

    trainer = Trainer(model_init=fresh, args=arguments(tmp_path), train_dataset=make_trainer(tmp_path).train_dataset)
    seen = []
    for rate in (1e-3, 3e-3):
        trainer.args.learning_rate = rate
        trainer.optimizer = trainer.lr_scheduler = None
        trainer.train()
        seen.append(plain_optimizer(trainer).param_groups[0]["initial_lr"])
    assert seen == [1e-3, 3e-3]
