# SPDX-License-Identifier: Apache-2.0
"""Where each option of the optimizer comes from, through Trainer."""

import functools

import pytest
import torch
from transformers import Trainer

import hf_muon
from hf_muon.integrations.transformers.trainer_options import options_from_arguments
from tests.support.trainer_runs import arguments, make_trainer, plain_optimizer, tiny_llama, token_rows


def groups(folder, **settings):
    trainer = make_trainer(folder, **settings)
    trainer.create_optimizer()
    return plain_optimizer(trainer).param_groups


def test_trainers_values_are_used_where_no_option_is_given(tmp_path):
    muon, decayed, plain = groups(
        tmp_path, optim_args=None, weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-7
    )
    assert [g["use_muon"] for g in (muon, decayed, plain)] == [True, False, False]  # group 0 is Muon: learning_rate
    assert [g["lr"] for g in (muon, decayed, plain)] == [1e-3] * 3
    assert [g["weight_decay"] for g in (muon, decayed, plain)] == [0.3, 0.3, 0.0]
    assert decayed["betas"] == plain["betas"] == (0.8, 0.9)
    assert decayed["eps"] == 1e-7


def test_case_18_options_given_as_text_are_typed(tmp_path):
    given = "nesterov=false,ns_steps=3,muon_lr=0.02,adam_lr=1e-4,betas=0.9;0.99,ns_method=standard,momentum=0.9"
    muon, decayed, plain = groups(tmp_path, optim_args=given)
    assert muon["nesterov"] is False and muon["ns_steps"] == 3 and muon["ns_method"] == "standard"
    assert (muon["lr"], decayed["lr"], plain["lr"]) == (0.02, 1e-4, 1e-4)
    assert decayed["betas"] == (0.9, 0.99) and muon["momentum"] == 0.9


def test_case_18_a_given_zero_wins_over_trainers_value(tmp_path):
    muon, decayed, _ = groups(tmp_path, optim_args="weight_decay=0.0,adam_lr=0.0", weight_decay=0.5)
    assert muon["weight_decay"] == 0.0 == decayed["weight_decay"]
    assert decayed["lr"] == 0.0 and muon["lr"] == 1e-3
    muon, decayed, _ = groups(tmp_path, optim_args="muon_weight_decay=0.0", weight_decay=0.5)
    assert (muon["weight_decay"], decayed["weight_decay"]) == (0.0, 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("muon_lrr=1", "'muon_lrr' is not an option of hf-muon. Did you mean 'muon_lr'?"),
        ("ns_steps=three", "ns_steps must be a whole number; got 'three'."),
        ("nesterov=maybe", "nesterov must be true or false; got 'maybe'."),
        ("muon_lr=1,muon_lr=2", "optim_args names 'muon_lr' twice"),
        ("ns_method=grams", "Did you mean 'gram'?"),
    ],
)
def test_case_18_what_cannot_be_honoured_raises_before_training(tmp_path, text, message):
    with pytest.raises(ValueError) as raised:
        make_trainer(tmp_path, optim_args=text).train()
    assert message in str(raised.value)


def test_one_beta_leaves_the_other_to_trainer(tmp_path):
    args = arguments(tmp_path, optim_args="adam_beta2=0.95", adam_beta1=0.8)
    assert options_from_arguments(args)["betas"] == (0.8, 0.95)


def test_the_route_without_registration_gives_the_same_optimizer(tmp_path):
    options = {"lr": 1e-3, "muon_lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    rows, results = token_rows(), []
    config = hf_muon.MuonConfig(**options, ns_dtype="float32")
    for pair in (
        None,
        (hf_muon.OptimizerFactory, {**options, "ns_dtype": "float32"}),
        (functools.partial(hf_muon.OptimizerFactory, config), {}),
    ):
        args = arguments(tmp_path, optim_args="muon_lr=0.02,ns_dtype=float32", weight_decay=0.1)
        if pair is not None:
            args = arguments(tmp_path, optim="adamw_torch", optim_args=None)
        trainer = Trainer(model=tiny_llama(), args=args, train_dataset=rows, optimizer_cls_and_kwargs=pair)
        trainer.train()
        assert isinstance(plain_optimizer(trainer), hf_muon.MuonWithAuxAdam)
        assert trainer.state.log_history[0]["muon_lr"] == 0.02
        results.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_training_arguments_may_be_given_by_position(tmp_path):
    model = tiny_llama()
    args = arguments(tmp_path, optim="adamw_torch", optim_args=None, weight_decay=0.2, learning_rate=4e-4)
    optimizer = hf_muon.OptimizerFactory()(model, args, muon_lr="0.01", lr=4e-4)
    assert [g["lr"] for g in optimizer.param_groups] == [0.01, 4e-4, 4e-4]
    assert optimizer.param_groups[0]["weight_decay"] == 0.2
    args = arguments(tmp_path, optim_args="muon_lr=0.03,ns_steps=2")
    group = hf_muon.OptimizerFactory()(model, args, ns_steps=4).param_groups[0]
    assert (group["lr"], group["ns_steps"]) == (0.03, 4)


def test_a_config_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="config must be a MuonConfig; got dict"):
        hf_muon.OptimizerFactory({"lr": 1.0})


def test_case_09_every_trainable_tensor_is_in_exactly_one_group(tmp_path):
    trainer = make_trainer(tmp_path, model=tiny_llama(tie_word_embeddings=True, attention_bias=True))
    trainer.create_optimizer()
    placed = [id(p) for group in plain_optimizer(trainer).param_groups for p in group["params"]]
    assert sorted(placed) == sorted(id(p) for p in trainer.model.parameters())
    start = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    assert all(not torch.equal(p, start[n]) for n, p in trainer.model.named_parameters())


def test_case_07_frozen_parts_are_in_no_group_and_do_not_move(tmp_path):
    model = tiny_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("proj" in name and "layers.1" in name)  # no AdamW parameter is left
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    trainer = make_trainer(tmp_path, model=model, weight_decay=0.5)
    trainer.train()
    optimizer = plain_optimizer(trainer)
    assert len(optimizer.param_groups) == 1 and len(optimizer.param_groups[0]["params"]) == 7
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    assert "adam_lr" not in trainer.state.log_history[0] and trainer.state.log_history[0]["muon_lr"] > 0


def test_case_07_nothing_left_for_muon_is_an_error(tmp_path):
    model = tiny_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    with pytest.raises(ValueError, match="must have at least one tensor on Muon"):
        make_trainer(tmp_path, model=model).train()


def test_include_and_exclude_reach_the_groups(tmp_path):
    muon, *_ = groups(tmp_path, optim_args="exclude=k_proj;v_proj,include=lm_head")
    assert "lm_head.weight" in muon["param_names"]
    assert not any("k_proj" in name or "v_proj" in name for name in muon["param_names"])
