# SPDX-License-Identifier: Apache-2.0
"""`model.lora_rank`: adapters train, the pretrained weights do not, and the saved folder loads as a whole model."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_muon.cli.errors import UsageError
from hf_muon.cli.recipe import find_recipe, load_recipe
from hf_muon.cli.training.tasks import build_model, load_model


@pytest.fixture
def pretrained(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 96}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def test_adapters_train_on_frozen_weights_and_are_saved_whole(pretrained, tmp_path):
    recipe = load_recipe(find_recipe("gsm8k"), [f"model.name={pretrained}", "model.lora_rank=4"])
    model = build_model(recipe, SimpleNamespace(model_source=pretrained), seed=0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert len(trained) == 2 * 7 * 2  # A and B of seven projections in two layers
    for name, parameter in model.named_parameters():
        if name in trained:
            torch.nn.init.normal_(parameter, std=0.1)
    tokens = torch.randint(0, 96, (2, 9))
    with torch.no_grad():
        wanted = model.eval()(tokens).logits
        model.save_pretrained(tmp_path / "adapter")
        found = load_model(str(tmp_path / "adapter")).eval()(tokens).logits
        before = load_model(pretrained).eval()(tokens).logits
    assert torch.equal(found, wanted)
    assert not torch.allclose(found, before, atol=1e-3)


def test_all_weights_train_without_a_rank(pretrained):
    recipe = load_recipe(find_recipe("gsm8k"), [f"model.name={pretrained}"])
    model = build_model(recipe, SimpleNamespace(model_source=pretrained), seed=0)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_rank_needs_a_pretrained_model():
    recipe = load_recipe(find_recipe("gsm8k"), [], tiny=True)
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, lora_rank=4))
    with pytest.raises(UsageError, match=r"model\.lora_rank must be 0 without model\.name"):
        recipe.check()
