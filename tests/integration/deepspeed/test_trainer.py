# SPDX-License-Identifier: Apache-2.0
"""Stock Trainer under DeepSpeed, 2 gloo ranks, against one process of `MuonWithAuxAdam` with fp32 Newton-Schulz."""

import os

import pytest

from tests.integration.deepspeed import jobs
from tests.support import cpu_deepspeed

# Norm of the difference over norm of the movement, of the worst tensor. Both runs are float32 and differ only in the
# order in which gradients are summed; the bound.
MOVEMENT = 2e-5
STAGES = {
    "zero0": (0, {}),
    "zero1": (1, {}),
    "zero2": (2, {}),
    "zero3": (3, {}),
    "zero.Init": (3, {"zero_init": True}),
}


def train(tmp_path, folder, stage, changes=None, world_size=2, **options):
    config = jobs.config_of(stage, **(changes or {}))
    return cpu_deepspeed.run(jobs.train, str(tmp_path), folder, config, world_size=world_size, **options)


def distance(weights, wanted, start):
    """The worst tensor's difference in units of its movement, and its name."""
    assert set(weights) == set(wanted)
    moved = {name: (wanted[name] - start[name]).norm() for name in wanted}
    assert all(size > 0 for size in moved.values())
    return max((float((weights[name] - wanted[name]).norm() / moved[name]), name) for name in wanted)


@pytest.fixture(scope="module")
def start(llama):
    return {name: value.clone() for name, value in jobs.load(llama).state_dict().items()}


