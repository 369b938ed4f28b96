# SPDX-License-Identifier: Apache-2.0
"""The Muon update against a float64 reference that shares no code with the package."""

from __future__ import annotations

import math

import pytest
import torch

from hf_muon.optim import MuonWithAuxAdam, adjust_scale
from hf_muon.optim.functional import MuonEntry, MuonOptions, muon_update_
from hf_muon.param_groups.views import MatrixView

STEPS, LR, DECAY, MOMENTUM = 8, 0.02, 0.1, 0.95

# name -> (shape, view, slices): slices give each matrix of one leading element in storage, output rows first.
CASES = {
    "tall": ((64, 24), MatrixView()),
    "wide": ((24, 64), MatrixView()),
    "square": ((48, 48), MatrixView()),
    "one_row": ((1, 40), MatrixView()),
    "one_column": ((40, 1), MatrixView()),
    "odd": ((7, 131), MatrixView()),
    "experts": ((3, 24, 16), MatrixView()),
    "experts_wide": ((4, 8, 20), MatrixView()),
    "transposed": ((24, 72), MatrixView(transposed=True)),
    "experts_transposed": ((3, 16, 40), MatrixView(transposed=True)),
    "fused_rows": ((48, 20), MatrixView(parts=(24, 12, 12))),
    "fused_transposed": ((20, 60), MatrixView(transposed=True, parts=(20, 20, 20))),
}


def reference_orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Quintic iteration on the singular values, in float64 through an SVD."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / torch.linalg.vector_norm(s)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


def reference_direction(update: torch.Tensor, view: MatrixView, rule: str) -> torch.Tensor:
    """Orthogonalize every matrix of a storage tensor, scaled by the rule; written out with plain slices."""
    if update.ndim == 3:
        return torch.stack([reference_direction(one, view, rule) for one in update])
    matrix = update.T if view.transposed else update
    result, start = torch.empty_like(matrix), 0
    for rows in view.parts or (matrix.shape[0],):
        n = matrix.shape[1]
        scale = math.sqrt(max(1.0, rows / n)) if rule == "original" else 0.2 * math.sqrt(max(rows, n))
        result[start : start + rows] = scale * reference_orthogonal(matrix[start : start + rows])
        start += rows
    return result.T if view.transposed else result


def run_both(names: list[str], method: str, rule: str, nesterov: bool = True) -> dict[str, float]:
    """Eight steps of ours and of the reference; returns the distance relative to the movement, by name."""
    params = [torch.nn.Parameter(torch.randn(CASES[name][0]) * 0.05) for name in names]
    views = [CASES[name][1] for name in names]
    group = {"params": params, "param_names": names, "matrix_views": views, "use_muon": True}
    optimizer = MuonWithAuxAdam(
        [group],
        lr=LR,
        weight_decay=DECAY,
        momentum=MOMENTUM,
        nesterov=nesterov,
        ns_method=method,
        adjust_lr_fn=rule,
        ns_dtype="float32",
    )
    start = [param.detach().double().clone() for param in params]
    weights = [value.clone() for value in start]
    momenta = [torch.zeros_like(value) for value in start]
    for _ in range(STEPS):
        for i, param in enumerate(params):
            param.grad = torch.randn_like(param)
            grad = param.grad.double()
            momenta[i] = MOMENTUM * momenta[i] + (1 - MOMENTUM) * grad
            update = (1 - MOMENTUM) * grad + MOMENTUM * momenta[i] if nesterov else momenta[i]
            weights[i] = weights[i] * (1 - LR * DECAY) - LR * reference_direction(update, views[i], rule)
        optimizer.step()
    return {
        name: float((param.detach().double() - weight).norm() / (weight - first).norm())
        for name, param, weight, first in zip(names, params, weights, start, strict=True)
    }


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
@pytest.mark.parametrize(("method", "tolerance"), [("standard", 2e-5), ("gram", 2e-3)])
def test_eight_steps_on_twelve_shapes_match_float64(method: str, tolerance: float, rule: str) -> None:
    # fp32 rounding grows by at most the iteration's slope, about 3.44**5, on the smallest singular values; gram
    # squares the condition number on top.
    errors = run_both(list(CASES), method, rule)
    assert max(errors.values()) <= tolerance, errors


def test_without_nesterov_matches_float64() -> None:
    errors = run_both(["wide", "experts"], "standard", "original", nesterov=False)
    assert max(errors.values()) <= 2e-5, errors  # as above


