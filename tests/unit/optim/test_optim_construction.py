# SPDX-License-Identifier: Apache-2.0
"""What the constructor takes and refuses; groups, copies, closures, replaced parameters."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from hf_muon.config import MuonConfig
from hf_muon.optim import MuonWithAuxAdam
from hf_muon.param_groups.views import MatrixView


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape or (3, 4)))


def test_tagged_named_parameters_make_three_groups_with_all_state(make_model) -> None:
    model = make_model(0)
    optimizer = MuonWithAuxAdam(model.named_parameters(), muon_lr=0.02, adam_lr=1e-3, weight_decay=0.1)
    muon, decay, no_decay = optimizer.param_groups
    assert [g["use_muon"] for g in optimizer.param_groups] == [True, False, False]
    assert muon["param_names"] == ["up.weight", "down.weight"]
    assert decay["param_names"] == ["embed.weight"]
    assert no_decay["param_names"] == ["up.bias", "norm.weight", "norm.bias"]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.1, 0.0]
    assert [g["lr"] for g in optimizer.param_groups] == [0.02, 1e-3, 1e-3]
    assert set(muon) == {
        *("params", "param_names", "matrix_views", "use_muon", "lr", "weight_decay", "momentum", "nesterov"),
        *("ns_method", "ns_steps", "ns_coefficients", "ns_dtype", "adjust_lr_fn"),
    }
    assert set(decay) == {"params", "param_names", "use_muon", "lr", "weight_decay", "betas", "eps"}
    assert set(optimizer.state) == set(model.parameters())
    assert set(optimizer.state[model.up.weight]) == {"momentum_buffer"}
    assert optimizer.state[model.up.weight]["momentum_buffer"].dtype == torch.float32
    assert set(optimizer.state[model.up.bias]) == {"step", "exp_avg", "exp_avg_sq"}


def test_tags_on_plain_parameters_are_enough(make_model) -> None:
    optimizer = MuonWithAuxAdam(make_model(0).parameters())
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1, 3]
    assert all("param_names" not in group for group in optimizer.param_groups)


def test_defaults_carry_what_schedulers_read() -> None:
    group = {"params": [matrix()], "use_muon": True}
    assert MuonWithAuxAdam([dict(group)], lr=0.5, muon_lr=0.25).defaults["lr"] == 0.5
    assert MuonWithAuxAdam([dict(group)], muon_lr=0.25).defaults["lr"] == 0.25
    assert MuonWithAuxAdam([{**group, "lr": 0.125}]).defaults["lr"] == 0.125
    assert MuonWithAuxAdam([dict(group)], adjust_lr_fn="original").param_groups[0]["lr"] == 0.02


def test_keywords_override_the_config() -> None:
    config = MuonConfig(momentum=0.9, ns_steps=3)
    optimizer = MuonWithAuxAdam([{"params": [matrix()], "use_muon": True}], config, ns_steps="4")
    assert (optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["ns_steps"]) == (0.9, 4)


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'muon_lrr' is not an option of hf-muon\. Did you mean 'muon_lr'"):
        MuonWithAuxAdam([{"params": [matrix()], "use_muon": True}], muon_lrr=1.0)


def test_config_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="config must be a MuonConfig; got dict"):
        MuonWithAuxAdam([{"params": [matrix()], "use_muon": True}], {"lr": 1.0})


def test_case_10_given_groups_are_split_and_keep_their_options(make_model) -> None:
    model = make_model(0)
    no_decay = ("norm.weight", "norm.bias", "up.bias")
    named = dict(model.named_parameters())
    groups = [
        {
            "params": [(n, p) for n, p in named.items() if n not in no_decay],
            "weight_decay": 0.3,
            "lr": 0.7,
            "tag": "a",
        },
        {"params": [(n, named[n]) for n in no_decay], "weight_decay": 0.0, "lr": 0.2},
    ]
    optimizer = MuonWithAuxAdam(groups, lr=1.0, weight_decay=0.9)
    found = [(g["use_muon"], g["param_names"], g["weight_decay"], g["lr"]) for g in optimizer.param_groups]
    assert found == [
        (True, ["up.weight", "down.weight"], 0.3, 0.7),
        (False, ["embed.weight"], 0.3, 0.7),
        (False, list(no_decay), 0.0, 0.2),
    ]
    assert [g.get("tag") for g in optimizer.param_groups] == ["a", "a", None]
    assert groups[0]["lr"] == 0.7 and "use_muon" not in groups[0]  # the caller's dicts stay as they were


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: [], ValueError, "must hold at least one parameter; got none"),
        (lambda: [{"params": [], "use_muon": True}], ValueError, "must hold at least one parameter; got none"),
        (lambda: matrix(), TypeError, "got a single tensor"),
        (lambda: {"params": [matrix()]}, TypeError, "got a dict. Put it in a list"),
        (lambda: [matrix(), {"params": [matrix()]}], TypeError, "all groups or all parameters; got both"),
        (lambda: [matrix()], ValueError, r"params\[0\] must say which half.*tag_parameters"),
        (lambda: [("w", matrix())], ValueError, "w must say which half updates them.*tag_parameters"),
        (lambda: [{"params": {matrix()}, "use_muon": True}], TypeError, "ordered collection; got a set"),
        (lambda: [{"use_muon": True}], ValueError, "must have the key 'params'"),
        (lambda: [{"params": [matrix()], "use_muon": "yes"}], TypeError, "use_muon must be True or False; got 'yes'"),
        (lambda: [{"params": [3], "use_muon": True}], TypeError, r"params\[0\] must be a tensor; got int"),
        (
            lambda: [{"params": [("b", matrix(4))], "use_muon": True}],
            ValueError,
            r"b must have 2 or 3 dimensions to be on Muon; got shape \(4,\)",
        ),
        (
            lambda: [{"params": [("c", matrix(2, 2, 3, 3))], "use_muon": True}],
            ValueError,
            r"c must have 2 or 3 dimensions",
        ),
        (
            lambda: [{"params": [("a", p := matrix()), ("b", p)], "use_muon": True}],
            ValueError,
            "b must be given once; it is the same tensor as a",
        ),
        (
            lambda: [{"params": [p := matrix()], "use_muon": True}, {"params": [p], "use_muon": False}],
            ValueError,
            "must be in one group only; it is already there as",
        ),
        (
            lambda: [{"params": [("a", matrix()), matrix()], "use_muon": True}],
            ValueError,
            "all be named or all be unnamed; got 1 named of 2",
        ),
        (
            lambda: [{"params": [matrix()], "param_names": ["a", "b"], "use_muon": True}],
            ValueError,
            "param_names must have one entry per parameter; got 2 for 1",
        ),
        (
            lambda: [{"params": [matrix()], "matrix_views": [], "use_muon": True}],
            ValueError,
            "matrix_views must have one entry per parameter; got 0 for 1",
        ),
        (
            lambda: [{"params": [matrix()], "use_muon": True, "muon_lr": 1.0}],
            ValueError,
            "'muon_lr' must not stand in a parameter group; got 1.0. Use 'lr' there",
        ),
        (
            lambda: [{"params": [matrix()], "use_muon": True, "momentum": 1.5}],
            ValueError,
            r"momentum must lie in \[0, 1\); got 1.5",
        ),
    ],
)
def test_bad_input_is_refused_in_one_sentence(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MuonWithAuxAdam(make())


def test_view_on_the_parameter_is_used() -> None:
    param = matrix(4, 6)
    param.use_muon, param.muon_view = True, MatrixView(transposed=True)
    assert MuonWithAuxAdam([param]).param_groups[0]["matrix_views"] == [MatrixView(transposed=True)]


def test_closure_runs_once_with_gradients_on(make_model) -> None:
    model = make_model(0)
    optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(torch.arange(5)).square().mean()
        loss.backward()
        return loss

    before = model.down.weight.detach().clone()
    loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.requires_grad
    assert not torch.equal(before, model.down.weight)
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    assert optimizer.step() is None


def test_add_param_group_tagged_and_untagged(make_model) -> None:
    model = make_model(0)
    optimizer = MuonWithAuxAdam([("up.weight", model.up.weight)], lr=0.01)
    optimizer.add_param_group({"params": [("down.weight", model.down.weight), ("up.bias", model.up.bias)], "lr": 0.5})
    assert [(g["use_muon"], g["param_names"], g["lr"]) for g in optimizer.param_groups] == [
        (True, ["up.weight"], 0.01),
        (True, ["down.weight"], 0.5),
        (False, ["up.bias"], 0.5),
    ]
    assert set(optimizer.state[model.up.bias]) == {"step", "exp_avg", "exp_avg_sq"}
    with pytest.raises(ValueError, match=r"up\.bias must be in one group only"):
        optimizer.add_param_group({"params": [("up.bias", model.up.bias)], "use_muon": False})
    with pytest.raises(TypeError, match="param_group must be a dict; got list"):
        optimizer.add_param_group([])
    assert len(optimizer.param_groups) == 3


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_continue_with_the_same_bits(make_model, give_gradients, snapshot, same, duplicate) -> None:
    model = make_model(0)
    optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01, weight_decay=0.1)
    optimizer.track_update_rms = True
    give_gradients(model, 1)
    optimizer.step()
    other = duplicate(optimizer)
    assert same(snapshot(optimizer), snapshot(other))
    for one in (optimizer, other):
        for index, (_, param, _) in enumerate(one._labelled_params()):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(index))
        one.step()
    assert same(snapshot(optimizer), snapshot(other))
    assert other.update_rms() == pytest.approx(optimizer.update_rms())
    theirs = {id(p) for g in other.param_groups for p in g["params"]}
    assert theirs.isdisjoint({id(p) for p in model.parameters()})


def replace(optimizer: MuonWithAuxAdam, model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """What Accelerate does: new Parameter objects in the model and in the groups, without their attributes."""
    fresh = {}
    for name, param in list(model.named_parameters()):
        module = model.get_submodule(name.rpartition(".")[0])
        fresh[id(param)] = nn.Parameter(param.detach().clone().to(dtype or param.dtype))
        setattr(module, name.rpartition(".")[2], fresh[id(param)])
    for group in optimizer.param_groups:
        group["params"] = [fresh[id(param)] for param in group["params"]]


def test_case_26_replaced_parameters_keep_half_and_state(make_model, give_gradients, snapshot, same) -> None:
    results = []
    for swap in (False, True):
        model = make_model(0)
        optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01, weight_decay=0.1)
        for step in range(3):
            if swap and step == 2:
                replace(optimizer, model)
            give_gradients(model, step)
            optimizer.step()
        assert set(optimizer.state) == set(model.parameters())
        results.append(snapshot(optimizer))
    assert same(*results)


def test_state_follows_a_model_that_changes_its_dtype(make_model, give_gradients) -> None:
    model = make_model(0).bfloat16()
    optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01, fused_adam="true")
    give_gradients(model, 0)
    optimizer.step()
    average = optimizer.state[model.up.bias]["exp_avg"].clone()
    model.float()  # keeps the Parameter objects
    optimizer.rebuild_state()
    assert optimizer.state[model.up.bias]["exp_avg"].dtype == torch.float32
    assert torch.equal(optimizer.state[model.up.bias]["exp_avg"], average.float())
    assert float(optimizer.state[model.up.bias]["step"]) == 1.0
    give_gradients(model, 1)
    optimizer.step()


def test_case_26_replaced_unnamed_parameters_start_fresh_with_a_line(make_model, give_gradients, caplog) -> None:
    model = make_model(0)
    optimizer = MuonWithAuxAdam(model.parameters(), lr=0.01)
    give_gradients(model, 0)
    optimizer.step()
    replace(optimizer, model)
    optimizer.rebuild_state()
    assert not optimizer.state[model.up.weight]["momentum_buffer"].any()
    give_gradients(model, 1)
    optimizer.step()
    assert optimizer.state[model.up.weight]["momentum_buffer"].any()


def test_case_26_state_that_does_not_fit_a_replacement_starts_fresh_with_a_line(
    make_model, give_gradients, caplog
) -> None:
    model = make_model(0)
    optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01)
    give_gradients(model, 0)
    optimizer.step()
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(5, 8))
    with caplog.at_level("WARNING", logger="hf_muon.optim"):
        optimizer.rebuild_state()
    assert "Optimizer state of up.weight does not fit the parameter that replaced it" in caplog.text


def test_names_that_no_longer_fit_the_parameters_are_refused(make_model) -> None:
    optimizer = MuonWithAuxAdam(make_model(0).named_parameters())
    optimizer.param_groups[0]["params"].append(matrix())
    optimizer.param_groups[0]["param_names"].append("extra")
    with pytest.raises(ValueError, match="matrix_views must have one entry per parameter; got 2 for 3"):
        optimizer.rebuild_state()


def test_case_34_second_adapter_in_a_used_slot_starts_fresh(make_model, give_gradients) -> None:
    model = make_model(0)
    optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01)
    give_gradients(model, 0)
    optimizer.step()
    other = nn.Parameter(torch.randn_like(model.up.weight))
    group = optimizer.param_groups[0]
    group["params"][0], group["param_names"][0] = other, "up.second.weight"
    optimizer.rebuild_state()
    assert not optimizer.state[other]["momentum_buffer"].any()
    assert optimizer.state[model.down.weight]["momentum_buffer"].any()
    assert model.up.weight not in optimizer.state


def test_case_34_state_of_an_adapter_copied_in_place_is_reset_by_name(make_model, give_gradients) -> None:
    model = make_model(0)
    optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01)
    give_gradients(model, 0)
    optimizer.step()
    optimizer.rebuild_state(reset=["up.weight", "up.bias"])
    assert not optimizer.state[model.up.weight]["momentum_buffer"].any()
    assert float(optimizer.state[model.up.bias]["step"]) == 0.0
    assert optimizer.state[model.down.weight]["momentum_buffer"].any()
    with pytest.raises(ValueError, match=r"reset must name parameters of this optimizer; got up\.wait"):
        optimizer.rebuild_state(reset=["up.wait"])
