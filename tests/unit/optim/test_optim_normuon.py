# SPDX-License-Identifier: Apache-2.0
"""NorMuon against the algorithm of the paper in float64, for every way of storing matrices."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from hf_muon.optim import MuonWithAuxAdam
from hf_muon.optim.normuon import row_shape
from hf_muon.optim.state_spec import ROW_STATISTICS
from hf_muon.param_groups.views import MatrixView

LR, DECAY, BETA1, BETA2 = 0.02, 0.1, 0.9, 0.95

CASES = {
    "tall": ((40, 12), MatrixView()),
    "wide": ((12, 40), MatrixView()),
    "experts": ((3, 10, 16), MatrixView()),
    "experts_transposed": ((3, 16, 10), MatrixView(transposed=True)),
    "transposed": ((20, 30), MatrixView(transposed=True)),
    "fused": ((48, 20), MatrixView(parts=(24, 12, 12))),
    "fused_groups": ((48, 20), MatrixView(groups=2, parts=(12, 6, 6))),
    "stacked": ((36, 10), MatrixView(stack=3)),
    "stacked_transposed": ((36, 10), MatrixView(stack=3, transposed=True)),
    "convolution": ((12, 3, 2, 2), MatrixView(flatten=True)),
    "flattened_transposed": ((12, 3, 8), MatrixView(flatten=True, transposed=True)),
}


def polar_iteration(matrix: torch.Tensor) -> torch.Tensor:
    """The quintic on singular values, float64."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / torch.linalg.vector_norm(s)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


def matrices_of(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Every matrix of a storage tensor, output rows first, sharing its memory; written out by name."""
    if name in ("tall", "wide"):
        return [tensor]
    if name == "experts":
        return list(tensor)
    if name == "experts_transposed":
        return [one.T for one in tensor]
    if name == "transposed":
        return [tensor.T]
    if name == "fused":
        return [tensor[:24], tensor[24:36], tensor[36:]]
    if name == "stacked":
        return [tensor[:12], tensor[12:24], tensor[24:]]
    if name == "stacked_transposed":
        return [tensor[:12].T, tensor[12:24].T, tensor[24:].T]
    if name == "convolution":
        return [tensor.view(12, 12)]
    if name == "flattened_transposed":
        return [tensor.view(12, 24).T]
    raise AssertionError(name)


def grouped_rows(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Rows of `fused_groups`: two blocks of 12 + 6 + 6; part i of both blocks is matrix i (copies)."""
    first, second = tensor[:24], tensor[24:]
    return [torch.cat([first[a:b], second[a:b]]) for a, b in ((0, 12), (12, 18), (18, 24))]


class Paper:
    """Algorithm 1 of arXiv:2510.05491 for one matrix, without nesterov."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.momentum = torch.zeros_like(weight)
        self.rows = torch.zeros(weight.shape[0], dtype=weight.dtype)

    def step(self, grad: torch.Tensor) -> None:
        m, n = grad.shape
        self.momentum = BETA1 * self.momentum + (1 - BETA1) * grad
        orthogonal = polar_iteration(self.momentum)
        self.rows = BETA2 * self.rows + (1 - BETA2) * (orthogonal**2).mean(dim=1)
        even = orthogonal / (self.rows.sqrt()[:, None] + 1e-8)
        rate = 0.2 * LR * math.sqrt(m * n) / torch.linalg.matrix_norm(even)
        self.weight = self.weight * (1 - LR * DECAY) - rate * even


@pytest.mark.parametrize("name", CASES)
def test_five_steps_match_the_paper_in_float64(name) -> None:
    shape, view = CASES[name]
    param = torch.nn.Parameter(torch.randn(shape) * 0.05)
    group = {"params": [("w", param)], "matrix_views": [view], "use_muon": True}
    options = {"momentum": BETA1, "nesterov": False, "normuon": True, "normuon_beta2": BETA2, "ns_method": "standard"}
    optimizer = MuonWithAuxAdam([group], lr=LR, weight_decay=DECAY, ns_dtype="float32", **options)
    split = grouped_rows if name == "fused_groups" else lambda tensor: matrices_of(name, tensor)
    start = [matrix.clone() for matrix in split(param.detach().double())]
    peers = [Paper(weight) for weight in start]
    for _ in range(5):
        param.grad = torch.randn(shape)
        for peer, grad in zip(peers, split(param.grad.double()), strict=True):
            peer.step(grad)
        optimizer.step()
    for ours, peer, first in zip(split(param.detach().double()), peers, start, strict=True):
        # fp32 rounding grows by at most the slope of the iteration, about 3.44**5.
        assert float((ours - peer.weight).norm() / (peer.weight - first).norm()) <= 2e-5
    rows = optimizer.state[param][ROW_STATISTICS]
    assert tuple(rows.shape) == row_shape(view, shape)
    assert rows.numel() == sum(peer.rows.numel() for peer in peers)
    assert abs(float(rows.double().sum() - sum(peer.rows.sum() for peer in peers))) < 1e-4


def test_steps_keep_the_size_of_muon_and_even_out_rows() -> None:
    def movement(normuon: bool) -> torch.Tensor:
        param = torch.nn.Parameter(torch.zeros(24, 64))
        optimizer = MuonWithAuxAdam([{"params": [param], "use_muon": True}], lr=1.0, normuon=normuon, weight_decay=0.0)
        torch.manual_seed(2)
        param.grad = torch.randn(24, 64) * torch.logspace(-2, 0, 24)[:, None] + torch.randn(1, 64)
        optimizer.step()
        return param.detach()

    plain, even = movement(False), movement(True)
    spread = [float(step.norm(dim=1).max() / step.norm(dim=1).min()) for step in (plain, even)]
    assert spread[1] < 1.001 < 1.05 < spread[0]
    assert math.isclose(float(even.square().mean().sqrt()), 0.2, rel_tol=1e-4)  # 0.2 lr per element, as the paper says


def test_zero_gradients_stay_zero_and_statistics_resume_to_the_bit(make_model, give_gradients, snapshot, same) -> None:
    model = make_model(0)
    optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01, normuon=True)
    model.up.weight.grad = torch.zeros_like(model.up.weight)
    before = model.up.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.up.weight, before)
    other = MuonWithAuxAdam(model.named_parameters(), lr=0.01, normuon=True)
    for step in range(2):
        give_gradients(model, step)
        optimizer.step()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert same(snapshot(optimizer), snapshot(other))
    plain = MuonWithAuxAdam(model.named_parameters(), lr=0.01)
    plain.load_state_dict(optimizer.state_dict())
    other.load_state_dict(plain.state_dict())  # without statistics: they start at zero, the momentum is kept
    state = other.state[model.up.weight]
    assert bool(state["momentum_buffer"].any()) and not state[ROW_STATISTICS].any()