def test_case_03_each_expert_is_orthogonalized_alone() -> None:
    whole = torch.nn.Parameter(torch.randn(3, 6, 10))
    singles = [torch.nn.Parameter(one.clone()) for one in whole.detach()]
    whole.grad = torch.randn_like(whole)
    for one, grad in zip(singles, whole.grad, strict=True):
        one.grad = grad.clone()
    for params in ([whole], singles):
        MuonWithAuxAdam([{"params": params, "use_muon": True}], lr=0.1, ns_dtype="float32").step()
    # One batched product instead of three: fp32 summation order.
    torch.testing.assert_close(whole.detach(), torch.stack([one.detach() for one in singles]), rtol=0, atol=2e-6)


def test_case_06_rule_uses_the_output_dimension_of_a_transposed_view() -> None:
    weight = torch.randn(32, 8)  # (in, out): M = 8, N = 32, so `original` must not enlarge the step
    param = torch.nn.Parameter(weight.clone())
    param.muon_view = MatrixView(transposed=True)
    param.use_muon = True
    param.grad = torch.randn_like(param)
    expected = weight.double() - 0.1 * reference_direction(
        (0.05 + 0.95 * 0.05) * param.grad.double(), param.muon_view, "original"
    )
    MuonWithAuxAdam([param], lr=0.1, adjust_lr_fn="original", ns_dtype="float32").step()
    torch.testing.assert_close(param.detach().double(), expected, rtol=0, atol=1e-5)  # one fp32 step of size 0.1
    assert adjust_scale("original", 32, 8) == 2.0
    assert adjust_scale("original", 8, 32) == 1.0
    assert adjust_scale("none", 32, 8) == 1.0


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
def test_agrees_with_torch_muon(rule: str) -> None:
    ours, theirs = (torch.nn.Parameter(torch.zeros(24, 64)) for _ in range(2))
    group = {"params": [ours], "use_muon": True}
    first = MuonWithAuxAdam([group], lr=0.02, adjust_lr_fn=rule, weight_decay=0.1, ns_dtype="float32")
    second = torch.optim.Muon([theirs], lr=0.02, adjust_lr_fn=rule, weight_decay=0.1)
    for _ in range(4):
        ours.grad = torch.randn_like(ours)
        theirs.grad = ours.grad.clone()
        first.step()
        second.step()
    # torch iterates in bfloat16 (2**-9 relative rounding, amplified by the slope of the iteration).
    assert float((ours - theirs).detach().norm() / theirs.detach().norm()) < 3e-2


def test_update_does_not_depend_on_batching() -> None:
    def run(limit: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        entries = []
        for _ in range(5):
            tensors = [torch.randn(16, 24, generator=generator) for _ in range(3)]
            entries.append(MuonEntry(*tensors, MatrixView()))
        options = MuonOptions(0.1, 0.0, 0.9, True, "standard", 5, "keller", "float32", "none")
        muon_update_(entries, options, max_batch_bytes=limit)
        return [entry.param for entry in entries]

    for one, many in zip(run(1), run(2**20), strict=True):
        torch.testing.assert_close(one, many, rtol=0, atol=2e-6)  # batched against single fp32 products


def test_options_of_a_group_may_change_between_steps() -> None:
    param = torch.nn.Parameter(torch.zeros(4, 6))
    optimizer = MuonWithAuxAdam([{"params": [param], "use_muon": True}], lr=0.1, nesterov=False)
    param.grad = torch.randn_like(param)
    optimizer.step()
    before = param.detach().clone()
    optimizer.param_groups[0].update(lr=0.0, momentum=0.0)
    param.grad = torch.randn_like(param)
    optimizer.step()
    assert torch.equal(param, before)
    assert torch.equal(optimizer.state[param]["momentum_buffer"], param.grad)


def test_case_12_zero_rank_one_and_empty_gradients_stay_finite() -> None:
    shapes = [(6, 9), (1, 9), (9, 1), (0, 5), (6, 9)]
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = MuonWithAuxAdam([{"params": params, "use_muon": True}], lr=0.1, weight_decay=0.0)
    for param in params:
        param.grad = torch.zeros_like(param)
    params[4].grad = torch.outer(torch.randn(6), torch.randn(9))
    optimizer.step()
    for param in params[:4]:
        assert torch.equal(param, torch.ones_like(param))
    assert bool(params[4].isfinite().all())
    assert not torch.equal(params[4], torch.ones_like(params[4]))


def test_case_12_lora_at_step_zero_moves_only_b() -> None:
    a, b = torch.nn.Parameter(torch.randn(4, 12)), torch.nn.Parameter(torch.zeros(10, 4))
    first = a.detach().clone()
    optimizer = MuonWithAuxAdam([{"params": [a, b], "use_muon": True}], lr=0.1)
    (torch.randn(5, 12) @ a.T @ b.T).sum().backward()
    assert not a.grad.any()
    optimizer.step()
    assert torch.equal(a, first)
    assert bool(b.any()) and bool(b.isfinite().all())


@pytest.mark.parametrize("shape", [(5, 7), (2, 5, 7)])
@pytest.mark.parametrize("use_muon", [True, False])
def test_case_16_zero_gradient_still_decays_by_exactly_the_factor(shape: tuple[int, ...], use_muon: bool) -> None:
    param = torch.nn.Parameter(torch.randn(shape))
    expected = param.detach() * 0.95
    optimizer = MuonWithAuxAdam([{"params": [param], "use_muon": use_muon}], lr=0.1, weight_decay=0.5)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(param, expected)


def test_parameter_without_gradient_is_left_alone() -> None:
    param, other = torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(3, 4))
    before = param.detach().clone()
    optimizer = MuonWithAuxAdam([{"params": [param, other], "use_muon": True}], lr=0.1, weight_decay=0.5)
    other.grad = torch.randn_like(other)
    optimizer.step()
    assert torch.equal(param, before)
    assert not optimizer.state[param]["momentum_buffer"].any()


