# SPDX-License-Identifier: Apache-2.0
"""Accumulation, clipping, precision and checkpointing change how gradients come about, not what is done with them."""

import pytest
import torch

from tests.support.trainer_runs import (
    EXACT,
    make_trainer,
    plain_optimizer,
    tiny_llama,
    token_rows,
    training_entries,
    weights,
)


def run(folder, rows, model=None, **settings):
    trainer = make_trainer(folder, rows, model=model, lr_scheduler_type="constant", **settings)
    trainer.train()
    return trainer


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1])
def test_case_23_accumulation_4_equals_one_large_batch(tmp_path, max_grad_norm):
    rows = token_rows(32)
    # AdamW divides by |gradient| + eps at first, so rounding in a gradient near zero moves a weight by lr*noise/eps:
    # an eps above the smallest gradients keeps that far below the bound. The float64 test below has the usual eps.
    shared = {"max_steps": 2, "max_grad_norm": max_grad_norm, "adam_epsilon": 1e-4}
    large = run(tmp_path, rows, per_device_train_batch_size=16, **shared)
    small = run(tmp_path, rows, per_device_train_batch_size=4, gradient_accumulation_steps=4, **shared)
    start, one, other = weights(tiny_llama()), weights(large.model), weights(small.model)
    assert max(float((one[n] - start[n]).abs().max()) for n in start) > 1e-3
    # fp32 adds the same gradients in another order; Newton-Schulz per micro-batch would differ by about 1e-3.
    assert max(float((one[n] - other[n]).abs().max()) for n in one) < 1e-6
    for left, right in zip(training_entries(large), training_entries(small), strict=True):
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-5)


def test_case_23_accumulation_is_exact_where_rounding_is_not_in_the_way(tmp_path):
    rows = token_rows(32)
    shared = {"max_steps": 2, "max_grad_norm": 0.5, "optim_args": None}
    large = run(tmp_path, rows, tiny_llama().double(), per_device_train_batch_size=16, **shared)
    small = run(tmp_path, rows, tiny_llama().double(), gradient_accumulation_steps=4, **shared)
    other = weights(small.model)
    for name, value in weights(large.model).items():
        # float64 throughout: 1e-10 leaves five orders over rounding, which Trainer's fp32 loss scaling needs.
        assert (value - other[name]).abs().max() < 1e-10, name


def test_case_20_clipping_sees_raw_gradients_of_both_halves(tmp_path):
    rows = token_rows(4)
    probe = tiny_llama()
    batch = torch.stack([row["input_ids"] for row in rows])
    probe(input_ids=batch, labels=batch).loss.backward()
    joint = torch.stack([p.grad.norm() for p in probe.parameters()]).norm()
    runs = {clip: run(tmp_path, rows, max_steps=1, max_grad_norm=clip) for clip in (0.0, 1e-3)}
    assert training_entries(runs[1e-3])[0]["grad_norm"] == pytest.approx(float(joint), rel=1e-5)
    # Muon is blind to the scale of its gradient: a clip a thousand times smaller gives the same Muon step.
    start, free, clipped = weights(tiny_llama()), weights(runs[0.0].model), weights(runs[1e-3].model)
    for name in plain_optimizer(runs[0.0]).param_groups[0]["param_names"]:
        moved = free[name] - start[name]
        assert (free[name] - clipped[name]).norm() < 1e-3 * moved.norm(), name
    # What reaches the momentum is the clipped gradient itself: the joint norm, no more.
    optimizer = plain_optimizer(runs[1e-3])
    muon = [optimizer.state[p]["momentum_buffer"] / 0.05 for p in optimizer.param_groups[0]["params"]]
    adamw = [optimizer.state[p]["exp_avg"] / 0.1 for group in optimizer.param_groups[1:] for p in group["params"]]
    assert torch.stack([value.norm() for value in muon + adamw]).norm() == pytest.approx(1e-3, rel=1e-3)


def test_gradient_checkpointing_gives_the_same_weights(tmp_path):
    rows = token_rows()
    plain = run(tmp_path, rows, max_steps=3)
    checkpointed = run(tmp_path, rows, max_steps=3, gradient_checkpointing=True)
    for name, value in weights(plain.model).items():
        assert torch.equal(value, weights(checkpointed.model)[name]), name


def test_bf16_autocast_trains_on_fp32_weights(tmp_path):
    rows = token_rows(8)
    trainer = run(tmp_path, rows * 4, bf16=True, max_steps=8, per_device_train_batch_size=8, learning_rate=5e-3)
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
    optimizer = plain_optimizer(trainer)
    momenta = [optimizer.state[p]["momentum_buffer"] for p in optimizer.param_groups[0]["params"]]
    assert all(momentum.dtype == torch.float32 for momentum in momenta)
    entries = training_entries(trainer)
    assert entries[-1]["loss"] < entries[0]["loss"] - 0.2


def test_load_best_model_at_end_and_evaluation(tmp_path):
    rows = token_rows(8)
    trainer = make_trainer(
        tmp_path,
        rows,
        max_steps=6,
        learning_rate=5e-3,
        trainer={"eval_dataset": rows},
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        optim_args=EXACT,
    )
    trainer.train()
    evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == 3
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(evaluations), abs=1e-6)
    assert all("muon_lr" not in entry for entry in trainer.state.log_history if "eval_loss" in entry)
