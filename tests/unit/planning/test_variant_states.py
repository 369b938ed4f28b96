# SPDX-License-Identifier: Apache-2.0
"""The plan's bytes of optimizer state against the tensors that an optimizer really holds."""

import pytest
import torch
from torch import nn

import hf_muon
from hf_muon.planning.variants import VARIANTS
from tests.support.trainer_runs import tiny_llama


class Odd(nn.Module):
    """A stack of experts whose elements do not fill blocks, a matrix with a bias, an embedding, and a frozen part."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.experts = nn.Parameter(torch.randn(3, 7, 10))
        self.up = nn.Linear(10, 33)
        self.down = nn.Linear(33, 10, bias=False)
        self.down.weight.requires_grad_(False)


def held(optimizer, keys=None):
    states = [state for state in optimizer.state.values()]
    return sum(
        value.untyped_storage().nbytes()
        for state in states
        for key, value in state.items()
        if keys is None or key.startswith(keys)
    )


@pytest.mark.parametrize("make", [tiny_llama, Odd], ids=["llama", "odd"])
def test_every_variant_holds_what_the_plan_says(make):
    plan = hf_muon.plan(make(), world_size=1).to_dict()["variants"]
    assert list(plan) == ["adamw", *VARIANTS]
    for label, variant in VARIANTS.items():
        model = make().to(variant.weights)
        optimizer = hf_muon.OptimizerFactory()(model, lr=1e-3, **variant.options)
        row = plan[label]
        assert row["device_bytes_per_rank"] + row["host_bytes_per_rank"] == held(optimizer), label
        offloaded = held(optimizer, "momentum") if variant.options.get("offload") == "cpu" else 0
        assert row["host_bytes_per_rank"] == offloaded, label
    model = make()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adamw = torch.optim.AdamW(trainable)
    for parameter in trainable:
        parameter.grad = torch.zeros_like(parameter)
    adamw.step()
    assert plan["adamw"]["device_bytes_per_rank"] == held(adamw)
    for row in plan.values():
        total = row["device_bytes_per_rank"] + row["host_bytes_per_rank"]
        assert row["of_adamw"] == pytest.approx(total / held(adamw), rel=1e-12)


def test_int8_is_a_fifth_of_adamw_for_a_large_model():
    """Figures of the documentation, from published sizes: one byte per element and four per 256 on Muon."""
    plan = hf_muon.plan("Qwen2.5-3B", world_size=8)
    muon, rest = plan.census.muon_elements, plan.census.adamw_elements
    counters = 4 * sum(not parameter.row.is_muon for parameter in plan.census.parameters)
    row = plan.to_dict()["variants"]["momentum_dtype=int8"]
    assert row["device_bytes_per_rank"] == (muon + 4 * muon / 256 + 8 * rest) / 8 + counters  # all sizes fill blocks
    assert row["device_of_adamw"] == pytest.approx(0.215, abs=5e-4)
