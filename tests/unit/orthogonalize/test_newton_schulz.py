# SPDX-License-Identifier: Apache-2.0
import importlib.util
import pathlib

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_muon.orthogonalize import (
    COEFFICIENTS,
    coefficient_rows,
    newton_schulz,
    newton_schulz_many,
    ns_flops,
    resolve_dtype,
    resolve_method,
)

SHAPES = [(1, 9), (9, 1), (24, 24), (16, 96), (96, 16), (30, 40), (3, 12, 60), (2, 2, 20, 8), (1030, 1100)]
TOLERANCE = {"standard": 2e-5, "gram": 2e-3}  # the acceptance bounds for float32


def by_svd(x, rows):
    """Apply the scalar polynomials to the singular values in float64."""
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    for a, b, c in rows:
        s = a * s + b * s**3 + c * s**5
    return u * s.unsqueeze(-2) @ v


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_polynomial_of_the_singular_values(shape, method):
    x = torch.randn(shape)
    want = by_svd(x, coefficient_rows("keller", 5))
    got = newton_schulz(x, method=method, dtype="float32")
    assert got.shape == x.shape and got.dtype == x.dtype
    assert (got - want).norm() <= TOLERANCE[method] * want.norm()


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_case_11_scale_invariant_over_the_range_of_float32(method):
    x = torch.randn(12, 60)
    want = newton_schulz(x, method=method)
    for scale in (1e-37, 1e-20, 1e20, 1e37):
        torch.testing.assert_close(newton_schulz(x * scale, method=method), want, rtol=0, atol=2e-5)
    denormal = torch.full((4, 8), 1e-44)  # a few units of the smallest float32: one direction, like all ones
    ones = newton_schulz(torch.ones(4, 8), method=method)
    torch.testing.assert_close(newton_schulz(denormal, method=method), ones, rtol=0, atol=1e-6)


def test_case_12_zero_in_zero_out_also_inside_a_batch():
    x = torch.randn(3, 8, 40)
    x[1] = 0
    y = newton_schulz(x)
    assert torch.equal(y[1], torch.zeros(8, 40)) and y[0].norm() > 1 and y.isfinite().all()
    assert newton_schulz(torch.empty(0, 5)).shape == (0, 5)
    assert newton_schulz(torch.empty(0, 4, 5)).shape == (0, 4, 5)


def test_not_finite_matrices_stay_alone():
    x = torch.randn(2, 8, 40)
    x[0, 0, 0] = float("inf")
    y = newton_schulz(x)
    assert y[0].isnan().all() and y[1].isfinite().all()


def test_input_is_neither_changed_nor_aliased():
    x = torch.randn(6, 6)
    before = x.clone()
    y = newton_schulz(x)
    assert torch.equal(x, before) and y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_case_31_twelve_shapes_under_compile():
    compiled = torch.compile(lambda x: newton_schulz(x) * 2, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for n in range(4, 16):
            x = torch.randn(n, 3 * n)
            torch.testing.assert_close(compiled(x), newton_schulz(x) * 2)


def test_many_equals_one_by_one():
    xs = [torch.randn(s) for s in [(8, 30), (5, 5), (8, 30), (2, 8, 30), (8, 30)]]
    for x, y in zip(xs, newton_schulz_many(xs), strict=True):
        torch.testing.assert_close(y, newton_schulz(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cost_model_counts_the_products_that_run(shape, method):
    x = torch.randn(shape)
    with FlopCounterMode(display=False) as counter:
        newton_schulz(x, method=method)
    assert counter.get_total_flops() == ns_flops(*shape[-2:], method=method, batch=x[..., 0, 0].numel())


def test_gram_only_where_cheaper():
    assert resolve_method("gram", 64, 64, 5) == "standard"
    assert resolve_method("gram", 64, 256, 5) == resolve_method("gram", 256, 64, 5) == "gram"
    assert resolve_method("standard", 64, 256, 5) == "standard"


def test_polar_express_rows_are_rederived():
    path = pathlib.Path(__file__).with_name("minimax_quintic.py")
    spec = importlib.util.spec_from_file_location("minimax_quintic", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    derived = torch.tensor(module.derive(8), dtype=torch.float64)
    table = torch.tensor(COEFFICIENTS["polar_express"], dtype=torch.float64)
    torch.testing.assert_close(table, derived, rtol=1e-7, atol=0)  # the last row is the limit, reached to 1e-8


def test_polar_express_reaches_one_in_eight_steps():
    u, _, v = torch.linalg.svd(torch.randn(40, 90), full_matrices=False)
    x = u * torch.logspace(0, -3, 40) @ v
    s = torch.linalg.svdvals(newton_schulz(x, coefficients="polar_express", steps=8, dtype="float32"))
    assert s.min() >= 0.95 and s.max() <= 1.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "gramm"}, "method must be .*'gramm'.*'gram'"),
        ({"steps": 0}, "steps must be .* got 0"),
        ({"eps": 0.0}, "eps must be .* got 0.0"),
        ({"coefficients": "kelr"}, "coefficients must .*'kelr'.*'keller'"),
        ({"coefficients": [(1, 2)]}, "coefficients must be rows"),
        ({"coefficients": [(1, 2, 3)] * 2}, "one per step .5.; got 2 rows"),
        ({"dtype": "bflot16"}, "dtype must .*'bflot16'.*'bfloat16'"),
        ({"dtype": torch.int8}, "dtype must .*torch.int8"),
    ],
)
def test_bad_options_name_the_value(options, message):
    with pytest.raises(ValueError, match=message):
        newton_schulz(torch.randn(3, 3), **options)


