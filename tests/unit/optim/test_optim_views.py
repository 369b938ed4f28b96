# SPDX-License-Identifier: Apache-2.0
"""Fused projections, heads and experts against the same matrices stored separately, and experts without a token."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_muon import MuonWithAuxAdam
from hf_muon.optim.functional import MuonEntry, MuonOptions, muon_update_
from hf_muon.param_groups import MatrixView

STEPS = 5
# name -> (shape of the parameter, its view): every storage that docs/routing.md lists.
STORED = {
    "consecutive": ((96, 32), MatrixView(parts=(64, 16, 16))),
    "consecutive by head": ((96, 32), MatrixView(parts=(64, 16, 16), head_rows=(16, 16, 16))),
    "interleaved by row": ((64, 32), MatrixView(groups=32, parts=(1, 1))),
    "per head": ((96, 32), MatrixView(groups=4, parts=(8, 8, 8))),
    "per head, split": ((96, 32), MatrixView(groups=4, parts=(8, 8, 8), head_rows=(8, 8, 8))),
    "grouped queries": ((96, 32), MatrixView(groups=2, parts=(32, 8, 8), head_rows=(8, 8, 8))),
    "latent keys and values": ((96, 16), MatrixView(groups=4, parts=(16, 8), head_rows=(16, 8))),
    "query and gate": ((128, 32), MatrixView(groups=4, parts=(16, 16), head_rows=(16, 0))),
    "separate heads": ((64, 32), MatrixView(head_rows=(16,))),
    "Conv1D": ((32, 96), MatrixView(transposed=True, parts=(32, 32, 32))),
    "Conv1D by head": ((32, 96), MatrixView(transposed=True, parts=(32, 32, 32), head_rows=(8, 8, 8))),
    "experts, fused": ((4, 64, 32), MatrixView(parts=(32, 32), routed=True)),
    "experts, interleaved and transposed": ((4, 32, 64), MatrixView(transposed=True, groups=32, parts=(1, 1))),
    "stacked": ((96, 32), MatrixView(stack=4, transposed=True, routed=True)),
    "adapter A of experts": ((32, 24), MatrixView(stack=4, routed=True)),
    "adapter B of experts": ((48, 16), MatrixView(alternating=4, parts=(32, 16), routed=True)),
    "kernel": ((32, 16, 2, 2), MatrixView(flatten=True)),
    "transposed kernel": ((32, 16, 2, 2), MatrixView(flatten=True, transposed=True)),
}
OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "ns_dtype": "float32"}


def separate(view: MatrixView, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return every single matrix of `tensor`, copied: what a model without fusing would store."""
    return [one.clone() for group in view.matrices(tensor) for one in group.reshape(-1, *group.shape[-2:])]


@pytest.mark.parametrize("normuon", [False, True])
@pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("name", STORED)
def test_equals_separately_stored_matrices_bit_for_bit(name: str, rule: str, normuon: bool) -> None:
    shape, view = STORED[name]
    fused = nn.Parameter(torch.randn(shape))
    singles = [nn.Parameter(matrix) for matrix in separate(view, fused.detach())]
    options = {**OPTIONS, "adjust_lr_fn": rule, "normuon": normuon}
    one = MuonWithAuxAdam([{"params": [fused], "matrix_views": [view], "use_muon": True}], **options)
    many = MuonWithAuxAdam([{"params": singles, "use_muon": True}], **options)
    for _ in range(STEPS):
        fused.grad = torch.randn(shape)
        for single, grad in zip(singles, separate(view, fused.grad), strict=True):
            single.grad = grad
        one.step()
        many.step()
    for ours, theirs in zip(separate(view, fused.detach()), singles, strict=True):
        assert torch.equal(ours, theirs)


def entry_of(view: MatrixView, shape: tuple[int, ...]) -> MuonEntry:
    return MuonEntry(torch.randn(shape), torch.randn(shape), torch.randn(shape), view)


EXPERTS = {
    "plain": ((6, 8, 12), MatrixView(routed=True)),
    "transposed": ((6, 12, 8), MatrixView(transposed=True, routed=True)),
    "fused": ((6, 16, 12), MatrixView(parts=(8, 8), routed=True)),
    "stacked": ((48, 12), MatrixView(stack=6, routed=True)),
    "stacked transposed": ((48, 12), MatrixView(stack=6, transposed=True, routed=True)),
}


