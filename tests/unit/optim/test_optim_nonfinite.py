# SPDX-License-Identifier: Apache-2.0
"""Non-finite, sparse and complex gradients: nothing is touched."""

from __future__ import annotations

import math

import pytest
import torch

from hf_muon.optim import MuonWithAuxAdam
from hf_muon.optim.finite_guard import nonfinite_flag

POLICIES = pytest.mark.parametrize("on_device", [None, True], ids=["host", "masked"])


@POLICIES
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["up.weight", "norm.bias"])
def test_case_13_one_bad_element_skips_the_whole_step(
    make_model, give_gradients, snapshot, same, caplog, where: str, bad: float, on_device: bool | None
) -> None:
    model = make_model(0)
    optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01, weight_decay=0.1)
    optimizer.skip_on_device = on_device
    give_gradients(model, 1)
    optimizer.step()
    before = snapshot(optimizer)
    give_gradients(model, 2)
    model.get_parameter(where).grad.view(-1)[0] = bad
    with caplog.at_level("WARNING", logger="hf_muon.optim"):
        optimizer.step()
        assert optimizer.last_step_skipped
    assert same(before, snapshot(optimizer))
    assert optimizer.num_skipped_steps == 1
    skips = [record for record in caplog.records if record.getMessage().startswith("Step skipped: ")]
    assert len(skips) == 1
    give_gradients(model, 3)
    optimizer.step()
    assert not optimizer.last_step_skipped
    after = snapshot(optimizer)
    assert all(bool(value.isfinite().all()) for value in after)
    assert not same(before, after)


def test_case_13_masked_and_host_steps_are_the_same_bits(make_model, give_gradients, snapshot, same) -> None:
    results = []
    for on_device in (None, True):
        model = make_model(0)
        # Fused AdamW for both: the masked step needs it, and its rounding differs from the plain loop's.
        optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01, weight_decay=0.1, fused_adam="true")
        optimizer.skip_on_device = on_device
        for step in range(5):
            give_gradients(model, step)
            if step == 2:
                model.down.weight.grad[0, 0] = math.nan
            optimizer.step()
        assert optimizer.num_skipped_steps == 1
        results.append(snapshot(optimizer))
    assert same(*results)


@POLICIES
def test_case_13_ten_skipped_steps_in_a_row_raise_and_leave_state_intact(
    make_model, give_gradients, snapshot, same, on_device: bool | None
) -> None:
    model = make_model(0)
    optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01)
    optimizer.skip_on_device = on_device
    give_gradients(model, 1)
    optimizer.step()
    before = snapshot(optimizer)
    model.norm.weight.grad[0] = math.inf
    lag = 0 if on_device is None else 2  # the masked path reads its flags two steps later
    for _ in range(9 + lag):
        optimizer.step()
    with pytest.raises(
        RuntimeError, match=r"norm\.weight\.grad must be finite.*10 steps in a row.*learning rate.*data"
    ):
        optimizer.step()
    assert same(before, snapshot(optimizer))
    give_gradients(model, 2)
    optimizer.skip_on_device = None
    optimizer.rebuild_state()
    optimizer.step()
    assert not optimizer.last_step_skipped


def test_case_13_a_finite_step_restarts_the_count(make_model, give_gradients) -> None:
    model = make_model(0)
    optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01)
    for step in range(20):
        give_gradients(model, step)
        if step % 7:
            model.up.bias.grad[0] = math.nan
        optimizer.step()
    assert optimizer.num_skipped_steps == 17


@POLICIES
def test_case_13_finite_reducer_decides_for_all_ranks(
    make_model, give_gradients, snapshot, same, on_device: bool | None
) -> None:
    model = make_model(0)
    optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01)
    optimizer.skip_on_device = on_device
    seen = []

    def other_rank_is_bad(flag: torch.Tensor) -> torch.Tensor:
        seen.append(float(flag))
        return torch.ones_like(flag)

    optimizer.finite_reducer = other_rank_is_bad
    before = snapshot(optimizer)
    give_gradients(model, 1)
    optimizer.step()
    assert seen == [0.0]
    assert same(before, snapshot(optimizer))
    assert optimizer.num_skipped_steps == 1


def test_large_but_finite_gradients_are_not_skipped(make_model, give_gradients) -> None:
    model = make_model(0)
    optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01)
    give_gradients(model, 1)
    for param in model.parameters():
        param.grad.fill_(torch.finfo(torch.float32).max)  # its norm overflows; the elements do not
    optimizer.step()
    assert not optimizer.last_step_skipped


def test_sparse_gradient_is_refused_by_name_before_state_is_touched(snapshot, same) -> None:
    embedding, linear = torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 2)
    groups = [
        {"params": [("linear.weight", linear.weight)], "use_muon": True},
        {"params": [("embed.weight", embedding.weight)], "use_muon": False},
    ]
    optimizer = MuonWithAuxAdam(groups, lr=0.1)
    before = snapshot(optimizer)
    linear(embedding(torch.tensor([1, 2]))).sum().backward()
    with pytest.raises(NotImplementedError, match=r"embed\.weight\.grad must be dense; .*sparse=False"):
        optimizer.step()
    assert same(before, snapshot(optimizer))


@pytest.mark.parametrize("use_muon", [True, False])
def test_complex_parameter_is_refused_by_name(use_muon: bool) -> None:
    param = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.complex64))
    with pytest.raises(NotImplementedError, match=r"filter must be real; got torch\.complex64\. .*view_as_real"):
        MuonWithAuxAdam([{"params": [("filter", param)], "use_muon": use_muon}])


def test_case_20_clipping_acts_on_raw_gradients_with_the_joint_norm(make_model, give_gradients) -> None:
    results = []
    for by_hand in (True, False):
        model = make_model(0)
        optimizer = MuonWithAuxAdam(model.named_parameters(), lr=0.01, ns_dtype="float32")
        give_gradients(model, 1)
        grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
        norm = torch.cat([grad.flatten() for grad in grads]).double().norm()
        before = model.down.weight.detach().clone()
        if by_hand:
            for grad in grads:
                grad.mul_(float(0.5 / norm))
        else:
            # 1e-6: torch adds it to the norm, and sums in float32.
            assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)) == pytest.approx(
                float(norm), rel=1e-6
            )
        optimizer.step()
        results.append([param.detach().clone() for param in model.parameters()])
        # The orthogonalized step itself keeps its size: clipping the update would have shrunk it.
        rms = float((model.down.weight - before).detach().square().mean().sqrt())
        assert 0.0012 < rms < 0.0028  # 0.2 * lr times singular values in about [0.68, 1.13], rank 6 of 12
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)  # the two clip factors differ by rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_finite_check_finds_one_element_anywhere(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    grads = [
        torch.randn(37, 41).to(dtype),
        torch.empty(0, 3, dtype=dtype),
        torch.full((1003,), limits.max, dtype=dtype),
    ]
    grads[0].view(-1)[:2] = torch.tensor([limits.min, 0.0], dtype=dtype)
    device = torch.device("cpu")
    assert nonfinite_flag(grads, device) == 0
    assert nonfinite_flag([grads[1]], device) == 0
    places = [0, 1, 7, 8, 500, 1002]  # the ends, and both sides of a vector register
    for bad in (math.inf, -math.inf, math.nan):
        for place in places:
            spoilt = grads[2].clone()
            spoilt[place] = bad
            assert nonfinite_flag([grads[0], spoilt], device) == 1
            assert nonfinite_flag([spoilt.view(17, 59).T, grads[0]], device) == 1
