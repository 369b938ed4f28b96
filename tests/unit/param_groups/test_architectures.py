# SPDX-License-Identifier: Apache-2.0
"""Every architecture of `expected_routing` is tagged exactly as that hand-written file says."""

from __future__ import annotations

import pytest

from hf_muon.param_groups import explain_parameters, summarize
from tests.support.routing_table import TABLE, table_line
from tests.support.tiny_models import tiny_model
from tests.unit.param_groups.expected_routing import EXPECTED, expected_names, short_name


def test_case_01_at_least_sixty_architectures_are_covered() -> None:
    assert len({model_type for model_type, _ in EXPECTED}) >= 60


@pytest.mark.parametrize(("model_type", "head"), sorted(EXPECTED), ids=["-".join(pair) for pair in sorted(EXPECTED)])
def test_case_01_architecture_is_tagged_as_the_oracle_says(model_type: str, head: str) -> None:
    model = tiny_model(model_type, head, device="meta")
    rows = explain_parameters(model)
    on_muon, several = expected_names(model_type, head)
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}

    wanted = {name for name in names if short_name(name) in on_muon}
    assert {row.name for row in rows if row.algorithm == "muon"} == wanted
    assert {short_name(name) for name in wanted} == on_muon, "the oracle names a tensor that the model lacks"
    split = {row.name for row in rows if len(row.view.parts) > 1}
    assert split == {name for name in wanted if short_name(name) in several}

    assert [row.name for row in rows] == list(names)
    for row in rows:
        if row.is_muon:  # the matrices hold each element once
            assert sum(b * m * n for b, m, n in row.view.matrix_shapes(row.shape)) == row.count
    summary = summarize(rows)
    assert summary.muon_elements + summary.adamw_elements == sum(p.numel() for p in names.values())
    line = table_line(model_type, head, rows)
    assert line in TABLE.read_text().splitlines(), "run python -m tests.support.routing_table"
