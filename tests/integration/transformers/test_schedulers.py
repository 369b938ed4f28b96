# SPDX-License-Identifier: Apache-2.0
"""Every scheduler of transformers runs, and both halves keep the ratio of their learning rates."""

import pytest
from transformers import SchedulerType, TrainerCallback

from tests.support.trainer_runs import EXACT, make_trainer, token_rows, training_entries

OPTIONS = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 3},
    "polynomial": {"lr_end": 1e-5},
    "reduce_lr_on_plateau": {"patience": 0, "factor": 0.5, "threshold": 10.0, "threshold_mode": "abs"},
    "greedy": {"patience": 0, "min_lr": 1e-6},
}
CONSTANT = {"constant"}
NEEDS_EVALUATION = {"reduce_lr_on_plateau", "greedy"}


@pytest.mark.parametrize("name", [kind.value for kind in SchedulerType])
def test_case_17_19_every_scheduler_keeps_the_ratio(tmp_path, name):
    settings = {"lr_scheduler_kwargs": OPTIONS[name]} if name in OPTIONS else {}
    trainer_settings = {}
    if name in NEEDS_EVALUATION:
        trainer_settings = {"eval_dataset": token_rows(4)}
        settings |= {"eval_strategy": "steps", "eval_steps": 1}
    else:
        settings |= {"warmup_steps": 2}
    trainer = make_trainer(
        tmp_path,
        trainer=trainer_settings,
        max_steps=7,
        learning_rate=1e-3,
        lr_scheduler_type=name,
        optim_args=f"muon_lr=0.02,adam_lr=5e-4,{EXACT}",
        **settings,
    )
    trainer.train()
    entries = training_entries(trainer)
    assert len(entries) == 7
    for entry in entries:
        assert entry["learning_rate"] == pytest.approx(entry["muon_lr"])
        assert entry["muon_lr"] == pytest.approx(40 * entry["adam_lr"], rel=1e-6)
    rates = [entry["muon_lr"] for entry in entries]
    assert max(rates) == pytest.approx(0.02) or name in {"polynomial", "greedy"}
    if name not in CONSTANT:
        # greedy starts low and rises while the loss falls, the others start at the full rate
        assert min(rates) < 0.95 * max(rates), "the schedule does not move"


def test_case_19_an_absolute_floor_is_relative_to_learning_rate(tmp_path):
    trainer = make_trainer(
        tmp_path,
        max_steps=4,
        learning_rate=1e-3,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": 1e-4},
        optim_args=f"muon_lr=0.02,{EXACT}",
    )
    trainer.train()
    last = trainer.lr_scheduler.get_last_lr()
    assert last == pytest.approx([2e-3, 1e-4, 1e-4])  # a tenth of each group's own rate


def test_case_17_both_rates_are_in_the_logs_and_the_state(tmp_path):
    seen = []

    class Recorder(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    trainer = make_trainer(
        tmp_path,
        trainer={"callbacks": [Recorder()]},
        logging_steps=2,
        lr_scheduler_type="constant",
        optim_args=f"muon_lr=0.02,adam_lr=0.001,{EXACT}",
        adam_epsilon=1e-12,
    )
    result = trainer.train()
    for source in (seen, trainer.state.log_history):
        steps = [entry for entry in source if "loss" in entry]
        assert len(steps) == 2
        for entry in steps:
            assert (entry["muon_lr"], entry["adam_lr"], entry["skipped_steps"]) == (0.02, 0.001, 0)
            # match_rms_adamw gives a step the size of 0.2 lr, give or take Newton-Schulz's 30 %.
            assert 0.5 * 0.2 * 0.02 < entry["muon_update_rms"] < 1.5 * 0.2 * 0.02
            assert 0.0 < entry["adam_update_rms"] <= 0.002
    assert result.metrics["skipped_steps"] == 0
