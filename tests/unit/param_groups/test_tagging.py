# SPDX-License-Identifier: Apache-2.0
"""Tags, overrides, groups: field cases 7, 9, 10 and the errors a user can meet."""

from __future__ import annotations

import random

import pytest

from hf_muon.param_groups import (
    MatrixView,
    build_param_groups,
    explain_parameters,
    summarize,
    tag_parameters,
)
from tests.support.tiny_models import tiny_model

MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
ADAMW = {"lr": 3e-4, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-10}


def test_tags_stand_on_the_parameters() -> None:
    model = tiny_model("gpt2")
    tags = tag_parameters(model)
    for name, parameter in model.named_parameters():
        assert parameter.use_muon is (tags[name] == "muon")
        assert isinstance(parameter.muon_view, MatrixView)


def test_the_users_mark_wins_over_rules_and_survives_tagging_again() -> None:
    model = tiny_model("llama")
    first, last = model.model.layers[0].mlp.down_proj.weight, model.lm_head.weight
    first.use_muon, last.use_muon = False, True
    for _ in range(3):  # our own tags must not be taken for the user's, nor the user's for ours
        tags = tag_parameters(model)
        assert tags["model.layers.0.mlp.down_proj.weight"] == "adamw"
        assert tags["lm_head.weight"] == "muon"
    overruled = tag_parameters(model, exclude=["lm_head"], include=[r"layers\.0\.mlp\.down"])
    assert overruled["lm_head.weight"] == "adamw"
    assert overruled["model.layers.0.mlp.down_proj.weight"] == "muon"
    assert tag_parameters(model) == tags, "without include and exclude the user's marks count again"


def test_own_tags_of_an_earlier_call_do_not_bind_the_next() -> None:
    model = tiny_model("llama")
    assert tag_parameters(model, exclude=["mlp"])["model.layers.0.mlp.up_proj.weight"] == "adamw"
    assert tag_parameters(model)["model.layers.0.mlp.up_proj.weight"] == "muon"
    model.model.layers[0].mlp.up_proj.weight.use_muon = False  # changed by the user after our tag
    assert tag_parameters(model)["model.layers.0.mlp.up_proj.weight"] == "adamw"