def experts_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(6, -1, tensor.shape[-1])


def test_case_22_an_adapter_of_an_expert_without_a_token_keeps_its_columns() -> None:
    entry = entry_of(MatrixView(alternating=6, routed=True), (8, 12))
    entry.grad[:, 4::6] = 0.0
    before = entry.param.clone(), entry.momentum.clone()
    muon_update_([entry], MuonOptions(0.1, 0.5, 0.95, True, "gram", 5, "keller", "float32", "original"))
    for now, then in zip((entry.param, entry.momentum), before, strict=True):
        assert [torch.equal(now[:, e::6], then[:, e::6]) for e in range(6)] == [e == 4 for e in range(6)]


@pytest.mark.parametrize(("nesterov", "normuon"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("name", EXPERTS)
def test_case_03_batched_experts_equal_a_loop_over_experts(name: str, nesterov: bool, normuon: bool) -> None:
    """Some experts get no token in some steps; the loop gives those no gradient at all."""
    shape, view = EXPERTS[name]
    whole = nn.Parameter(torch.randn(shape))
    loop = [nn.Parameter(one.clone()) for one in experts_of(whole.detach())]
    plain = MatrixView(transposed=view.transposed, parts=view.parts)
    options = {**OPTIONS, "nesterov": nesterov, "normuon": normuon}
    ours = MuonWithAuxAdam([{"params": [whole], "matrix_views": [view], "use_muon": True}], **options)
    theirs = MuonWithAuxAdam([{"params": loop, "matrix_views": [plain] * 6, "use_muon": True}], **options)
    for _ in range(STEPS):
        whole.grad = torch.randn(shape)
        for index, reached in enumerate(torch.rand(6) < 0.6):
            if not reached:
                experts_of(whole.grad)[index] = 0.0
            loop[index].grad = experts_of(whole.grad)[index].clone() if reached else None
        ours.step()
        theirs.step()
    stacked = torch.stack([one.detach() for one in loop])
    # One batched product instead of six, on weights of about 1: rounding of float32.
    torch.testing.assert_close(experts_of(whole.detach()), stacked, rtol=0, atol=1e-6)
    momenta = torch.stack([theirs.state[one]["momentum_buffer"] for one in loop])
    assert torch.equal(experts_of(ours.state[whole]["momentum_buffer"]), momenta)


@pytest.mark.parametrize("name", EXPERTS)
def test_case_22_an_expert_without_a_token_keeps_weights_and_momentum_to_the_bit(name: str) -> None:
    shape, view = EXPERTS[name]
    entry = entry_of(view, shape)
    experts_of(entry.grad)[[1, 4]] = 0.0
    before = entry.param.clone(), entry.momentum.clone()
    options = MuonOptions(0.1, 0.5, 0.95, True, "gram", 5, "keller", "float32", "original")
    muon_update_([entry], options)
    for now, then in zip((entry.param, entry.momentum), before, strict=True):
        kept = [torch.equal(one, old) for one, old in zip(experts_of(now), experts_of(then), strict=True)]
        assert kept == [False, True, False, False, True, False]


def test_case_16_a_stack_that_is_no_mixture_still_decays_without_gradient() -> None:
    entry = entry_of(MatrixView(), (3, 8, 12))
    entry.grad.zero_()
    entry.momentum.zero_()
    expected = entry.param * 0.95
    muon_update_([entry], MuonOptions(0.1, 0.5, 0.95, True, "gram", 5, "keller", "float32", "original"))
    assert torch.equal(entry.param, expected)


def test_a_skipped_step_and_idle_experts_together_change_nothing() -> None:
    entry = entry_of(MatrixView(routed=True), (6, 8, 12))
    entry.grad[2] = 0.0
    before = entry.param.clone(), entry.momentum.clone()
    options = MuonOptions(0.1, 0.5, 0.95, True, "gram", 5, "keller", "float32", "original")
    muon_update_([entry], options, skip=torch.tensor(True))
    assert torch.equal(entry.param, before[0]) and torch.equal(entry.momentum, before[1])
    muon_update_([entry], options, skip=torch.tensor(False))
    kept = [torch.equal(one, old) for one, old in zip(entry.param, before[0], strict=True)]
    assert kept == [False, False, True, False, False, False]
