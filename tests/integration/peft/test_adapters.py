# SPDX-License-Identifier: Apache-2.0
"""Kinds of adapters through the Trainer: right routing, two steps, the base untouched, saved and loaded again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft")

from tests.support.trainer_runs import make_trainer, plain_optimizer, tiny_llama, token_rows

KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True, "lora_alpha": 16},
    "dora": {"use_dora": True},
    "all linear layers, with biases": {"target_modules": "all-linear", "bias": "lora_only"},
    "modules_to_save": {"modules_to_save": ["lm_head", "up_proj"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
}


class PackedLinear(nn.Linear):
    """Stand-in for a 4- or 8-bit layer: a frozen flat uint8 parameter, given back as floats in the forward pass."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        weight = linear.weight.detach()
        self.register_buffer("scale", weight.abs().amax() / 127)
        packed = (weight / self.scale).round().to(torch.int8).view(torch.uint8).reshape(-1, 1)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.view(torch.int8).view(self.out_features, self.in_features) * self.scale
        return nn.functional.linear(x, weight.to(x.dtype))


def pack(model: nn.Module) -> nn.Module:
    """Replace every hidden linear layer by its packed form and freeze the rest, as a quantized base arrives."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, PackedLinear(module))
    return model.requires_grad_(False)


def config(**options) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **options})


def logits(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def train(model: nn.Module, folder) -> dict[bool, set[str]]:
    """Take two steps; return the names in each half of the optimizer, by `use_muon`."""
    trainer = make_trainer(folder, model=model, rows=token_rows(8), max_steps=2)
    trainer.train()
    halves: dict[bool, set[str]] = {True: set(), False: set()}
    for group in plain_optimizer(trainer).param_groups:
        halves[group["use_muon"]] |= set(group["param_names"])
    return halves


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_adapter_trains_and_comes_back(kind: str, tmp_path) -> None:
    base = tiny_llama()
    model = peft.get_peft_model(copy.deepcopy(base), config(**KINDS[kind]))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    halves = train(model, tmp_path)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert halves[True] | halves[False] == trainable
    for name in halves[True]:
        assert "lora_A" in name or "lora_B" in name or ("modules_to_save" in name and "up_proj" in name)
    assert all(any(x in name for x in ("magnitude", "lm_head", "embed", "bias")) for name in halves[False])
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    # a LoRA A has no gradient before B has moved, so one step is enough only for B; two move both
    assert moved == trainable
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))
    assert not torch.equal(logits(again), logits(base))


def test_a_quantized_base_stays_packed_and_untouched(tmp_path) -> None:
    base = pack(tiny_llama())
    model = peft.get_peft_model(copy.deepcopy(base), config(target_modules=["q_proj", "v_proj", "down_proj"]))
    packed = {name: p.detach().clone() for name, p in model.named_parameters() if p.dtype == torch.uint8}
    halves = train(model, tmp_path)
    assert len(packed) == 14 and not halves[False]
    assert len(halves[True]) == 12 and all("lora_" in name for name in halves[True])
    assert all(torch.equal(model.get_parameter(name), value) for name, value in packed.items())
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))


def test_several_adapters_train_in_turn_and_leave_each_other_alone(tmp_path) -> None:
    base = tiny_llama()
    model = peft.get_peft_model(copy.deepcopy(base), config(), adapter_name="first")
    model.add_adapter("second", config(r=2, target_modules=["v_proj"]))
    for name in ("first", "second", "first"):
        model.set_adapter(name)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        halves = train(model, tmp_path)
        assert halves[True] and not halves[False] and all(f".{name}." in n for n in halves[True])
        assert {n for n, p in model.named_parameters() if not torch.equal(p, before[n])} == halves[True]
    model.save_pretrained(tmp_path / "adapters")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapters" / "first", adapter_name="first")
    again.load_adapter(tmp_path / "adapters" / "second", adapter_name="second")
    outputs = {}
    for name in ("first", "second"):
        model.set_adapter(name)
        again.set_adapter(name)
        outputs[name] = logits(model)
        assert torch.equal(logits(again), outputs[name])
    assert not torch.equal(outputs["first"], outputs["second"])


def test_case_34_a_slot_used_before_starts_fresh_under_the_same_name(tmp_path) -> None:
    model = peft.get_peft_model(tiny_llama(), config())
    trainer = make_trainer(tmp_path, model=model, rows=token_rows(8), max_steps=2)
    trainer.train()
    optimizer = plain_optimizer(trainer)
    model.delete_adapter("default")
    model.add_adapter("default", config())
    model.set_adapter("default")
    (group,) = optimizer.param_groups
    named = dict(model.named_parameters())
    group["params"] = [named[name] for name in group["param_names"]]
    optimizer.rebuild_state(reset=group["param_names"])
    assert len(group["params"]) == 8
    assert not any(optimizer.state[p]["momentum_buffer"].any() for p in group["params"])
    assert {id(p) for p in optimizer.state} == {id(p) for p in group["params"]}
