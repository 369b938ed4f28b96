# SPDX-License-Identifier: Apache-2.0
"""Around DeepSpeed's engine, with stand-ins: what is taken over, what goes through, what is said."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hf_muon
from hf_muon.integrations.deepspeed.engine import configure_optimizer, describe, take_over
from hf_muon.integrations.deepspeed.optimizer import PartitionedOptimizer
from hf_muon.integrations.deepspeed.trainer_start import factory_options, prepare_trainer, update_norm


def small():
    model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    return model, hf_muon.OptimizerFactory()(model, lr=1e-3)


def test_an_optimizer_is_taken_over_in_place_and_keeps_no_whole_state():
    model, optimizer = small()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    ours = take_over(optimizer)
    assert ours is optimizer is scheduler.optimizer and type(ours) is PartitionedOptimizer
    assert not ours.state and not ours.state_dict()["state"]
    assert isinstance(ours, hf_muon.MuonWithAuxAdam)
    assert model[0].weight.muon_view is not None
    assert ours.step.__func__ is PartitionedOptimizer.step  # not the one that the scheduler wrapped


def test_an_optimizer_that_has_stepped_is_refused():
    model, optimizer = small()
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="given to DeepSpeed must be new; got one with state"):
        take_over(optimizer)


def test_other_optimizers_go_through_untouched():
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    seen = []
    configure_optimizer(lambda *arguments: seen.append(arguments), None, other, "parameters")
    assert seen == [(other, "parameters")]


def test_the_engine_refuses_on_its_own_what_trainer_refuses():
    _, optimizer = small()
    engine = SimpleNamespace(config={"tensor_parallel": {"autotp_size": 4}})
    with pytest.raises(NotImplementedError, match="autotp_size must be 1"):
        configure_optimizer(lambda *arguments: None, engine, optimizer, None)


def test_one_line_says_what_runs():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    optimizer = hf_muon.OptimizerFactory()(model, muon_lr=1e-4, adam_lr=2e-6, adjust_lr_fn="original")
    line = describe({"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}, optimizer)
    assert line == (
        "DeepSpeed ZeRO 2 runs hf-muon's optimizer: gram Newton-Schulz, 5 steps, keller coefficients, once per matrix"
        " in the job; adjust_lr_fn original; muon_lr 0.0001, adam_lr 2e-06; gradients are clipped at norm 1, over both"
        " halves, before Newton-Schulz."
    )
    assert describe({}, optimizer).endswith("no clipping.")


def test_the_norm_of_deepspeeds_update_is_that_of_orthogonal_matrices():
    """An exactly orthogonal (m, n) update has norm sqrt(min(m, n)); the rule scales it by sqrt(max(1, m/n))."""
    model = nn.ModuleDict({"embed": nn.Embedding(9, 4), "tall": nn.Linear(4, 9), "wide": nn.Linear(9, 4)})
    tall = torch.linalg.qr(torch.randn(9, 4))[0] * (9 / 4) ** 0.5
    wide = torch.linalg.qr(torch.randn(9, 4))[0].T
    assert update_norm(model) == pytest.approx(float((tall.square().sum() + wide.square().sum()).sqrt()), rel=1e-6)


def test_options_in_a_factory_and_in_a_block_are_one_too_many(monkeypatch):
    from hf_muon.integrations.deepspeed import trainer_start

    config = {"optimizer": {"type": "muon", "params": {"lr": 1e-3}}}
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=config))
    monkeypatch.setattr(trainer_start, "accelerate_state", lambda: state)
    with pytest.raises(ValueError, match="Options must stand in OptimizerFactory"):
        factory_options({}, hf_muon.MuonConfig())
    assert factory_options({"lr": 2e-3}, None)["lr"] == 2e-3


def test_a_trainer_without_deepspeed_is_left_alone():
    prepare_trainer(SimpleNamespace(hf_deepspeed_config=None), None, ours=True)
