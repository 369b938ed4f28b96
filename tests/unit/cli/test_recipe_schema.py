# SPDX-License-Identifier: Apache-2.0
"""Recipes are read strictly; every mistake has a message that names the way out."""

import pytest

from hf_muon.cli.errors import UsageError
from hf_muon.cli.recipe import find_recipe, list_recipes, load_recipe
from hf_muon.cli.recipe.loading import write_recipe
from hf_muon.cli.resources import recipes_dir

DEMO = "demo"


def load(*overrides, tiny=False):
    return load_recipe(find_recipe(DEMO), overrides, tiny=tiny)


def test_the_shipped_recipes_load_and_give_both_optimizers_as_many_rates():
    names = [recipe.name for recipe in list_recipes()]
    assert names[0] == "demo" and "addition" in names
    for recipe in list_recipes():
        assert len(recipe.search.muon) == len(recipe.search.adamw)
        assert recipe.title and recipe.reproduces and recipe.needs and recipe.time
        assert recipe.shows and recipe.does_not_show
        header = (recipes_dir() / f"{recipe.name}.yaml").read_text().splitlines()[:8]
        assert any(f"hf-muon run {recipe.name}" in line for line in header)


def test_overrides_are_typed():
    recipe = load("training.steps=7", "search.muon=[1e-3, 2]", "optimizer.ns_steps=3", "optimizer.nesterov=false")
    assert recipe.training.steps == 7
    assert recipe.search.muon == [1e-3, 2.0]
    assert recipe.optimizer["ns_steps"] == 3 and recipe.optimizer["nesterov"] is False


def test_tiny_comes_before_overrides():
    assert load(tiny=True).training.steps < load().training.steps
    assert load("training.steps=3", tiny=True).training.steps == 3


def test_a_written_recipe_reads_back_the_same(tmp_path):
    recipe = load("training.steps=3", "optimizer.ns_steps=4", tiny=True)
    write_recipe(recipe, tmp_path / "config.yaml")
    assert load_recipe(tmp_path / "config.yaml").to_dict() == recipe.to_dict()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainin.steps=3", "'trainin' is not a block of a recipe. Did you mean 'training'"),
        ("training.stepz=3", "'training.stepz' is not a key of a recipe. Did you mean 'training.steps'"),
        ("training.steps=many", "training.steps must be a whole number; got 'many'"),
        ("training.steps=true", "training.steps must be a whole number; got True"),
        ("training.steps=0", "training.steps must be at least 1; got 0"),
        ("training.steps=[1", "training.steps must be a YAML value"),
        ("training.weight_decay=-1", "training.weight_decay must be finite and not negative"),
        ("training.scheduler=liner", "training.scheduler must be one of .* Did you mean 'linear'"),
        ("training.keep_checkpoints=some", "training.keep_checkpoints must be one of none, best, all"),
        ("search.muon=3e-3", r"search.muon must be a list such as \[1, 2\]; got 0.003"),
        ("search.muon=[]", "search.muon must hold positive learning rates"),
        ("search.seeds=[1, 1]", "search.seeds must hold at least one seed and none twice"),
        ("search.metric=exact_match", "search.metric must be one of loss; got 'exact_match'"),
        ("model.hidden_size=30", "model.hidden_size must be a multiple of 2 x num_attention_heads = 8; got 30"),
        ("model.num_key_value_heads=3", "model.num_key_value_heads must divide num_attention_heads = 4"),
        ("optimizer.ns_stepz=3", "optimizer: 'ns_stepz' is not an option of hf-muon. Did you mean 'ns_steps'"),
        ("optimizer.ns_method=gramm", "optimizer: ns_method must be one of gram, standard"),
        ("optimizer.muon_lr=1", "optimizer.muon_lr must stay out of a recipe; got 1"),
        ("title.x=3", "'title.x' is not a key of a recipe"),
        ("steps", "an override must read block.key=value; got 'steps'"),
    ],
)
def test_a_bad_override_is_named(override, message):
    with pytest.raises(UsageError, match=message):
        load(override)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "must hold the blocks of a recipe; got list"),
        ("a: [1\n", "must be a readable YAML file"),
        ("taks: {}\n", "'taks' is not a block of a recipe. Did you mean 'task'"),
        ("task: 3\n", "task must be a block of keys; got 3"),
        ("task: {kindd: text}\n", "'task.kindd' is not a key of a recipe"),
        ("optimizer: 3\n", "optimizer must be a block of keys"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_recipe(path)


def test_tiny_needs_a_tiny_block(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("training: {steps: 3}\n")
    assert load_recipe(path).name == "mine"
    with pytest.raises(UsageError, match="has no tiny: block"):
        load_recipe(path, tiny=True)


def test_an_unknown_recipe_is_named():
    with pytest.raises(UsageError, match=r"'demmo' is not a recipe. Did you mean 'demo'\?"):
        find_recipe("demmo")
    with pytest.raises(UsageError, match=r"gone/x.yaml is not a file"):
        find_recipe("gone/x.yaml")
