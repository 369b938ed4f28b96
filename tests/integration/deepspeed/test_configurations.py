# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed configurations that name Muon, experts, and what is refused before training, on 2 gloo ranks."""

import json
from pathlib import Path

import pytest
import torch

from hf_muon.integrations.deepspeed.trainer_start import update_norm
from tests.integration.deepspeed import jobs
from tests.integration.deepspeed.conftest import save
from tests.integration.deepspeed.test_trainer import MOVEMENT, distance
from tests.support import cpu_deepspeed
from tests.support.tiny_models import tiny_model

PUBLISHED = Path(__file__).resolve().parents[3] / "recipes" / "accelerate" / "moonlight_zero2.json"
# The same as optim_args: DeepSpeed's rule and AdamW defaults; rates at which float32 weights show 2e-5 of a step.
PUBLISHED_ARGS = "muon_lr=1e-2,adam_lr=2e-3,adjust_lr_fn=original,betas=(0.9;0.95),eps=1e-10"


@pytest.fixture(scope="module")
def moonlight(tmp_path_factory):
    """Moonlight's architecture, tiny: latent attention, a dense layer, a layer of four experts and a shared one."""
    torch.manual_seed(0)
    model = tiny_model("deepseek_v3", vocab_size=jobs.VOCABULARY, initializer_range=0.1)
    return save(model, tmp_path_factory.mktemp("moonlight"))


def published(**changes):
    """The published configuration; two ranks can share experts by two, and CPUs have no grouped product."""
    config = json.loads(PUBLISHED.read_text())
    config["expert_parallel"] |= {"autoep_size": 2, "use_grouped_mm": False}
    for path, value in changes.items():
        *parents, key = path.split(".")
        place = config
        for parent in parents:
            place = place[parent]
        place[key] = value
    return config


def run(job, tmp_path, *args, **options):
    return cpu_deepspeed.run(job, str(tmp_path), *args, **options)


@pytest.mark.slow
@pytest.mark.parametrize("split", [True, False], ids=["autoep_size=2", "whole experts"])
def test_the_published_configuration_trains_experts_like_one_process(tmp_path, moonlight, split):
    """float32 instead of bf16, to compare: experts in groups of their own, each expert orthogonalized by itself."""
    rates = {"optimizer.params.muon_lr": 1e-2, "optimizer.params.adam_lr": 2e-3}
    config = published(**{"bf16.enabled": False, "expert_parallel.enabled": split, **rates})
    results = run(jobs.train, tmp_path, moonlight, config, lr_scheduler_type="constant")
    reference = jobs.train(str(tmp_path / "one"), moonlight, optim_args=PUBLISHED_ARGS, lr_scheduler_type="constant")
    start = jobs.load(moonlight).state_dict()
    same = {n: v for n, v in reference["weights"].items() if n in results[0]["weights"] and (v != start[n]).any()}
    assert len(same) == (27 if split else 30)  # AutoEP renames gate and experts
    # Matrices only: AdamW turns rounding of a gradient near zero into a visible part of its step (3e-5 in a norm).
    gap, name = distance(
        {n: results[0]["weights"][n] for n in same if "proj" in n}, {n: same[n] for n in same if "proj" in n}, start
    )
    assert gap <= MOVEMENT, name
    matrices, elements = jobs.num_matrices(moonlight)
    assert sum(result["counts"]["ours"] for result in results) == matrices * jobs.STEPS
    assert sum(result["momentum_elements"] for result in results) <= 1.05 * elements
    for result in results:
        assert {lr for use_muon, _, lr in result["groups"] if use_muon} == {1e-2}
        assert {lr for use_muon, _, lr in result["groups"] if not use_muon} == {2e-3}
        experts = [names for use_muon, names, _ in result["groups"] if any("experts.w" in name for name in names)]
        assert [len(names) for names in experts] == ([3] if split else [])
        adamw = [name for use_muon, names, _ in result["groups"] if not use_muon for name in names]
        assert any("gate.weight" in name for name in adamw) and any("embed" in name for name in adamw)