def test_case_11_tiny_gradients_give_the_same_step() -> None:
    grad = torch.randn(8, 12)
    results = []
    for scale in (1.0, 2.0**-40):  # a power of two: the scaled gradient has the same mantissas
        param = torch.nn.Parameter(torch.zeros(8, 12))
        optimizer = MuonWithAuxAdam([{"params": [param], "use_muon": True}], lr=0.1, ns_dtype="float32")
        param.grad = grad * scale
        optimizer.step()
        results.append(param.detach())
    # The norm's reciprocal rounds alike up to one unit in the last place, amplified by the iteration.
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-5)


def test_case_11_one_huge_adamw_gradient_and_clipping_leave_muon_its_step() -> None:
    matrix, bias = torch.nn.Parameter(torch.zeros(8, 12)), torch.nn.Parameter(torch.zeros(4))
    groups = [{"params": [matrix], "use_muon": True}, {"params": [bias], "use_muon": False}]
    optimizer = MuonWithAuxAdam(groups, lr=1.0, adjust_lr_fn="none", ns_dtype="float32")
    matrix.grad, bias.grad = torch.randn(8, 12), torch.full((4,), 1e9)
    expected = reference_orthogonal(matrix.grad)
    torch.nn.utils.clip_grad_norm_([matrix, bias], 1.0)
    optimizer.step()
    torch.testing.assert_close(-matrix.detach().double(), expected, rtol=0, atol=1e-4)  # fp32 on a 1e-9 gradient


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_case_15_low_precision_weights_get_one_rounding_and_a_warning(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    param = torch.nn.Parameter(torch.randn(6, 10).to(dtype))
    wide = torch.nn.Parameter(param.detach().float())
    options = {"lr": 0.05, "weight_decay": 0.1, "ns_dtype": "float32"}
    low = MuonWithAuxAdam([{"params": [param], "param_names": ["w"], "use_muon": True}], **options)
    high = MuonWithAuxAdam([{"params": [wide], "param_names": ["w"], "use_muon": True}], **options)
    param.grad = torch.randn_like(param)
    wide.grad = param.grad.float()
    with caplog.at_level("WARNING", logger="hf_muon.optim"):
        low.step()
        high.step()
        low.step()
    assert low.state[param]["momentum_buffer"].dtype == torch.float32
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    name = str(dtype).removeprefix("torch.")
    assert messages[0].startswith(f"Parameters in {name} have no float32 master copy (w): updates smaller")
    assert "Load the model in float32 and train with bf16=True" in messages[0]
    assert wide.dtype == torch.float32


def test_case_15_one_step_in_low_precision_is_the_float32_step_rounded_once() -> None:
    param = torch.nn.Parameter(torch.randn(6, 10).bfloat16())
    wide = torch.nn.Parameter(param.detach().float())
    for tensor in (param, wide):
        torch.manual_seed(1)
        tensor.grad = torch.randn(6, 10).bfloat16().to(tensor.dtype)
        MuonWithAuxAdam([{"params": [tensor], "use_muon": True}], lr=0.05, weight_decay=0.1).step()
    assert torch.equal(param.detach(), wide.detach().bfloat16())


def test_case_33_step_does_not_depend_on_the_scale_of_the_gradient() -> None:
    # Rescaling a LoRA pair (cA, B/c) scales the gradients by (1/c, c): the absolute step stays, the relative one
    # changes. Documented in docs/optimizer.md.
    steps = []
    for scale in (1.0, 8.0):
        param = torch.nn.Parameter(torch.ones(4, 6) * scale)
        optimizer = MuonWithAuxAdam([{"params": [param], "use_muon": True}], lr=0.1, ns_dtype="float32")
        torch.manual_seed(5)
        param.grad = torch.randn(4, 6) / scale
        optimizer.step()
        steps.append(param.detach() - scale)
    torch.testing.assert_close(steps[0], steps[1], rtol=0, atol=1e-5)  # rounding next to weights of 8


def test_case_33_a_rescaled_pair_moves_its_product_by_the_documented_amount() -> None:
    """dB A grows and B dA shrinks by the factor; with B = 0, as PEFT starts, only the first is there."""
    torch.manual_seed(3)
    a, b, inputs = torch.randn(4, 12), torch.randn(10, 4), torch.randn(5, 12)
    moves = {}
    for scale in (1.0, 8.0):
        pair = [nn_parameter(a * scale), nn_parameter(b / scale)]
        (inputs @ pair[0].T @ pair[1].T).square().sum().backward()
        before = [one.detach().clone() for one in pair]
        MuonWithAuxAdam([{"params": pair, "use_muon": True}], lr=0.01, ns_dtype="float32").step()
        step_a, step_b = (now.detach() - then for now, then in zip(pair, before, strict=True))
        moves[scale] = (step_b @ before[0]).norm(), (before[1] @ step_a).norm()
    ratios = [float(large / small) for small, large in zip(moves[1.0], moves[8.0], strict=True)]
    assert ratios == pytest.approx([8.0, 1 / 8.0], rel=1e-3)  # float32 gradients of another scale, iterated


def nn_parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.clone())


