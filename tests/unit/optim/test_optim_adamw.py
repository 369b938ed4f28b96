# SPDX-License-Identifier: Apache-2.0
"""The AdamW half against `torch.optim.AdamW`, to the bit."""

from __future__ import annotations

import logging

import pytest
import torch

from hf_muon.optim import MuonWithAuxAdam, auxiliary_adam

SHAPES = [(37, 53), (64,), (3, 5, 7), (1,)]


def run(optimizer: torch.optim.Optimizer, params: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
    generator = torch.Generator().manual_seed(seed)
    for step in range(10):
        for i, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = None if i == 1 and step == 3 else grad
        optimizer.step()
        scheduler.step()
    state = [optimizer.state[param][key] for param in params for key in ("step", "exp_avg", "exp_avg_sq")]
    return [*(param.detach() for param in params), *state]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("choice", "kwargs"), [("auto", {}), ("false", {}), ("true", {"fused": True})])
def test_ten_steps_with_a_schedule_equal_torch_to_the_bit(choice: str, kwargs: dict, dtype: torch.dtype) -> None:
    seed = torch.initial_seed() % 2**31
    results = []
    for ours in (True, False):
        torch.manual_seed(seed)
        params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
        options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        if ours:
            group = {"params": params, "use_muon": False}
            optimizer: torch.optim.Optimizer = MuonWithAuxAdam([group], fused_adam=choice, **options)
        else:
            optimizer = torch.optim.AdamW(params, **options, **kwargs)
        results.append(run(optimizer, params, seed))
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


def test_muon_half_does_not_disturb_the_adamw_half() -> None:
    vector = torch.randn(9)
    results = []
    for with_muon in (True, False):
        param, matrix = torch.nn.Parameter(vector.clone()), torch.nn.Parameter(torch.ones(4, 4))
        groups = [{"params": [param], "use_muon": False}] + [{"params": [matrix], "use_muon": True}] * with_muon
        optimizer = MuonWithAuxAdam(groups, lr=1e-2)
        torch.manual_seed(2)
        for _ in range(3):
            param.grad = torch.randn(9)
            matrix.grad = torch.ones(4, 4)
            optimizer.step()
        results.append(param.detach())
    assert torch.equal(*results)


def test_fused_falls_back_with_one_log_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    auxiliary_adam.has_fused_adamw.cache_clear()

    def no_fused(*args: object, fused: bool | None = None, **kwargs: object) -> None:
        raise RuntimeError("fused is not there")

    monkeypatch.setattr(auxiliary_adam, "adamw", no_fused)
    params = [torch.nn.Parameter(torch.randn(3)) for _ in range(3)]
    with caplog.at_level(logging.INFO, logger="hf_muon.optim"):
        optimizer = MuonWithAuxAdam([{"params": params, "use_muon": False}], fused_adam="true")
    monkeypatch.undo()
    assert [record.getMessage() for record in caplog.records] == [
        "fused AdamW is not available for torch.float32 on cpu; foreach AdamW is used instead."
    ]
    params[0].grad = torch.ones(3)
    optimizer.step()
    assert bool(params[0].isfinite().all())
    auxiliary_adam.has_fused_adamw.cache_clear()


def test_tensor_learning_rate_of_a_group_is_used_and_followed() -> None:
    matrix, vector = torch.nn.Parameter(torch.zeros(4, 6)), torch.nn.Parameter(torch.zeros(5))
    rate = torch.tensor(0.25)
    groups = [{"params": [matrix], "use_muon": True, "lr": rate}, {"params": [vector], "use_muon": False, "lr": rate}]
    optimizer = MuonWithAuxAdam(groups, adjust_lr_fn="none", weight_decay=0.0)
    matrix.grad, vector.grad = torch.randn(4, 6), torch.ones(5)
    optimizer.step()
    torch.testing.assert_close(vector.detach(), torch.full((5,), -0.25))
    moved = matrix.detach().clone()
    rate.fill_(0.0)
    optimizer.step()
    assert torch.equal(matrix, moved)


def test_tensor_learning_rate_with_several_elements_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lr must be a number or a one-element tensor; got shape \(2,\)"):
        MuonWithAuxAdam([{"params": [torch.nn.Parameter(torch.ones(2))], "use_muon": False, "lr": torch.ones(2)}])
