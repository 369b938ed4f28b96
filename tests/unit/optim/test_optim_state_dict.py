# SPDX-License-Identifier: Apache-2.0
"""Saving and loading: by name, by position, from AdamW, through torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from hf_muon.optim import MuonWithAuxAdam


@pytest.fixture
def trained(make_model, give_gradients):
    model = make_model(0)
    optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01, weight_decay=0.1)
    for step in range(3):
        give_gradients(model, step)
        optimizer.step()
    return model, optimizer


def by_name(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    return {name: optimizer.state[p] for name, p in model.named_parameters()}


def assert_same_state(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].keys() == right[name].keys(), name
        for key in left[name]:
            assert torch.equal(left[name][key], right[name][key]), (name, key)


def test_saved_state_is_plain_and_named(trained) -> None:
    _, optimizer = trained
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert loaded["param_groups"][0]["param_names"] == ["up.weight", "down.weight"]
    assert loaded["param_groups"][0]["matrix_views"] is None
    assert optimizer.param_groups[0]["matrix_views"] is not None
    assert loaded["state"][0].keys() == {"momentum_buffer"}


def test_resume_is_bit_identical(trained, give_gradients, snapshot, same) -> None:
    model, optimizer = trained
    other_model = copy.deepcopy(model)
    for param, source in zip(other_model.parameters(), model.parameters(), strict=True):
        param.use_muon = source.use_muon
    other = MuonWithAuxAdam(other_model.named_parameters(), lr=0.5, weight_decay=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.param_groups[0]["lr"] == 0.01
    for one, owner in ((optimizer, model), (other, other_model)):
        give_gradients(owner, 9)
        one.step()
    assert same(snapshot(optimizer), snapshot(other))


def test_loading_copies_the_values(trained, make_model) -> None:
    model, optimizer = trained
    other_model = make_model(1)
    other = MuonWithAuxAdam(other_model.named_parameters())
    other.load_state_dict(optimizer.state_dict())
    other.state[other_model.up.weight]["momentum_buffer"].zero_()
    assert optimizer.state[model.up.weight]["momentum_buffer"].any()


def test_another_order_and_grouping_is_matched_by_name(trained, make_model) -> None:
    model, optimizer = trained
    other_model = make_model(1)
    named = list(other_model.named_parameters())[::-1]
    groups = [{"params": [pair], "lr": 0.3} for pair in named]
    other = MuonWithAuxAdam(groups)
    other.load_state_dict(optimizer.state_dict())
    assert_same_state(by_name(optimizer, model), by_name(other, other_model))
    assert [g["lr"] for g in other.param_groups] == [0.01] * 6
    assert other.param_groups[0]["param_names"] == [named[0][0]]
    assert {tuple(g["param_names"]): g["weight_decay"] for g in other.param_groups}[("up.weight",)] == 0.1


def test_learning_rates_are_restored_per_group(trained, make_model) -> None:
    _, optimizer = trained
    for group, rate in zip(optimizer.param_groups, (0.1, 0.2, 0.3), strict=True):
        group["lr"], group["initial_lr"] = rate, rate * 2
    other = MuonWithAuxAdam(make_model(1).named_parameters())
    other.load_state_dict(optimizer.state_dict())
    assert [(g["lr"], g["initial_lr"]) for g in other.param_groups] == [(0.1, 0.2), (0.2, 0.4), (0.3, 0.6)]


def test_new_parameters_start_fresh_and_old_names_are_left_out_with_a_line(trained, make_model, caplog) -> None:
    model, optimizer = trained
    other_model = make_model(1)
    named = [(("new." + n if n == "up.weight" else n), p) for n, p in other_model.named_parameters()]
    other = MuonWithAuxAdam(named)
    with caplog.at_level("WARNING", logger="hf_muon.optim"):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state[other_model.up.weight]["momentum_buffer"].any()
    assert torch.equal(
        other.state[other_model.down.weight]["momentum_buffer"], optimizer.state[model.down.weight]["momentum_buffer"]
    )
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "The checkpoint has state of up.weight, not in this optimizer: left out.",
        "The checkpoint has no optimizer state for new.up.weight: starts fresh.",
    ]


def test_case_34_checkpoint_of_the_first_adapter_gives_the_second_nothing(trained, make_model) -> None:
    _, optimizer = trained
    other_model = make_model(1)
    other = MuonWithAuxAdam([(f"second.{n}", p) for n, p in other_model.named_parameters()])
    other.load_state_dict(optimizer.state_dict())  # same sizes: matching by position would take everything
    assert all(not value.any() for state in other.state.values() for value in state.values())


def test_other_shape_is_refused_by_name_and_changes_nothing(trained, make_model, snapshot, same) -> None:
    _, optimizer = trained
    other_model = make_model(1)
    other_model.up.weight = nn.Parameter(torch.randn(12, 9))
    other_model.up.weight.use_muon = True
    other = MuonWithAuxAdam(other_model.named_parameters(), lr=0.7)
    before = snapshot(other)
    message = r"up\.weight: momentum_buffer must have the parameter's shape \(12, 9\); the checkpoint has \(12, 8\)"
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(optimizer.state_dict())
    assert same(before, snapshot(other))
    assert other.param_groups[0]["lr"] == 0.7


@pytest.mark.parametrize("names_saved", [True, False])
def test_without_names_on_one_side_position_counts(trained, make_model, names_saved: bool) -> None:
    model, optimizer = trained
    saved = optimizer.state_dict()
    other_model = make_model(1)
    if names_saved:
        other = MuonWithAuxAdam(other_model.parameters())
    else:
        for group in saved["param_groups"]:
            del group["param_names"]
        other = MuonWithAuxAdam(other_model.named_parameters())
    other.load_state_dict(saved)
    assert_same_state(by_name(optimizer, model), by_name(other, other_model))


def test_position_with_other_sizes_is_refused(trained, make_model) -> None:
    saved = torch.optim.AdamW(make_model(1).parameters()).state_dict()
    with pytest.raises(ValueError, match=r"must have groups of the sizes \[2, 1, 3\].*no parameter names; got \[6\]"):
        trained[1].load_state_dict(saved)


def test_something_else_than_a_state_dict_is_refused(trained) -> None:
    with pytest.raises(ValueError, match=r"must have the keys 'state' and 'param_groups'; got \['weights'\]"):
        trained[1].load_state_dict({"weights": 1})


def test_named_adamw_checkpoint_gives_its_averages_to_the_adamw_half(make_model, give_gradients, caplog) -> None:
    model = make_model(0)
    adamw = torch.optim.AdamW(model.named_parameters(), lr=0.123, betas=(0.8, 0.9))
    give_gradients(model, 0)
    adamw.step()
    optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01)
    with caplog.at_level("WARNING", logger="hf_muon.optim"):
        optimizer.load_state_dict(adamw.state_dict())
    for name in ("embed.weight", "up.bias", "norm.weight", "norm.bias"):
        param = model.get_parameter(name)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[param][key], adamw.state[param][key])
    assert not optimizer.state[model.up.weight]["momentum_buffer"].any()
    assert "state of another optimizer for up.weight, down.weight (2 parameters): it starts fresh." in caplog.text
    muon, decay, _ = optimizer.param_groups
    assert (muon["lr"], decay["lr"], decay["betas"]) == (0.01, 0.123, (0.8, 0.9))
    assert "amsgrad" not in decay
    give_gradients(model, 1)
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_case_28_momentum_is_cast_to_float32_at_load(trained, make_model, give_gradients, dtype: torch.dtype) -> None:
    model, optimizer = trained
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for key in state:
            state[key] = state[key] if key == "step" else state[key].to(dtype)
    other_model = make_model(1)
    other = MuonWithAuxAdam(other_model.named_parameters())
    other.load_state_dict(saved)
    for state in by_name(other, other_model).values():
        assert all(value.dtype == torch.float32 for value in state.values())
    expected = optimizer.state[model.up.weight]["momentum_buffer"].to(dtype).float()
    assert torch.equal(other.state[other_model.up.weight]["momentum_buffer"], expected)
    give_gradients(other_model, 5)
    other.step()


def test_case_28_bf16_weights_keep_their_float32_momentum(make_model, give_gradients) -> None:
    # torch's own loader would cast it to the parameter's dtype.
    model = make_model(0).bfloat16()
    optimizer = MuonWithAuxAdam(model.named_parameters())
    optimizer.state[model.up.weight]["momentum_buffer"].normal_()
    other_model = make_model(1).bfloat16()
    other = MuonWithAuxAdam(other_model.named_parameters())
    other.load_state_dict(optimizer.state_dict())
    assert_same_state(by_name(optimizer, model), by_name(other, other_model))
    assert other.state[other_model.up.weight]["momentum_buffer"].dtype == torch.float32


def test_load_hooks_of_others_see_the_checkpoint_before_matching(trained, make_model) -> None:
    _, optimizer = trained
    other_model = make_model(1)
    other = MuonWithAuxAdam([(f"module.{n}", p) for n, p in other_model.named_parameters()])

    def add_prefix(_: torch.optim.Optimizer, state_dict: dict) -> dict:
        groups = copy.deepcopy(state_dict["param_groups"])
        for group in groups:
            group["param_names"] = [f"module.{name}" for name in group["param_names"]]
        return {**state_dict, "param_groups": groups}

    other.register_load_state_dict_pre_hook(add_prefix)
    other.load_state_dict(optimizer.state_dict())
    assert other.state[other_model.up.weight]["momentum_buffer"].any()


OPTIONS = [
    StateDictOptions(),
    StateDictOptions(full_state_dict=True, cpu_offload=True),
    StateDictOptions(flatten_optimizer_state_dict=True),
]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "full", "flat"])
@pytest.mark.parametrize("fresh", [False, True])
def test_case_27_distributed_checkpoint_round_trip(
    trained, make_model, options: StateDictOptions, fresh: bool
) -> None:
    model, optimizer = trained
    if fresh:  # no step has been made and no parameter ever had a gradient
        model = make_model(0)
        optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01, ns_coefficients=((3.0, -3.2, 1.2),))
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    if not options.flatten_optimizer_state_dict:
        assert saved["state"].keys() == dict(model.named_parameters()).keys()
    other_model = make_model(1)
    before = [param.detach().clone() for param in other_model.parameters()]
    other = MuonWithAuxAdam(other_model.named_parameters(), lr=0.9)
    set_optimizer_state_dict(other_model, other, saved, options=options)
    assert_same_state(by_name(optimizer, model), by_name(other, other_model))
    assert [g["lr"] for g in other.param_groups] == [0.01] * 3
    assert other.param_groups[0]["ns_coefficients"] == optimizer.param_groups[0]["ns_coefficients"]
    assert other.param_groups[0]["matrix_views"] == optimizer.param_groups[0]["matrix_views"]
    assert all(torch.equal(a, b) for a, b in zip(before, other_model.parameters(), strict=True))


def test_case_26_distributed_checkpoint_after_a_swap(trained, make_model) -> None:
    model, optimizer = trained
    expected = copy.deepcopy(by_name(optimizer, model))
    new = nn.Parameter(model.up.weight.detach().clone())
    model.up.weight = new
    optimizer.param_groups[0]["params"][0] = new
    saved = get_optimizer_state_dict(model, optimizer)
    assert_same_state(expected, saved["state"])
    other_model = make_model(1)
    other = MuonWithAuxAdam(other_model.named_parameters())
    for name in ("up", "down"):
        getattr(other_model, name).weight = nn.Parameter(getattr(other_model, name).weight.detach().clone())
    other.param_groups[0]["params"] = [other_model.up.weight, other_model.down.weight]
    set_optimizer_state_dict(other_model, other, saved)
    assert_same_state(expected, by_name(other, other_model))


def test_distributed_names_that_differ_from_ours_are_matched_in_order(trained, make_model) -> None:
    model, optimizer = trained
    saved = get_optimizer_state_dict(model, optimizer)
    other_model = make_model(1)
    other = MuonWithAuxAdam([(f"_orig_mod.{n}", p) for n, p in other_model.named_parameters()])
    set_optimizer_state_dict(other_model, other, saved)
    assert_same_state(by_name(optimizer, model), by_name(other, other_model))
    assert other.param_groups[0]["param_names"] == ["_orig_mod.up.weight", "_orig_mod.down.weight"]
