# SPDX-License-Identifier: Apache-2.0
"""Live diagnostics: the figures against an SVD, when they come, and that they cost nothing otherwise."""

from __future__ import annotations

import math

import pytest
import torch

from hf_muon.optim import MuonWithAuxAdam
from hf_muon.optim.diagnostics import orthogonality_error, stable_rank


def test_figures_match_the_singular_values() -> None:
    for shape in ((24, 60), (60, 24), (1, 9), (9, 1), (30, 30)):
        matrix = torch.randn(shape) * torch.logspace(-2, 0, shape[1])
        s = torch.linalg.svdvals(matrix.double())
        exact = float(s.square().sum() / s[0] ** 2)
        # Power iteration is a lower bound of the norm; its start does not favour the leading vector.
        assert exact * (1 - 1e-5) <= float(stable_rank(matrix)) <= exact * 1.05
        wanted = float((s.square() - 1).square().mean().sqrt())
        assert math.isclose(float(orthogonality_error(matrix)), wanted, rel_tol=1e-4)
    assert float(orthogonality_error(torch.linalg.qr(torch.randn(20, 8)).Q)) < 1e-6
    assert math.isclose(float(stable_rank(torch.outer(torch.randn(8), torch.randn(5)))), 1.0, rel_tol=1e-5)


def test_numbers_come_on_every_second_step_and_once(make_model, give_gradients) -> None:
    model = make_model(0)
    optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01, diagnostics=2, weight_decay=0.0)
    before = {}
    for step in range(4):
        give_gradients(model, step)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
        found = optimizer.diagnostics()
        assert (found != {}) == (step % 2 == 1)
        assert optimizer.diagnostics() == {}
    for index, group in enumerate(optimizer.param_groups):
        moved = torch.cat(
            [(p - before[n]).detach().flatten() for n, p in zip(group["param_names"], group["params"], strict=True)]
        )
        # Differences of float32 weights of size one lose digits of a step of 0.002.
        assert math.isclose(found[f"update_rms_group{index}"], float(moved.square().mean().sqrt()), rel_tol=2e-3)
    assert 0 < found["orthogonality_error"] < 0.5  # five quintic steps end with singular values in 0.7 to 1.2
    assert 1 <= found["stable_rank"] <= 8


@pytest.mark.parametrize("every", [0, 3])
def test_steps_that_are_not_due_look_at_nothing(make_model, give_gradients, monkeypatch, every) -> None:
    def forbidden(*_):
        raise AssertionError("looked")

    for name in ("orthogonality_error", "stable_rank", "applied_square_sum"):
        monkeypatch.setattr(f"hf_muon.optim.diagnostics.{name}", forbidden)
    model = make_model(0)
    optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01, diagnostics=every)
    for step in range(2):
        give_gradients(model, step)
        optimizer.step()
    assert optimizer.diagnostics() == {}


def test_looking_changes_no_bit(make_model, give_gradients, snapshot, same) -> None:
    def run(every: int) -> list[torch.Tensor]:
        model = make_model(0)
        optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01, diagnostics=every, normuon=True)
        for step in range(2):
            give_gradients(model, step)
            optimizer.step()
        return snapshot(optimizer)

    assert same(run(0), run(1))