@pytest.mark.slow
def test_the_published_configuration_trains_as_it_is_in_bf16(tmp_path, moonlight):
    results = run(jobs.train, tmp_path, moonlight, published(), bf16=True, accumulation=2)
    assert [entry["skipped_steps"] for entry in results[0]["logs"]] == [0] * jobs.STEPS
    assert sum(result["counts"]["ours"] for result in results) == jobs.num_matrices(moonlight)[0] * jobs.STEPS
    assert results[0]["logs"][0]["muon_lr"] == 1e-4 and results[0]["logs"][0]["adam_lr"] == 2e-6
    assert all(value.isfinite().all() for value in results[0]["weights"].values())


@pytest.mark.slow
def test_deepspeeds_own_muon_is_left_alone_and_its_clipping_told_with_numbers(tmp_path, llama):
    """`"type": "muon"` without optim="dmuon": clipping after Newton-Schulz shrinks steps by the update's own norm."""
    block = {"type": "muon", "params": {"muon_lr": 1e-2, "adam_lr": 0.0, "torch_adam": True}}
    config = jobs.config_of(2, optimizer=block)
    (clipped, said), _ = run(jobs.deepspeeds_own, tmp_path, llama, config, max_grad_norm=1.0, steps=1)
    (free, _), _ = run(jobs.deepspeeds_own, tmp_path, llama, config, max_grad_norm=0.0, steps=1)
    model = jobs.load(llama)
    norm, start = update_norm(model), model.state_dict()
    assert clipped["counts"]["deepspeed"] > 0 == clipped["counts"]["ours"]
    message = next(text for text in said if "DeepSpeed runs its own Muon here" in text)
    assert f"updates of norm about {norm:.1f} and shrinks every step about {norm:.1f}-fold" in message
    assert 'optim="dmuon"' in message
    moves = [
        (r["weights"][n] - start[n]).norm() for r in (free, clipped) for n in ["model.layers.0.mlp.up_proj.weight"]
    ]
    # Keller's coefficients leave singular values of 0.7 to 1.2, so the norm told is right to about a quarter.
    assert float(moves[0] / moves[1]) == pytest.approx(norm, rel=0.25)


@pytest.mark.slow
def test_ours_moves_the_same_with_and_without_clipping_where_every_step_is_clipped_alike(tmp_path, llama):
    """The other side of the test above: raw gradients are clipped, and Newton-Schulz forgets their scale."""
    block = {"type": "muon", "params": {"muon_lr": 1e-2, "adam_lr": 0.0}}
    config = jobs.config_of(2, optimizer=block)
    weights = [run(jobs.train, tmp_path, llama, config, steps=1, max_grad_norm=n)[0]["weights"] for n in (0.01, 0.0)]
    start = jobs.load(llama).state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    assert (weights[0][name] - weights[1][name]).norm() <= 1e-4 * (weights[1][name] - start[name]).norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1}}},
            {"optim_args": "muon_lr=1e-2"},
            "scheduler.type",
        ),
        ({"tensor_parallel": {"autotp_size": 2}}, {}, "tensor_parallel.autotp_size must be 1"),
        ({}, {"optim_args": "dmuon=z3"}, "dmuon must be auto or off under DeepSpeed"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, {}, "optimizer.type in the DeepSpeed config"),
        ({"optimizer": {"type": "muon", "params": {"muonlr": 1}}}, {}, "Did you mean 'muon_lr'?"),
        (
            {"optimizer": {"type": "muon", "params": {"lr": "auto"}}, "zero_optimization.stage": 3},
            {"optim": "adamw_torch"},
            "zero_optimization.reduce_scatter must be false",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_work_is_refused_on_every_rank_before_training(tmp_path, llama, changes, options, words):
    outcomes = run(jobs.message, tmp_path, llama, jobs.config_of(2, **changes), timeout=60, **options)
    for outcome in outcomes:
        assert outcome is not None and outcome[0] == "construction" and words in outcome[2]
