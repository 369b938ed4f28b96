# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed without Trainer: `deepspeed.initialize` by hand and Accelerate loops; steps with inf or NaN."""

import itertools

import pytest
import torch

from tests.integration.deepspeed import jobs
from tests.integration.deepspeed.conftest import save
from tests.integration.deepspeed.test_trainer import MOVEMENT, distance
from tests.support import cpu_deepspeed
from tests.support.tiny_models import tiny_model


@pytest.fixture(scope="module")
def start(llama):
    return {name: value.clone() for name, value in jobs.load(llama).state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_deepspeed_initialize_takes_the_optimizer_of_the_factory(llama, start, stage):
    results = cpu_deepspeed.run(jobs.plain_loop, llama, jobs.loop_config(stage))
    gap, name = distance(results[0]["history"][-1], jobs.one_process_loop(llama), start)
    assert gap <= MOVEMENT, name
    assert sum(result["counts"]["ours"] for result in results) == 14 * jobs.STEPS
    assert all(result["counts"]["deepspeed"] == 0 for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_heads_reach_their_owner_whole_and_are_orthogonalized_apart(llama, start, stage):
    options = {"matrix_split": "per_head"}
    results = cpu_deepspeed.run(jobs.plain_loop, llama, jobs.loop_config(stage), **options)
    gap, name = distance(results[0]["history"][-1], jobs.one_process_loop(llama, **options), start)
    assert gap <= MOVEMENT, name
    matrices = jobs.num_matrices(llama, **options)[0]
    assert matrices == 2 * (6 + 2 + 2 + 4)  # query, key and value heads; o, gate, up and down
    assert sum(result["counts"]["ours"] for result in results) == matrices * jobs.STEPS


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_with_nan_on_one_rank_is_skipped_whole_on_all(llama, stage):
    results = cpu_deepspeed.run(jobs.plain_loop, llama, jobs.loop_config(stage), spoiled=(1,))
    for result in results:
        before, spoiled, after = result["history"]
        assert all((before[name] == spoiled[name]).all() for name in before)
        assert any((spoiled[name] != after[name]).any() for name in before)
        assert all(value.isfinite().all() for value in after.values())
        assert (result["skipped"], result["last"], result["finite"]) == (1, False, True)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_accelerate_loops_take_options_from_the_optimizer_block(llama, start, stage):
    params = {**jobs.LOOP_OPTIONS, "lr": "auto", "torch_adam": True, "adjust_lr_fn": "match_rms_adamw"}
    config = jobs.loop_config(stage, optimizer={"type": "muon", "params": params})
    weights = cpu_deepspeed.run(jobs.accelerate_loop, llama, config)[0]
    gap, name = distance(weights, jobs.one_process_loop(llama), start)
    assert gap <= MOVEMENT, name


@pytest.fixture(scope="module")
def many_experts(tmp_path_factory):
    """More experts than the tokens of a step reach."""
    torch.manual_seed(0)
    sizes = {
        "num_experts": 128,
        "num_local_experts": 128,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 1,
        "initializer_range": 0.1,
    }
    return save(tiny_model("qwen3_moe", vocab_size=jobs.VOCABULARY, **sizes), tmp_path_factory.mktemp("experts"))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_experts_without_a_token_are_left_alone(many_experts, stage):
    """As everywhere else: no decay, momentum kept. Under ZeRO 3 the ranks share most experts by halves."""
    start = {name: value.clone() for name, value in jobs.load(many_experts).state_dict().items()}
    results = cpu_deepspeed.run(jobs.plain_loop, many_experts, jobs.loop_config(stage))
    gap, name = distance(results[0]["history"][-1], jobs.one_process_loop(many_experts), start)
    # An expert with one token has a gradient of rank one: Newton-Schulz lifts the rounding in its other directions.
    # Decay of the resting ones would be 1e-2 of the movement.
    assert gap <= 10 * MOVEMENT, name
    steps = [start, *results[0]["history"]]
    stack = "model.layers.0.mlp.experts.down_proj"
    rest = [(before[stack] == after[stack]).flatten(1).all(1) for before, after in itertools.pairwise(steps)]
    assert all(5 < int(idle.sum()) < 100 for idle in rest)
    assert any((first & ~second).any() for first, second in itertools.pairwise(rest))  # and back again
    orthogonalized = sum(result["counts"]["ours"] for result in results)
    assert orthogonalized < (jobs.num_matrices(many_experts)[0] - 2 * 5) * jobs.STEPS
