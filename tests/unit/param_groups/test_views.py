# SPDX-License-Identifier: Apache-2.0
"""`MatrixView`: matrices() and assemble() are inverse, and each part holds the rows it should."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

from hf_muon.param_groups import MatrixView

VIEWS = [
    (MatrixView(), (6, 4), [(1, 6, 4)]),
    (MatrixView(), (3, 6, 4), [(3, 6, 4)]),
    (MatrixView(transposed=True), (4, 6), [(1, 6, 4)]),
    (MatrixView(parts=(2, 4)), (6, 5), [(1, 2, 5), (1, 4, 5)]),
    (MatrixView(transposed=True, parts=(2, 4)), (5, 6), [(1, 2, 5), (1, 4, 5)]),
    (MatrixView(groups=2, parts=(1, 2)), (6, 5), [(1, 2, 5), (1, 4, 5)]),
    (MatrixView(groups=3, parts=(1, 1), transposed=True), (2, 5, 6), [(2, 3, 5), (2, 3, 5)]),
    (MatrixView(stack=3), (6, 5), [(3, 2, 5)]),
    (MatrixView(stack=3, transposed=True), (6, 5), [(3, 5, 2)]),
    (MatrixView(alternating=3), (4, 6), [(3, 4, 2)]),
    (MatrixView(alternating=3, parts=(1, 3)), (4, 6), [(3, 1, 2), (3, 3, 2)]),
    (MatrixView(parts=(4, 2), head_rows=(2, 0)), (6, 5), [(2, 2, 5), (1, 2, 5)]),
    (MatrixView(flatten=True), (4, 3, 2, 2), [(1, 4, 12)]),
    (MatrixView(flatten=True, transposed=True), (4, 3, 2), [(1, 6, 4)]),
]


@pytest.mark.parametrize(("view", "shape", "expected"), VIEWS)
def test_round_trip_and_shapes(view: MatrixView, shape: tuple[int, ...], expected: list[tuple[int, int, int]]) -> None:
    tensor = torch.randn(shape)
    matrices = view.matrices(tensor)
    assert view.matrix_shapes(shape) == expected
    assert [tuple(m.shape[-2:]) for m in matrices] == [(m, n) for _, m, n in expected]
    assert torch.equal(view.assemble(matrices, like=tensor), tensor)
    assert sum(m.numel() for m in matrices) == tensor.numel()


def test_case_14_grouped_parts_take_the_rows_of_every_group() -> None:
    rows = torch.arange(12.0).unsqueeze(1).expand(12, 3)  # 2 heads x (2 query, 2 key, 2 value) rows
    query, key, value = MatrixView(groups=2, parts=(2, 2, 2)).matrices(rows)
    assert query[:, 0].tolist() == [0, 1, 6, 7]
    assert key[:, 0].tolist() == [2, 3, 8, 9]
    assert value[:, 0].tolist() == [4, 5, 10, 11]


def test_single_matrices_are_views_of_the_parameter() -> None:
    tensor = torch.randn(6, 4)
    for view in (MatrixView(), MatrixView(transposed=True), MatrixView(parts=(2, 4))):
        assert all(
            m.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for m in view.matrices(tensor)
        )


def test_view_is_hashable_and_serialisable() -> None:
    view = MatrixView(transposed=True, groups=2, parts=(3, 1), stack=1, flatten=False)
    assert pickle.loads(pickle.dumps(view)) == view
    assert MatrixView.from_dict(json.loads(json.dumps(view.to_dict()))) == view
    assert MatrixView.from_dict({}) == MatrixView()
    assert len({view, MatrixView(transposed=True, groups=2, parts=(3, 1)), MatrixView()}) == 2
    assert MatrixView().is_plain and not view.is_plain


def test_assemble_gives_the_dtype_of_like() -> None:
    like = torch.zeros(4, 6, dtype=torch.bfloat16)
    view = MatrixView(parts=(1, 3))
    assert view.assemble([m.float() for m in view.matrices(like)], like=like).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: MatrixView(groups=0), "MatrixView must have groups, stack and parts of at least 1"),
        (lambda: MatrixView(parts=(2, 2)).matrices(torch.zeros(5, 3)), "never local rows"),
        (lambda: MatrixView().matrices(torch.zeros(5)), "MatrixView must see at least two axes"),
        (lambda: MatrixView(stack=2).matrices(torch.zeros(5, 3)), "MatrixView must see rows in 2 equal matrices"),
        (lambda: MatrixView(alternating=2).matrices(torch.zeros(4, 3)), "MatrixView must see columns of 2 equal"),
        (lambda: MatrixView(parts=(2, 3)).assemble([torch.zeros(5, 3)]), "assemble must get 2 matrices; got 1"),
        (lambda: MatrixView(flatten=True).assemble([torch.zeros(5, 3)]), "assemble must get `like`"),
    ],
)
def test_errors_say_what_to_do(action, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        action()
