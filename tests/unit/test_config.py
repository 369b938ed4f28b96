# SPDX-License-Identifier: Apache-2.0
"""`MuonConfig`: defaults, types, override rules and the sentences of its errors."""

import dataclasses
import json

import pytest

from hf_muon import MuonConfig
from hf_muon.config import coerce_options, nearest, parse_key_values


def test_defaults_are_those_of_the_contract():
    config = MuonConfig()
    assert (config.momentum, config.nesterov, config.ns_method, config.ns_steps) == (0.95, True, "gram", 5)
    assert (config.ns_coefficients, config.ns_dtype, config.adjust_lr_fn) == ("keller", "auto", "match_rms_adamw")
    assert (config.matrix_split, config.dmuon, config.momentum_dtype, config.offload) == (
        "auto",
        "auto",
        "float32",
        "none",
    )


@pytest.mark.parametrize(
    ("options", "muon", "adam"),
    [
        ({}, 3e-4, 3e-4),
        ({"adjust_lr_fn": "original"}, 0.02, 3e-4),
        ({"lr": 1e-3}, 1e-3, 1e-3),
        ({"lr": 1e-3, "muon_lr": 0.5}, 0.5, 1e-3),
        ({"lr": 1e-3, "adam_lr": 0.0}, 1e-3, 0.0),
        ({"muon_lr": 0.5}, 0.5, 3e-4),
        ({"muon_lr": 0.5, "adam_lr": 0.25, "lr": 9.0}, 0.5, 0.25),
    ],
)
def test_learning_rate_override_rules(options, muon, adam):
    config = MuonConfig(**options)
    assert (config.resolved_muon_lr, config.resolved_adam_lr) == (muon, adam)


def test_weight_decay_of_zero_is_honoured_over_a_fallback():
    config = MuonConfig(weight_decay=0.0, muon_weight_decay=0.3).with_fallbacks(weight_decay=0.7, lr=0.1)
    assert (config.resolved_muon_weight_decay, config.resolved_adam_weight_decay) == (0.3, 0.0)
    assert config.lr == 0.1
    assert MuonConfig().with_fallbacks(weight_decay=0.7).resolved_adam_weight_decay == 0.7


def test_case_18_strings_are_typed():
    text = "nesterov=false,ns_steps=3,weight_decay=0.0,betas=0.8;0.9,include=a;b,lr=none,ns_coefficients=(3,-4,2)"
    config = MuonConfig.from_optim_args(text)
    assert config.nesterov is False
    assert config.ns_steps == 3
    assert config.weight_decay == 0.0
    assert config.betas == (0.8, 0.9)
    assert config.include == ("a", "b")
    assert config.lr is None
    assert config.ns_coefficients == ((3.0, -4.0, 2.0),)


def test_adam_aliases_fill_betas_and_eps():
    config = MuonConfig.from_optim_args("adam_beta2=0.99,adam_epsilon=1e-7")
    assert config.betas == (0.9, 0.99)
    assert config.eps == 1e-7
    with pytest.raises(ValueError, match="Keep one of them"):
        MuonConfig.from_optim_args("betas=0.9;0.9,adam_beta1=0.8")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("muon_lrr=1", "'muon_lrr' is not an option of hf-muon. Did you mean 'muon_lr'?"),
        ("ns_steps=2.5", "ns_steps must be a whole number; got '2.5'"),
        ("ns_steps=0", "ns_steps must be a whole number of at least 1; got 0"),
        ("nesterov=perhaps", "nesterov must be true or false; got 'perhaps'"),
        ("momentum=1.0", r"momentum must lie in \[0, 1\); got 1.0"),
        ("lr=-1", "lr must be finite and not negative; got -1.0"),
        ("lr=nan", "lr must be finite and not negative; got nan"),
        ("ns_method=gramm", "ns_method must be one of gram, standard; got 'gramm'. Did you mean 'gram'?"),
        ("ns_coefficients=kellar", "Did you mean 'keller'?"),
        ("include=[", r"include must hold regular expressions; got '\['"),
        ("lr", "optim_args must be key=value pairs separated by commas; got 'lr'"),
        ("lr=1,lr=2", "optim_args names 'lr' twice"),
        ("ns_coefficients=[[1,2,3],[4,5,6]]", r"ns_coefficients must hold one row, or one per step \(5\); got 2 rows"),
        ("ns_coefficients=1;2;x", "ns_coefficients must be numbers; got '1;2;x'"),
        ("betas=0.9", r"betas must be two numbers in \[0, 1\)"),
    ],
)
def test_bad_values_get_one_clear_sentence(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        MuonConfig.from_optim_args(text)


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", "1"), ("momentum", None), ("nesterov", 1), ("betas", 0.9), ("betas", ("0.9", "0.95")), ("include", 5)],
)
def test_wrong_kinds_raise_type_errors(key, value):
    with pytest.raises(TypeError, match=f"{key} must be"):
        MuonConfig(**{key: value})


def test_round_trips_through_json():
    config = MuonConfig(
        lr=0.1, betas=(0.8, 0.9), ns_coefficients=[[1, 2, 3], [4, 5, 6]], ns_steps=2, include=("x",), fused_adam=True
    )
    restored = MuonConfig.from_optim_args(json.loads(json.dumps(config.to_dict())))
    assert restored == config
    assert hash(restored) == hash(config)


def test_is_frozen_and_every_option_has_a_help_text():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MuonConfig().lr = 1.0
    for option in dataclasses.fields(MuonConfig):
        assert len(option.metadata["help"]) > 10, option.name


def test_commas_inside_brackets_do_not_separate():
    assert parse_key_values("a=(1,2),b=[3,4],c=5") == {"a": "(1,2)", "b": "[3,4]", "c": "5"}
    assert coerce_options({}) == {}


def test_commas_inside_nested_brackets_do_not_separate():
    config = MuonConfig.from_optim_args(
        "ns_coefficients=[[1,2,3],[4,5,6]],ns_steps=2,include=layers.{1,2},qk_clip=off"
    )
    assert config.ns_coefficients == ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    assert (config.ns_steps, config.include, config.qk_clip) == (2, ("layers.{1,2}",), None)
    assert MuonConfig.from_optim_args("fused_adam=no").fused_adam == MuonConfig(fused_adam=False).fused_adam == "false"


def test_nearest_lists_everything_when_nothing_is_close():
    assert nearest("zzz", ["alpha", "beta"]) == " Valid: alpha, beta."