def test_update_rms_is_recorded_only_when_asked_for() -> None:
    matrix, vector = torch.nn.Parameter(torch.zeros(6, 8)), torch.nn.Parameter(torch.zeros(5))
    groups = [{"params": [matrix], "use_muon": True}, {"params": [vector], "use_muon": False}]
    optimizer = MuonWithAuxAdam(groups, lr=0.1, weight_decay=0.0)
    matrix.grad, vector.grad = torch.randn(6, 8), torch.randn(5)
    optimizer.step()
    assert optimizer.update_rms() == {}
    optimizer.track_update_rms = True
    before = matrix.detach().clone(), vector.detach().clone()
    optimizer.step()
    sizes = optimizer.update_rms()
    for key, now, then in zip(("muon", "adamw"), (matrix, vector), before, strict=True):
        assert sizes[key] == pytest.approx(float((now.detach() - then).square().mean().sqrt()), rel=1e-4)
    matrix.grad[0, 0] = math.nan
    optimizer.step()
    assert optimizer.update_rms() == {"muon": 0.0, "adamw": 0.0}


def test_float64_parameters_keep_float64_state_and_update_size() -> None:
    param = torch.nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    optimizer = MuonWithAuxAdam([{"params": [param], "use_muon": True}], lr=0.1)
    optimizer.track_update_rms = True
    param.grad = torch.randn_like(param)
    optimizer.step()
    assert optimizer.state[param]["momentum_buffer"].dtype == torch.float64
    assert optimizer.update_rms()["muon"] == pytest.approx(float(param.detach().square().mean().sqrt()), rel=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_weights_in_float64_keep_their_digits(dtype):
    param = torch.nn.Parameter(torch.randn(24, 40, dtype=torch.float64))
    optimizer = MuonWithAuxAdam(
        [{"params": [param], "use_muon": True}], lr=1e-9, weight_decay=0.0, momentum_dtype=dtype
    )
    before = param.detach().clone()
    param.grad = torch.randn_like(param)
    optimizer.step()
    # The step is lr * 0.2 sqrt(40) times elements of at most about one; rounding to float32 would move by 1e-7.
    assert 0 < (param - before).abs().max() < 3e-9


def test_diagnostics_work_under_another_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        param = torch.nn.Parameter(torch.randn(24, 40, dtype=torch.float32))
        optimizer = MuonWithAuxAdam([{"params": [param], "use_muon": True}], lr=1e-2, diagnostics=1)
        param.grad = torch.randn_like(param)
        optimizer.step()
        assert 1.0 <= optimizer.diagnostics()["stable_rank"] <= 24.5
    finally:
        torch.set_default_dtype(torch.float32)