@pytest.fixture(scope="module")
def references(llama, tmp_path_factory):
    """One-process runs by options, made once."""
    made = {}

    def get(**options):
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = jobs.train(str(tmp_path_factory.mktemp("one")), llama, **options)
        return made[key]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_trains_like_one_process(tmp_path, llama, start, references, stage, accumulation):
    number, options = STAGES[stage]
    results = train(tmp_path, llama, number, accumulation=accumulation, **options)
    reference = references(accumulation=accumulation)
    gap, name = distance(results[0]["weights"], reference["weights"], start)
    assert gap <= MOVEMENT, name
    # Real Newton-Schulz calls of both ranks: each matrix once per step, and none of them DeepSpeed's.
    matrices, elements = jobs.num_matrices(llama)
    assert sum(result["counts"]["ours"] for result in results) == matrices * jobs.STEPS > 0
    assert sum(result["counts"]["deepspeed"] for result in results) == 0
    copies = 2 if number == 0 else 1  # ZeRO 0 replicates everything
    momentum = sum(result["momentum_elements"] for result in results)
    assert copies * elements <= momentum <= 1.05 * copies * elements
    for result in results:
        muon = [name for use_muon, names, _ in result["groups"] if use_muon for name in names]
        assert len(muon) == 14 and not any("embed" in name or "lm_head" in name or "norm" in name for name in muon)
    for entry, wanted in zip(results[0]["logs"], reference["logs"], strict=True):
        assert entry["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
        assert (entry["muon_lr"], entry["adam_lr"]) == (wanted["muon_lr"], wanted["adam_lr"])
        assert entry["muon_update_rms"] > 0 and entry["skipped_steps"] == 0
        if number:
            assert entry["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_raw_gradients_are_clipped_jointly_before_newton_schulz(tmp_path, llama, start, references, stage):
    """The one-process Trainer clips raw gradients at their joint norm; an epsilon of 0.01 makes AdamW feel it."""
    options = {"max_grad_norm": 0.05, "optim_args": "eps=0.01"}
    wanted = references(**options)["weights"]
    assert distance(references(optim_args="eps=0.01")["weights"], wanted, start)[0] > 0.1
    results = train(tmp_path, llama, stage, **options)
    gap, name = distance(results[0]["weights"], wanted, start)
    assert gap <= MOVEMENT, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        (2, {"zero_optimization.reduce_scatter": False}),
        (3, {"zero_optimization.reduce_scatter": False}),
        (2, {"zero_optimization.offload_optimizer": {"device": "cpu"}}),
        (3, {"zero_optimization.offload_optimizer": {"device": "cpu"}}),
        (3, {"zero_optimization.sub_group_size": 3000}),
        (2, {"zero_optimization.round_robin_gradients": True}),
    ],
    ids=str,
)
def test_settings_of_zero_do_not_change_the_training(tmp_path, llama, start, references, stage, changes):
    """Also where DeepSpeed's own Muon stops: ZeRO 3 with reduce_scatter (its default), offload with reduce_scatter."""
    results = train(tmp_path, llama, stage, changes)
    gap, name = distance(results[0]["weights"], references(accumulation=1)["weights"], start)
    assert gap <= MOVEMENT, name
    assert sum(result["counts"]["ours"] for result in results) == 14 * jobs.STEPS


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_every_option_reaches_the_partitions(tmp_path, llama, start, references, stage):
    args = "muon_lr=2e-2,adam_lr=1e-3,adjust_lr_fn=original,ns_method=standard,ns_steps=4,nesterov=false,momentum=0.9"
    args += ",ns_coefficients=(3.4;-4.7;2.0),muon_weight_decay=0.3,adam_weight_decay=0,exclude=k_proj,betas=(0.8;0.9)"
    results = train(tmp_path, llama, stage, optim_args=args)
    reference = references(optim_args=args)
    assert distance(references(accumulation=1)["weights"], reference["weights"], start)[0] > 0.1
    gap, name = distance(results[0]["weights"], reference["weights"], start)
    assert gap <= MOVEMENT, name
    assert sum(result["counts"]["ours"] for result in results) == 12 * jobs.STEPS
    assert [entry["muon_lr"] for entry in results[0]["logs"]] == [entry["muon_lr"] for entry in reference["logs"]]
    assert results[0]["logs"][0]["muon_lr"] == 2e-2 and results[0]["logs"][0]["adam_lr"] == 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_fused_and_transposed_projections_are_split_in_the_partitions(tmp_path, tmp_path_factory, stage):
    """GPT-2: `Conv1D` weights are (in, out), `c_attn` holds query, key and value."""
    import torch

    from tests.integration.deepspeed.conftest import save
    from tests.support.tiny_models import tiny_model

    torch.manual_seed(0)
    model = tiny_model("gpt2", vocab_size=jobs.VOCABULARY, initializer_range=0.1, resid_pdrop=0, embd_pdrop=0)
    model.config.attn_pdrop = 0
    folder = save(model, tmp_path_factory.mktemp("gpt2"))
    start = jobs.load(folder).state_dict()
    reference = jobs.train(str(tmp_path / "one"), folder)
    results = train(tmp_path, folder, stage)
    moved = {n: v for n, v in reference["weights"].items() if (v - start[n]).norm() > 0 and "c_attn.bias" not in n}
    gap, name = distance({n: results[0]["weights"][n] for n in moved}, moved, start)
    assert gap <= MOVEMENT, name
    matrices, _ = jobs.num_matrices(folder)
    assert matrices == 2 * 6  # three of c_attn, c_proj, c_fc, c_proj in each of two layers
    assert sum(result["counts"]["ours"] for result in results) == matrices * jobs.STEPS


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_trains_with_float32_momentum(tmp_path, llama, start, references, stage):
    results = train(tmp_path, llama, stage, bf16=True, dtype="bfloat16")
    wanted = references(accumulation=1)["weights"]
    for name, moved in ((n, wanted[n] - start[n]) for n in wanted if "proj" in n):
        got = results[0]["weights"][name] - start[name]
        # bf16 rounds weights of 0.1 to 4e-4, a step moves them by 6e-4; forward and backward are bf16 too.
        cosine = float((got * moved).sum() / (got.norm() * moved.norm()))
        assert cosine > 0.8, name
    assert sum(result["counts"]["ours"] for result in results) == 14 * jobs.STEPS
    assert results[0]["momentum_dtypes"] == ["torch.float32"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path, llama, stage):
    options = {"steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = train(tmp_path, llama, stage, **options)
    checkpoint = os.path.join(str(tmp_path), "checkpoint-2")
    resumed = train(tmp_path / "again", llama, stage, resume=checkpoint, **options)
    assert [entry["step"] for entry in resumed[0]["logs"]] == [1, 2, 3, 4]
    assert resumed[0]["logs"] == whole[0]["logs"]
    for name, wanted in whole[0]["weights"].items():
        assert (resumed[0]["weights"][name] == wanted).all(), name
    assert sum(result["counts"]["ours"] for result in resumed) == 14 * 2
