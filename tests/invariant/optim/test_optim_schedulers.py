# SPDX-License-Identifier: Apache-2.0
"""Every learning-rate scheduler of torch, and those of transformers, keep the ratio of the two rates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.optim import lr_scheduler as s

from hf_muon.optim import MuonWithAuxAdam

MUON_LR, ADAM_LR = 0.08, 0.001


def make_optimizer() -> MuonWithAuxAdam:
    matrix, vector = torch.nn.Parameter(torch.zeros(4, 6)), torch.nn.Parameter(torch.zeros(5))
    groups = [{"params": [matrix], "use_muon": True}, {"params": [vector], "use_muon": False}]
    return MuonWithAuxAdam(groups, lr=MUON_LR, adam_lr=ADAM_LR)


SCHEDULERS: dict[str, Callable[[MuonWithAuxAdam], s.LRScheduler]] = {
    "lambda": lambda o: s.LambdaLR(o, lambda step: 0.9**step),
    "multiplicative": lambda o: s.MultiplicativeLR(o, lambda step: 0.95),
    "step": lambda o: s.StepLR(o, 3),
    "multistep": lambda o: s.MultiStepLR(o, [2, 5]),
    "constant": lambda o: s.ConstantLR(o, 0.5, total_iters=3),
    "linear": lambda o: s.LinearLR(o, 1.0, 0.1, total_iters=8),
    "exponential": lambda o: s.ExponentialLR(o, 0.9),
    "cosine": lambda o: s.CosineAnnealingLR(o, 12),
    "warm_restarts": lambda o: s.CosineAnnealingWarmRestarts(o, 4),
    "polynomial": lambda o: s.PolynomialLR(o, 12, power=2.0),
    "sequential": lambda o: s.SequentialLR(o, [s.LinearLR(o, 0.1, 1.0, 3), s.CosineAnnealingLR(o, 12)], [3]),
    "chained": lambda o: s.ChainedScheduler([s.ConstantLR(o, 0.5, 3), s.ExponentialLR(o, 0.9)]),
    "one_cycle": lambda o: s.OneCycleLR(o, [MUON_LR, ADAM_LR], total_steps=12),
    "cyclic": lambda o: s.CyclicLR(o, [MUON_LR / 10, ADAM_LR / 10], [MUON_LR, ADAM_LR], step_size_up=3),
}


def run(optimizer: MuonWithAuxAdam, step_scheduler: Callable[[int], None]) -> list[tuple[float, float]]:
    rates = []
    for step in range(10):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.randn_like(param)
        optimizer.step()
        step_scheduler(step)
        rates.append(tuple(float(group["lr"]) for group in optimizer.param_groups))
    return rates


def assert_ratio_kept(rates: list[tuple[float, float]]) -> None:
    assert len({muon for muon, _ in rates}) > 1
    for muon, adam in rates:
        assert adam * MUON_LR == pytest.approx(muon * ADAM_LR, rel=1e-9, abs=1e-18)  # float64 rounding


@pytest.mark.parametrize("name", SCHEDULERS)
def test_case_17_torch_schedulers_keep_the_ratio(name: str) -> None:
    optimizer = make_optimizer()
    scheduler = SCHEDULERS[name](optimizer)
    assert_ratio_kept(run(optimizer, lambda _: scheduler.step()))


def test_case_17_reduce_on_plateau_keeps_the_ratio() -> None:
    optimizer = make_optimizer()
    scheduler = s.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    assert_ratio_kept(run(optimizer, lambda _: scheduler.step(1.0)))


def test_case_17_swa_keeps_the_ratio() -> None:
    optimizer = make_optimizer()
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=[MUON_LR / 8, ADAM_LR / 8], anneal_epochs=4)
    assert_ratio_kept(run(optimizer, lambda _: scheduler.step()))


def test_one_cycle_moves_the_momentum_of_muon_and_leaves_betas() -> None:
    optimizer = make_optimizer()
    scheduler = s.OneCycleLR(optimizer, [MUON_LR, ADAM_LR], total_steps=12, base_momentum=0.85, max_momentum=0.95)
    run(optimizer, lambda _: scheduler.step())
    assert 0.85 <= optimizer.param_groups[0]["momentum"] < 0.95
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("cosine_with_restarts", {}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("cosine_with_min_lr", {"min_lr": MUON_LR / 10}),
        ("cosine_warmup_with_min_lr", {"min_lr": MUON_LR / 10}),
        ("inverse_sqrt", {}),
        ("constant_with_warmup", {}),
        ("warmup_stable_decay", {"num_decay_steps": 4}),
    ],
)
def test_case_19_transformers_schedulers_keep_the_ratio(name: str, kwargs: dict) -> None:
    transformers = pytest.importorskip("transformers")
    optimizer = make_optimizer()
    scheduler = transformers.get_scheduler(
        name, optimizer, num_warmup_steps=3, num_training_steps=12, scheduler_specific_kwargs=kwargs
    )
    assert_ratio_kept(run(optimizer, lambda _: scheduler.step()))


def test_case_19_transformers_polynomial_and_plateau_work() -> None:
    transformers = pytest.importorskip("transformers")
    optimizer = make_optimizer()
    scheduler = transformers.get_scheduler(
        "polynomial",
        optimizer,
        num_warmup_steps=0,
        num_training_steps=12,
        scheduler_specific_kwargs={"lr_end": 1e-7, "power": 1.0},
    )
    assert_ratio_kept(run(optimizer, lambda _: scheduler.step()))
    optimizer = make_optimizer()
    plateau = transformers.get_scheduler("reduce_lr_on_plateau", optimizer, scheduler_specific_kwargs={"patience": 1})
    assert_ratio_kept(run(optimizer, lambda _: plateau.step(1.0)))
