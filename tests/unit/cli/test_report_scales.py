# SPDX-License-Identifier: Apache-2.0
"""Axes, folded names and words of the report."""

import random

import pytest

from hf_muon.cli.commands.routing_rows import fold_layers
from hf_muon.cli.report.scales import Scale, padded, tick_text, ticks
from hf_muon.cli.report.wording import bytes_text, metric_text, number_text


def test_ticks_lie_inside_and_are_evenly_spaced():
    for _ in range(200):
        low = random.uniform(-100, 100)
        high = low + 10 ** random.uniform(-4, 4)
        values = ticks(low, high)
        assert 2 <= len(values) <= 7
        assert all(low - 1e-6 <= value <= high + 1e-6 for value in values)


def test_whole_ticks_are_whole():
    assert ticks(1, 12, whole=True) == [2, 4, 6, 8, 10, 12] or all(v == int(v) for v in ticks(1, 12, whole=True))
    assert all(value == int(value) for value in ticks(0, 3, whole=True))


def test_a_log_scale_gives_equal_room_to_equal_ratios():
    scale = Scale(1e-4, 1e-2, 0, 100, log=True)
    assert scale(1e-3) == pytest.approx(50)


def test_a_flat_line_still_has_room():
    low, high = padded([3.0, 3.0])
    assert low < 3.0 < high
    assert padded([float("nan")])[0] < padded([float("nan")])[1]


def test_numbers_read_well():
    assert tick_text(0.50) == "0.5" and tick_text(12000) == "12,000"
    assert number_text("exact_match", 0.9) == "90.0%" and number_text("loss", float("nan")) == "diverged"
    assert bytes_text(16.5 * 2**20) == "16.5 MiB" and bytes_text(3) == "3 B"
    assert metric_text("loss", {"mean": 1.0, "min": 0.5, "max": 1.5, "values": [0.5, 1.5]}) == "1.000 (0.500 to 1.500)"


def test_layers_that_agree_fold_into_one_row():
    rows = [{"name": f"h.{i}.w", "shape": [4, 4], "algorithm": "muon", "rule": "linear"} for i in (0, 1, 2, 5)] + [
        {"name": "h.3.w", "shape": [2, 4], "algorithm": "muon", "rule": "linear"}
    ]
    assert [row[0] for row in fold_layers(rows)] == ["h.{0-2,5}.w", "h.3.w"]


def test_a_score_without_spread_is_shown_as_a_bound():
    from hf_muon.cli.report.benchmarks import measured_text

    assert measured_text({"score": 0.25, "stderr": 0.0433, "n": 100}) == "25.0 ± 4.3"
    assert measured_text({"score": 0.0, "stderr": 0.0, "n": 100}) == "0.0 (below 3.0)"
    assert measured_text({"score": 1.0, "stderr": 0.0, "n": 2}) == "100.0 (above 0.0)"