def test_exclude_wins_over_include_and_reaches_every_alias() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    rows = {row.name: row for row in explain_parameters(model, include=["down_proj"], exclude=[r"layers\.0\."])}
    assert rows["model.layers.0.mlp.down_proj.weight"].algorithm == "adamw"
    assert rows["model.layers.1.mlp.down_proj.weight"].algorithm == "muon"
    rows = {row.name: row for row in explain_parameters(model, include=["lm_head"])}
    assert rows["model.embed_tokens.weight"].algorithm == "muon"  # the alias was named, the tensor is one


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"include": ["norm"]},
            ValueError,
            r"norm\.weight must have at least two axes to be on Muon; got shape \(32,",
        ),
        (
            {"include": ["q_porj"]},
            ValueError,
            r"include must match a trainable parameter; got 'q_porj', which matches",
        ),
        ({"exclude": ["nothing"]}, ValueError, r"exclude must match a trainable parameter; got 'nothing'"),
        ({"include": ["("]}, ValueError, r"include must hold regular expressions; got '\('"),
        ({"matrix_split": "x"}, ValueError, "matrix_split must be one of auto, none, fused, per_head; got 'x'"),
        ({"conv": "flat"}, ValueError, "conv must be one of adamw, flatten; got 'flat'. Did you mean 'flatten'"),
    ],
)
def test_bad_options_say_what_to_do(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        explain_parameters(tiny_model("llama", device="meta"), **options)


def test_a_pattern_for_frozen_parameters_is_no_typo() -> None:
    model = tiny_model("llama", device="meta")
    model.lm_head.requires_grad_(False)
    assert "lm_head.weight" not in {row.name for row in explain_parameters(model, exclude=["lm_head"])}


def test_the_users_mark_on_a_vector_is_refused() -> None:
    model = tiny_model("llama")
    model.model.norm.weight.use_muon = True
    with pytest.raises(ValueError, match=r"model\.norm\.weight must have at least two axes"):
        tag_parameters(model)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral", "mamba", "t5", "bert"])
def test_case_09_every_trainable_tensor_is_in_exactly_one_group(model_type: str) -> None:
    model = tiny_model(model_type, {"t5": "Seq2SeqLM", "bert": "MaskedLM"}.get(model_type, "CausalLM"))
    choice = random.Random(model_type)
    for _ in range(4):
        for parameter in model.parameters():
            parameter.requires_grad_(choice.random() < 0.8)
        groups = build_param_groups(explain_parameters(model), model, muon=MUON, adamw=ADAMW)
        placed = [id(parameter) for group in groups for parameter in group["params"]]
        trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        assert len(placed) == len(set(placed)) and set(placed) == trainable


def test_groups_have_a_fixed_order_and_decay_only_where_it_belongs() -> None:
    model = tiny_model("gpt2")
    groups = build_param_groups(explain_parameters(model), model, muon=MUON, adamw=ADAMW)
    assert [group["use_muon"] for group in groups] == [True, False, False]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]
    muon, decayed, plain = groups
    assert len(muon["matrix_views"]) == len(muon["params"]) == len(muon["param_names"])
    assert set(decayed["param_names"]) == {"transformer.wte.weight", "transformer.wpe.weight"}
    assert all("ln_" in name or name.endswith("bias") for name in plain["param_names"])
    assert muon["momentum"] == 0.95 and decayed["betas"] == (0.9, 0.95)
    names = [name for name, _ in model.named_parameters()]
    for group in groups:
        assert group["param_names"] == sorted(group["param_names"], key=names.index)
        named = dict(model.named_parameters())
        assert all(named[n] is p for n, p in zip(group["param_names"], group["params"], strict=True))


def test_decay_follows_the_trainers_rule_on_the_adamw_side() -> None:
    from transformers import Trainer, TrainingArguments

    for model_type, head in (
        ("llama", "CausalLM"),
        ("gpt2", "CausalLM"),
        ("bert", "MaskedLM"),
        ("vit", "ImageClassification"),
    ):
        model = tiny_model(model_type, head)
        trainer = Trainer(model=model, args=TrainingArguments(output_dir="unused", report_to=[], use_cpu=True))
        trainers = set(trainer.get_decay_parameter_names(model))
        for row in explain_parameters(model):
            # vectors never decay here; the Trainer decays some (cls_token is no vector)
            if len(row.shape) > 1:
                assert row.decay is (row.name in trainers), row


def test_case_07_an_empty_group_is_left_out() -> None:
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    groups = build_param_groups(explain_parameters(model), model, muon=MUON, adamw=ADAMW)
    assert [group["use_muon"] for group in groups] == [True]


def test_rows_of_another_freezing_are_refused() -> None:
    model = tiny_model("llama")
    rows = explain_parameters(model)
    model.lm_head.requires_grad_(False)
    with pytest.raises(ValueError, match=r"rows must name every trainable tensor.*1 unknown or frozen"):
        build_param_groups(rows, model, muon=MUON, adamw=ADAMW)
    with pytest.raises(ValueError, match=r"rows must name every trainable tensor.*1 missing"):
        build_param_groups(rows[1:-1], model, muon=MUON, adamw=ADAMW)


def test_summary_adds_up() -> None:
    model = tiny_model("llama")
    summary = summarize(explain_parameters(model))
    assert summary.muon_elements + summary.adamw_elements == sum(p.numel() for p in model.parameters())
    assert summary.muon_tensors + summary.adamw_tensors == len(list(model.parameters()))
    assert 0 < summary.share < summary.hidden_share < 1