def test_bad_matrices():
    with pytest.raises(ValueError, match=r"two dimensions; got shape \(3,\)"):
        newton_schulz(torch.randn(3))
    for bad in (torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.complex64)):
        with pytest.raises(TypeError, match=f"floating dtype; got {bad.dtype}"):
            newton_schulz(bad)
    with pytest.raises(TypeError, match="must be a tensor; got list"):
        newton_schulz([[1.0]])


def test_auto_dtype():
    assert resolve_dtype(None, "cpu", torch.float64) == torch.float64
    assert resolve_dtype("auto", "mps", torch.float32) == torch.float32
    assert resolve_dtype("auto", "cpu", torch.float16) in (torch.float32, torch.bfloat16)


def test_a_parameter_can_be_given_and_the_result_carries_no_graph():
    weight = torch.nn.Parameter(torch.randn(8, 16))
    result = newton_schulz(weight)
    assert not result.requires_grad and torch.equal(result, newton_schulz(weight.detach()))


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", [(4, 4), (60, 77), (16, 320), (300, 300)])
def test_a_result_does_not_depend_on_its_neighbours(method, shape):
    """Owners stack other matrices than one process does: the bits must not depend on that."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, the BLAS may split one product differently in a batch
    try:
        stack = torch.randn(5, *shape)
        alone = [newton_schulz(matrix, method=method) for matrix in stack]
        for start, end in [(0, 1), (0, 2), (1, 4), (0, 5)]:
            assert torch.equal(newton_schulz(stack[start:end], method=method), torch.stack(alone[start:end]))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(48, 32), (300, 260)])
def test_bits_do_not_depend_on_how_a_matrix_is_stored(dtype, shape):
    for _ in range(6):
        x = torch.randn(shape).to(dtype)
        stored = x.mT.contiguous().mT
        assert torch.equal(newton_schulz(x), newton_schulz(stored))
        assert torch.equal(newton_schulz_many([x])[0], newton_schulz_many([stored.clone()], in_place=True)[0])


@pytest.mark.parametrize("shape", [(4, 6), (200, 200)])
@pytest.mark.parametrize("eps", [1e-300, 1e-46, 1e-7])
def test_a_zero_matrix_is_zero_for_every_eps(shape, eps):
    assert torch.equal(newton_schulz(torch.zeros(shape), eps=eps), torch.zeros(shape))


def test_the_default_works_where_denormals_are_flushed():
    if not torch.set_flush_denormal(True):  # this processor cannot
        return
    try:
        results = [newton_schulz(torch.zeros(shape)) for shape in ((4, 6), (200, 200))]
        moved = newton_schulz(torch.randn(4, 6))
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(result, torch.zeros_like(result)) for result in results)
    assert moved.abs().max() > 0.1
