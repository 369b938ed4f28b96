# SPDX-License-Identifier: Apache-2.0
"""What a DeepSpeed configuration may ask, and the sentences for what it may not."""

import importlib.metadata
import json

import pytest

from hf_muon import MuonConfig, _compat_deepspeed
from hf_muon.integrations.deepspeed import trainer_start
from hf_muon.integrations.deepspeed.config_block import block_options, options_of, take_block
from hf_muon.integrations.deepspeed.settings import check_config, check_deepspeeds_own, read_config

TWO_RATES = MuonConfig(muon_lr=1e-2, adam_lr=1e-3)


@pytest.mark.parametrize(
    ("config", "options", "error", "message"),
    [
        (
            {"scheduler": {"type": "WarmupLR"}},
            TWO_RATES,
            ValueError,
            r"scheduler\.type must be WarmupCosineLR or absent .* got WarmupLR, .* muon_lr=0\.01 and adam_lr=0\.001",
        ),
        (
            {"tensor_parallel": {"autotp_size": 2}},
            MuonConfig(),
            NotImplementedError,
            r"tensor_parallel\.autotp_size must be 1 .* got 2\. Set it to 1",
        ),
        ({}, MuonConfig(dmuon="z2"), ValueError, "dmuon must be auto or off under DeepSpeed; got z2"),
        ({}, MuonConfig(normuon=True), NotImplementedError, "normuon must be left out under DeepSpeed; got True"),
        ({}, MuonConfig(offload="cpu"), NotImplementedError, "offload must be left out under DeepSpeed; got 'cpu'"),
        ({}, MuonConfig(qk_clip=100.0), NotImplementedError, "qk_clip must be left out under DeepSpeed; got 100"),
        ({}, MuonConfig(dmuon="z3"), ValueError, "dmuon must be auto or off under DeepSpeed; got z3"),
        ({}, MuonConfig(rates="r.json"), NotImplementedError, "rates must be absent under DeepSpeed"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            MuonConfig(),
            NotImplementedError,
            r"offload_optimizer\.device must be cpu or none with Muon; got nvme\. Set it to cpu",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}},
            MuonConfig(),
            NotImplementedError,
            r"offload_optimizer\.ratio must be 1\.0 with Muon; got 0\.3",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
            MuonConfig(),
            NotImplementedError,
            "super_offload must be false",
        ),
        (
            {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}},
            MuonConfig(),
            NotImplementedError,
            r"zero_optimization\.zenflow must be absent with Muon",
        ),
        (
            {
                "zero_optimization": {"stage": 1},
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
            },
            MuonConfig(),
            NotImplementedError,
            r"data_types\.grad_accum_dtype must be absent or bf16 .* got fp32\. .* zero_optimization\.stage to 2",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals_name_the_key_and_the_value_to_set(config, options, error, message):
    with pytest.raises(error, match=message):
        check_config(config, options)


@pytest.mark.parametrize(
    "config",
    [
        {"scheduler": {"type": "WarmupCosineLR"}},
        {"zero_optimization": {"stage": 3, "reduce_scatter": True}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        {"tensor_parallel": {"autotp_size": 1}},
        {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}},
    ],
)
def test_what_works_is_let_through(config):
    check_config(config, TWO_RATES)


def test_one_learning_rate_may_have_any_scheduler():
    check_config({"scheduler": {"type": "WarmupDecayLR"}}, MuonConfig(lr=1e-3))


@pytest.mark.parametrize(
    ("zero", "where"),
    [
        ({"stage": 3}, "under ZeRO 3"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "with zero_optimization.offload_optimizer"),
    ],
)
def test_reduce_scatter_is_refused_where_deepspeeds_own_muon_would_run(zero, where):
    config = {"optimizer": {"type": "Muon"}, "zero_optimization": zero}
    message = rf"zero_optimization\.reduce_scatter must be false for DeepSpeed's own Muon {where}; got true"
    with pytest.raises(ValueError, match=message):
        check_deepspeeds_own(config)
    zero["reduce_scatter"] = False
    check_deepspeeds_own(config)


def test_an_old_or_missing_deepspeed_is_one_sentence(monkeypatch):
    monkeypatch.setattr(_compat_deepspeed.metadata, "version", lambda name: "0.19.7")
    with pytest.raises(ImportError, match=r"deepspeed must be at least 0\.19\.8; got 0\.19\.7\. Run: pip install"):
        check_config({}, MuonConfig())

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(_compat_deepspeed.metadata, "version", missing)
    with pytest.raises(ImportError, match=r'^DeepSpeed is not installed\. Run: pip install "hf-muon\[deepspeed\]"$'):
        check_config({}, MuonConfig())


def test_a_block_becomes_options_with_deepspeeds_defaults():
    params = {"lr": "auto", "muon_lr": "1e-4", "adam_lr": 2e-6, "momentum": "auto", "betas": [0.9, 0.95]}
    params |= {"torch_adam": True, "adam_w_mode": True, "ns_method": "standard"}
    config = {"optimizer": {"type": "Muon", "params": params}, "bf16": {"enabled": True}}
    take_block(config)
    assert "optimizer" not in config and "auto" not in json.dumps(config)
    take_block(config)
    options = block_options(json.loads(json.dumps(config)))
    assert (options["muon_lr"], options["adam_lr"], options["ns_method"]) == (1e-4, 2e-6, "standard")
    assert options["adjust_lr_fn"] == "original" and options["eps"] == 1e-10 and options["weight_decay"] == 0.0
    assert "lr" not in options and "momentum" not in options
    assert MuonConfig(**options).momentum == 0.95


def test_options_given_in_code_win_over_the_block():
    config = {"optimizer": {"type": "muon", "params": {"betas": [0.8, 0.9], "eps": 1e-6, "momentum": 0.9}}}
    take_block(config)
    given = {"adam_beta1": 0.7, "adam_epsilon": 1e-7, "momentum": 0.8, "adjust_lr_fn": "none"}
    options = trainer_start.options_from_block(config, given)
    assert "betas" not in options and "eps" not in options
    assert (options["momentum"], options["adjust_lr_fn"]) == (0.8, "none")


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"muon_lrr": 1}, ValueError, r"optimizer\.params\.muon_lrr .* Did you mean 'muon_lr'\?"),
        ({"adam_w_mode": False}, ValueError, r"optimizer\.params\.adam_w_mode must be true with Muon; got False"),
        (
            {"per_head_muon": True, "matrix_split": "none"},
            ValueError,
            r"optimizer\.params\.per_head_muon must be false with matrix_split=none; got true",
        ),
        ({"momentum": 2.0}, ValueError, "momentum must lie in"),
    ],
)
def test_wrong_keys_of_a_block(params, error, message):
    with pytest.raises(error, match=message):
        options_of(params)


def test_heads_are_split_where_the_block_asks_for_it():
    assert options_of({"per_head_muon": True}) == {"matrix_split": "per_head"}
    assert options_of({"per_head_muon": False}) == {}


def test_a_block_of_another_optimizer_is_an_error():
    with pytest.raises(ValueError, match=r"optimizer\.type in the DeepSpeed config must be muon .* got AdamW"):
        take_block({"optimizer": {"type": "AdamW"}})


def test_a_configuration_may_be_a_file(tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    assert read_config(str(tmp_path / "ds.json")) == {"zero_optimization": {"stage": 2}}
    assert read_config({"a": 1}) == {"a": 1} and read_config(None) == {}
